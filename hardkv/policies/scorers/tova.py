"""Scorer `tova`: attention of the last query alone, one set per layer."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from hardkv.interfaces import OnlineScorer, Space
from hardkv.types import FusedUpdate, ScoreView


class Tova(OnlineScorer):
    """Attention of the newest query, averaged over all heads of the layer.

    `s_j = mean_{h, a} p[h, a, j]` of the last decode step, the same for every head. All heads then keep the same slots,
    which is what makes slot j the same token in each; a head where slot j is invalid is left out of the mean.

    Source: TOVA (arXiv 2401.06104, section 3).
    """

    name: ClassVar[str] = "tova"
    space: ClassVar[Space] = "probability"

    @property
    def fused(self) -> FusedUpdate:
        """The update as a sum of which nothing old is kept."""
        return FusedUpdate("power", decay=0.0)

    def update(self, statistic: Tensor, probabilities: Tensor) -> None:
        """Replace `statistic [..., N]` by the group mean of `probabilities [..., G, N]`."""
        statistic.copy_(probabilities.mean(-2))

    def finish(self, statistic: Tensor, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero where a slot is invalid in that head."""
        total = statistic.masked_fill(~view.valid, 0.0).sum(1, keepdim=True)  # [B, 1, N]
        mean = total / view.valid.sum(1, keepdim=True).clamp_min(1)
        return mean.masked_fill(~view.valid, 0.0)[:, :, None]
