"""Scorer `keydiff`: keys unlike all others are important ones."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hardkv.interfaces import ImportanceScorer, Space
from hardkv.types import ScoreView


class KeyDiff(ImportanceScorer):
    """How far each key points away from the mean direction of its head's keys.

    `s_j = -cos(k_j, mean_i k_i / |k_i|)`, the mean over valid slots. R = 1, and no query is needed. Only directions
    count: the scores stay the same when a key is scaled. A key of length 0, or a mean of 0, has cosine 0.

    Source: KeyDiff (arXiv 2504.15364), the anchor being the mean of normalised keys; here over resident keys alone.
    """

    name: ClassVar[str] = "keydiff"
    space: ClassVar[Space] = "unbounded"

    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]` from -1 to 1; zero at invalid slots."""
        units = _direction(view.keys.float().masked_fill(~view.valid[..., None], 0.0))  # [B, H, N, D]
        mean = units.sum(-2, keepdim=True) / view.valid.sum(-1).clamp_min(1)[..., None, None]
        cosine = torch.matmul(units, _direction(mean).transpose(-1, -2))  # [B, H, N, 1]
        return cosine.neg_().transpose(-1, -2).masked_fill(~view.valid[:, :, None], 0.0)


def _direction(vectors: Tensor) -> Tensor:
    """Unit vectors `[..., D]`; zero stays zero. Scaled by the largest entry first, so that no square leaves float32."""
    largest = vectors.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.nn.functional.normalize(vectors / largest, dim=-1)
