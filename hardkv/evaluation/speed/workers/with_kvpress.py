"""Decodes with kvpress: one press for the prompt and, inside a `DecodingPress`, every interval after it."""

from __future__ import annotations

import importlib
import time
from contextlib import AbstractContextManager
from typing import Any

from causal import CausalPeer  # type: ignore[import-not-found]  # beside this file
from serving import Channel, Reply, serve  # type: ignore[import-not-found]  # beside this file
from transformers import DynamicCache


class KVPressPeer(CausalPeer):  # type: ignore[misc]  # not found by mypy, see above
    """The same mean budget and interval as hardkv, uniform over heads, as its `DecodingPress` has them."""

    packages = ("torch", "transformers", "kvpress")

    def new_cache(self, tokens: int) -> Any:
        return DynamicCache()

    def prepare(self, settings: dict[str, Any], prompt_tokens: int) -> None:
        kvpress = importlib.import_module("kvpress")
        kind, target = getattr(kvpress, settings["press"]), settings["mean_tokens"]
        prompt = kind(**settings["options"])
        prompt.compression_ratio = max(0.0, 1 - target / prompt_tokens)
        self.decoding = kvpress.DecodingPress(
            base_press=kind(**settings["options"]),
            compression_interval=settings["interval"],
            target_size=target,
            hidden_states_buffer_size=settings["query_rows"],
        )
        self.spent, self.calls = 0.0, 0
        for press in (prompt, self.decoding):
            press.compress = self._timed(press.compress)
        self.press = kvpress.PrefillDecodingPress(prefilling_press=prompt, decoding_press=self.decoding)

    def compressing(self) -> AbstractContextManager[Any]:
        manager: AbstractContextManager[Any] = self.press(self.model)
        return manager

    def compressed(self) -> Reply:
        seconds, calls = self.spent, self.calls
        self.spent, self.calls = 0.0, 0
        batch, layers = self.cache.layers[0].keys.shape[0], len(self.cache.layers)
        return {"compression_seconds": seconds, "passes": calls // layers * batch, "mean_tokens": self.kept}

    def held(self) -> list[Any]:
        return [tensor for kept in self.decoding.hidden_states_buffer.values() for tensor in kept]

    def _timed(self, compress: Any) -> Any:
        self.kept: float | None = None

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            keys, values = compress(*arguments)
            self.kept = float(keys.shape[2])
            self.spent += time.perf_counter() - started
            self.calls += 1
            return keys, values

        return timed


if __name__ == "__main__":
    serve(KVPressPeer(), Channel())
