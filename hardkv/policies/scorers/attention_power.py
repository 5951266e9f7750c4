"""Scorer `attention_power`: a power mean of attention over a whole round, times what the value adds."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hardkv.interfaces import OnlineScorer, Options, Space
from hardkv.types import FusedUpdate, ScoreView

# p ** power stays above this, well clear of float32 denormals (below 1.2e-38), which are slow on CPUs.
_SMALLEST_POWER = 1e-36


class AttentionPower(OnlineScorer):
    """Power sum of attention over the queries of a round, weighted by how far a value stands from the mean value.

    Each step: `x_j <- decay * x_j + mean_a p[a, j] ** power`. At the round:
    `s_j = x_j ** (1 / power) * |v_j - mean v|`, the norm over D, the mean over the head's valid slots.
    A high power comes close to the maximum over queries, but lets repeated use count.
    `p` is clamped from below (1e-8 at power 4), so a token that nobody reads scores about 1e-8, not 0.

    Ours.
    """

    name: ClassVar[str] = "attention_power"
    space: ClassVar[Space] = "probability"

    class Config(Options):
        """Options of `attention_power`."""

        power: float = Field(
            default=4.0,
            ge=1.0,
            le=16.0,
            description="Exponent of each probability: 1 adds them up, large values approach the maximum.",
        )
        decay: float = Field(
            default=0.98,
            gt=0.0,
            le=1.0,
            description="Weight of the past per decode step; 0.98 lets the newest 50 queries dominate.",
        )
        value_weight: bool = Field(
            default=True,
            description="Multiply by |v - mean v|: a token whose value is the mean changes no output.",
        )

    config: Config

    @property
    def fused(self) -> FusedUpdate:
        """The update as a decayed power sum."""
        return FusedUpdate("power", self.config.power, self.config.decay, self._floor)

    def update(self, statistic: Tensor, probabilities: Tensor) -> None:
        """Fold `probabilities [..., G, N]` (overwritten) into `statistic [..., N]`."""
        powers = self._power(probabilities.clamp_(min=self._floor))
        statistic.mul_(self.config.decay).add_(powers.mean(-2))

    def finish(self, statistic: Tensor, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero at invalid slots."""
        scores = statistic.masked_fill(~view.valid, 0.0).pow(1.0 / self.config.power)
        if self.config.value_weight:
            scores = scores * _value_distance(view)
        return scores[:, :, None]

    @property
    def _floor(self) -> float:
        return float(max(1e-8, _SMALLEST_POWER ** (1.0 / self.config.power)))

    def _power(self, probabilities: Tensor) -> Tensor:
        # Two squarings are far cheaper than a general power on a CPU.
        if self.config.power == 4.0:
            return probabilities.square_().square_()
        return probabilities.pow_(self.config.power)


def _value_distance(view: ScoreView) -> Tensor:
    """Norm of each value's distance from the mean over the head's valid slots, `[B, H, N]`, zero where invalid."""
    valid = view.valid[..., None]  # [B, H, N, 1]
    values = view.values.float().masked_fill(~valid, 0.0)  # [B, H, N, D]
    mean = values.sum(-2, keepdim=True) / valid.sum(-2, keepdim=True).clamp_min(1)
    distance: Tensor = torch.linalg.vector_norm(values - mean, dim=-1)
    return distance.masked_fill_(~view.valid, 0.0)
