"""Scorer `window_max`: the most that any recent query paid to a token."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hardkv.interfaces import OnlineScorer, Options, Space
from hardkv.types import FusedUpdate, ScoreView


class WindowMax(OnlineScorer):
    """Largest attention that a token got from any query and query head.

    `s_j = max_{a, i} A[a, i, j]`. Online, the maximum runs over every query of the round and needs no query ring;
    otherwise it runs over the rows of the query window. Over the same queries both give the same scores.

    Source: the cautious update of HARD-KV (arXiv 2606.28831) as a score: a token stays if any row wants it.
    """

    name: ClassVar[str] = "window_max"
    space: ClassVar[Space] = "probability"

    class Config(Options):
        """Options of `window_max`."""

        online: bool = Field(
            default=True,
            description="Ride along with decoding; false looks back at the query window, and can score masked slots.",
        )

    config: Config

    @property
    def online(self) -> bool:
        """Follows the option `online`."""
        return self.config.online

    @property
    def needs_queries(self) -> bool:
        """True when not online."""
        return not self.config.online

    @property
    def fused(self) -> FusedUpdate:
        """The update as a running maximum."""
        return FusedUpdate("max")

    def update(self, statistic: Tensor, probabilities: Tensor) -> None:
        """Fold `probabilities [..., G, N]` into `statistic [..., N]`."""
        torch.maximum(statistic, probabilities.amax(-2), out=statistic)

    def finish(self, statistic: Tensor, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero at invalid slots."""
        return statistic.masked_fill(~view.valid, 0.0)[:, :, None]

    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]` from the statistic, or from the query window when not online."""
        if self.config.online:
            return super().score(view)
        return view.attention.amax((2, 3))[:, :, None]
