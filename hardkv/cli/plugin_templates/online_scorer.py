"""Scorer `my_method`: attention gathered while decoding, step by step."""

from __future__ import annotations

import torch
from pydantic import Field

import hardkv


class MyMethod(hardkv.OnlineScorer):
    """The attention that a token receives from every query since the last compression, newer queries weighing more."""

    name = "my_method"

    class Config(hardkv.Options):
        """What a configuration may set beside `name`."""

        decay: float = Field(
            default=0.98, gt=0.0, le=1.0, description="What is left of older attention after each step; 1 is a sum."
        )

    config: Config

    def update(self, statistic: torch.Tensor, probabilities: torch.Tensor) -> None:
        """Fold a step's `probabilities [..., G, N]` into `statistic [..., N]`, in place; each slot by itself."""
        statistic.mul_(self.config.decay).add_(probabilities.mean(-2))

    def finish(self, statistic: torch.Tensor, view: hardkv.ScoreView) -> torch.Tensor:
        """Turn the statistic `[B, H, N]` into scores `[B, H, 1, N]`, higher = keep."""
        return statistic.masked_fill(~view.valid, 0.0)[:, :, None]


@hardkv.hookimpl
def hardkv_components() -> list[type[hardkv.Component]]:
    """Give what this plugin offers."""
    return [MyMethod]
