"""Scorer `my_method`: the attention that each token receives, times the size of its value."""

from __future__ import annotations

import torch
from pydantic import Field

import hardkv


class MyMethod(hardkv.ImportanceScorer):
    """Mean attention over the recent queries, times a power of the value's norm."""

    name = "my_method"

    class Config(hardkv.Options):
        """What a configuration may set beside `name`."""

        value_power: float = Field(
            default=1.0, ge=0.0, le=4.0, description="Power of the value's norm; 0 scores attention alone."
        )

    config: Config

    @property
    def needs_queries(self) -> bool:
        # With False no ring of recent queries is held, and the view has no `queries`, `logits` and `attention`.
        return True

    def score(self, view: hardkv.ScoreView) -> torch.Tensor:
        """Give scores `[B, H, 1, N]`, higher = keep."""
        written = view.row_valid.sum(-1).clamp_min(1)[:, None, None]  # [B, 1, 1]
        attention = view.attention.mean(2).sum(2) / written  # [B, H, N]
        # Slots that are not valid may hold anything, NaN too: mask them before a number of theirs spreads.
        values = view.values.float().masked_fill(~view.valid[..., None], 0.0)
        size: torch.Tensor = torch.linalg.vector_norm(values, dim=-1)  # [B, H, N]
        scores = attention * size**self.config.value_power
        return scores.masked_fill(~view.valid, 0.0)[:, :, None]


@hardkv.hookimpl
def hardkv_components() -> list[type[hardkv.Component]]:
    """Give what this plugin offers."""
    return [MyMethod]
