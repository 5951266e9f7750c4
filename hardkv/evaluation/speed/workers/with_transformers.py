"""Decodes with a cache of transformers: dynamic, or static with room for all tokens from the start."""

from __future__ import annotations

from typing import Any

from causal import CausalPeer  # type: ignore[import-not-found]  # beside this file
from serving import Channel, serve  # type: ignore[import-not-found]  # beside this file
from transformers import DynamicCache, StaticCache


class TransformersPeer(CausalPeer):  # type: ignore[misc]  # not found by mypy, see above
    """Keeps every token."""

    def new_cache(self, tokens: int) -> Any:
        if self.settings["cache"] == "static":
            return StaticCache(config=self.model.config, max_cache_len=tokens)
        return DynamicCache()


if __name__ == "__main__":
    serve(TransformersPeer(), Channel())
