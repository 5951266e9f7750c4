"""Rank matching, shared by the calibrators: who is r-th by score gets the r-th largest raw probability."""

from __future__ import annotations

import torch
from torch import Tensor


def normalise_reference(reference: Tensor | None, valid: Tensor) -> Tensor:
    """Give the raw attention `[B, H, R, N]` zero off `valid [B, H, N]`, each row summing to 1.

    Learned attention sinks take part of a row's mass; what is left is scaled up to 1. A row that is zero on every valid
    slot (its query was never written) stays zero.
    """
    if reference is None:
        raise ValueError("this calibrator needs the raw attention of the scored rows, got reference=None")
    masked = reference.float().masked_fill(~valid[:, :, None], 0.0)
    return masked / masked.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def order_by_score(scores: Tensor, valid: Tensor) -> Tensor:
    """Slots from best to worst, `[B, H, R, N]` int64: ties newest (highest slot) first, invalid slots last."""
    masked = scores.masked_fill(~valid[:, :, None], float("-inf"))
    order = masked.flip(-1).argsort(dim=-1, descending=True, stable=True)
    return scores.shape[-1] - 1 - order


def rank_match(scores: Tensor, reference: Tensor, valid: Tensor) -> Tensor:
    """Give the slot ranked r-th by `scores` the r-th largest value of its row of `reference`; both `[B, H, R, N]`.

    `reference` comes from `normalise_reference`, so slots off `valid [B, H, N]` receive its zeros.
    """
    order = order_by_score(scores, valid)
    ranked = reference.sort(dim=-1, descending=True).values
    return torch.zeros_like(ranked).scatter_(-1, order, ranked)
