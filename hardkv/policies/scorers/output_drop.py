"""Scorer `output_drop`: how far the attention output moves when a token goes."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hardkv.interfaces import ImportanceScorer, Options, Space
from hardkv.policies.scorers.values import value_distance
from hardkv.policies.scorers.window_rows import rows_newer
from hardkv.types import ScoreView

# Where a token leaves the others less attention than this, 1 - A and |o - v| are both rounding.
_SMALLEST_REST = 1e-4


class OutputDrop(ImportanceScorer):
    """Power mean, over the query window, of the change in output when a token is dropped and the rest takes its share.

    `o[a, i] = sum_j A[a, i, j] v_j`, `x[a, i, j] = A / (1 - A) * |o[a, i] - v_j|`, which is exactly that change, and
    `s_j = mean_a (sum_i w_i x[a, i, j] ** norm / sum_i w_i) ** (1 / norm)`. `w_i` rises evenly by rank from `recency`
    at the oldest written row to 1 at the newest. R = 1. It has the unit of the output in every head, so it is compared
    over heads as it is.
    Where `1 - A` is below 1e-4 the rest is lost in rounding and counts as the mean value: `x = A |v_j - mean v|`, the
    mean over the head's valid slots. A row that sees one token alone would lose all it has: the same term holds.

    Ours.
    """

    name: ClassVar[str] = "output_drop"
    space: ClassVar[Space] = "probability"

    class Config(Options):
        """Options of `output_drop`."""

        norm: float = Field(
            default=2.0, ge=1.0, le=16.0, description="Exponent over rows: 2 is the rms, higher comes near the maximum."
        )
        recency: float = Field(
            default=1.0,
            ge=0.0,
            le=1.0,
            description="Weight of the oldest row, the newest has 1: even by default; less favours newer queries.",
        )

    config: Config

    @property
    def needs_queries(self) -> bool:
        """Always true: this scorer looks back at the query window."""
        return True

    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero at invalid slots."""
        values = view.values.float().masked_fill(~view.valid[..., None], 0.0)  # [B, H, N, D]
        offset = value_distance(view)[:, :, None]  # [B, H, 1, N]
        weight = self._row_weights(view).pow(1.0 / self.config.norm)[:, None, :, None]  # [B, 1, W, 1]
        attention = view.attention
        total = torch.zeros_like(offset)
        for head in range(attention.shape[2]):
            drop = _drop(attention[:, :, head], values, offset) * weight  # [B, H, W, N]
            # Scaled by the largest row first, so that no power leaves float32.
            largest = drop.amax(-2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            powers = (drop / largest).pow_(self.config.norm)
            total += largest * powers.sum(-2, keepdim=True).pow_(1.0 / self.config.norm)
        return (total / attention.shape[2]).masked_fill(~view.valid[:, :, None], 0.0)

    def _row_weights(self, view: ScoreView) -> Tensor:
        """Weight of each row, `[B, W]` float32: zero where never written, the others add up to 1."""
        oldest = (view.row_valid.sum(-1, keepdim=True) - 1).clamp_min(1)
        weight = 1.0 - (1.0 - self.config.recency) * rows_newer(view) / oldest
        weight = weight.masked_fill(~view.row_valid, 0.0)
        return weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def _drop(attention: Tensor, values: Tensor, offset: Tensor) -> Tensor:
    """Change of one query head's outputs for each token dropped, `[B, H, W, N]`, from `attention [B, H, W, N]`."""
    output = torch.matmul(attention, values)  # [B, H, W, D]
    # Not by |o|^2 - 2 o.v + |v|^2: where A is near 1, o is near v, and the difference would be rounding alone.
    distance = torch.cdist(output, values, compute_mode="donot_use_mm_for_euclid_dist")
    rest = 1.0 - attention
    exact = attention / rest.clamp_min(_SMALLEST_REST) * distance
    return torch.where(rest < _SMALLEST_REST, attention * offset, exact)
