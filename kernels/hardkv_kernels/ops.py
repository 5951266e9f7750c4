"""The custom operators; the dispatcher picks the implementation by device."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv_kernels import reference


@torch.library.custom_op("hardkv::paged_attention", mutates_args=())
def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    owner: Tensor,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    with_probabilities: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `hardkv_kernels.reference.paged_attention`."""
    return reference.paged_attention(
        query, keys, values, bias, owner, scaling, softcap, sink_logits, with_probabilities
    )


@paged_attention.register_fake
def _paged_attention_fake(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    owner: Tensor,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    with_probabilities: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    pages, slots, _ = keys.shape
    shape = (pages, query.shape[1], slots) if with_probabilities else (0,)
    return torch.empty_like(query), bias.new_empty(query.shape[:2]), bias.new_empty(shape)


@torch.library.custom_op("hardkv::attend_slots", mutates_args=())
def attend_slots(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """See `hardkv_kernels.reference.attend_slots`."""
    return reference.attend_slots(query, keys, values, bias, scaling, softcap)


@attend_slots.register_fake
def _attend_slots_fake(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape, dtype=torch.float32), query.new_empty(query.shape[:-1], dtype=torch.float32)
