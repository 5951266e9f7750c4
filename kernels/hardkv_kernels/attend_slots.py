"""Attention over one tier alone, for composition by log-sum-exp: the oracle and the path of tiers outside the pages."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv_kernels._numbers import LOWEST


@torch.library.custom_op("hardkv::attend_slots", mutates_args=())
def attend_slots(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend `query [H, G, D]` over padded `keys, values [H, N, D]` with `bias [H, N]`: `(out, lse)` in float32.

    The answer of one tier alone, for composition by log-sum-exp: `out [H, G, D]`, `lse [H, G]`; a head with no slot
    answers zeros and -inf. Slots with a bias of -inf may hold anything.
    """
    live = ~torch.isneginf(bias)
    logits = torch.matmul(query.float(), keys.float().masked_fill(~live[..., None], 0.0).transpose(-1, -2)) * scaling
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits + bias[:, None, :]
    lse = torch.logsumexp(logits, -1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], float("-inf"))
    weights = torch.exp(logits - lse.clamp_min(LOWEST)[..., None])
    return torch.matmul(weights, values.float().masked_fill(~live[..., None], 0.0)), lse


@attend_slots.register_fake
def _fake(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape, dtype=torch.float32), query.new_empty(query.shape[:-1], dtype=torch.float32)
