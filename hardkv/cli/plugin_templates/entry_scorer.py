"""Scorer `my_method`: each token is scored once, when it enters the cache."""

from __future__ import annotations

import torch
from pydantic import Field

import hardkv


class MyMethod(hardkv.EntryScorer):
    """Tokens with large values and small keys score higher; the score stays with the token."""

    name = "my_method"

    class Config(hardkv.Options):
        """What a configuration may set beside `name`."""

        key_weight: float = Field(default=0.5, ge=0.0, le=1.0, description="Share of the key's norm in the score.")

    config: Config

    def enter(self, tokens: hardkv.EnteringTokens) -> torch.Tensor:
        """Give scores `[R, H, N]` of tokens that enter: a whole prompt's, or one of each running sequence."""
        weight = self.config.key_weight
        value_size: torch.Tensor = torch.linalg.vector_norm(tokens.values.float(), dim=-1)
        key_size: torch.Tensor = torch.linalg.vector_norm(tokens.keys.float(), dim=-1)
        return (1 - weight) * value_size - weight * key_size


@hardkv.hookimpl
def hardkv_components() -> list[type[hardkv.Component]]:
    """Give what this plugin offers."""
    return [MyMethod]
