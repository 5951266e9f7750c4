"""Scorer `streaming`: newer is better."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hardkv.interfaces import ImportanceScorer, Space
from hardkv.types import ScoreView


class Streaming(ImportanceScorer):
    """Recency: `s_j = position_j`, so that the newest tokens stay. R = 1.

    Sinks need no score: they are protected by mask. Positions are exact in float32 below 2**24.

    Source: StreamingLLM (arXiv 2309.17453).
    """

    name: ClassVar[str] = "streaming"
    space: ClassVar[Space] = "unbounded"

    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero at invalid slots."""
        return view.positions.to(torch.float32).masked_fill(~view.valid, 0.0)[:, :, None]
