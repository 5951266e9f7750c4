"""How much a token's value can add, shared by scorers that weigh attention by it."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv.types import ScoreView


def value_distance(view: ScoreView) -> Tensor:
    """Norm of each value's distance from the mean over the head's valid slots, `[B, H, N]`, zero where invalid."""
    valid = view.valid[..., None]  # [B, H, N, 1]
    values = torch.where(valid, view.values, 0.0).float()  # [B, H, N, D]
    mean = values.sum(-2, keepdim=True) / view.valid.sum(-1)[..., None, None].clamp_min(1)
    distance = torch.linalg.vector_norm(values.sub_(mean), dim=-1)
    return torch.where(view.valid, distance, 0.0)
