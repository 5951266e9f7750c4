"""How much a token's value can add, shared by scorers that weigh attention by it."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv.types import ScoreView


def value_distance(view: ScoreView) -> Tensor:
    """Norm of each value's distance from the mean over the head's valid slots, `[B, H, N]`, zero where invalid."""
    valid = view.valid[..., None]  # [B, H, N, 1]
    values = view.values.float().masked_fill(~valid, 0.0)  # [B, H, N, D]
    mean = values.sum(-2, keepdim=True) / valid.sum(-2, keepdim=True).clamp_min(1)
    distance: Tensor = torch.linalg.vector_norm(values - mean, dim=-1)
    return distance.masked_fill_(~view.valid, 0.0)
