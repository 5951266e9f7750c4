"""What several tests ask of tiers, in one line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hardkv.tiers.cascade import Cascade, Resident
from hardkv.types import Layout, TokenBatch
from hardkv_kernels import merge_states


def merged(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Answers of several tiers, `[..., D]` and `[...]`, as one."""
    out, lse = merge_states(torch.stack(list(outs)).flatten(1, -2), torch.stack(list(lses)).flatten(1))
    return out.view(outs[0].shape), lse.view(lses[0].shape)


def lay_out(
    cascade: Cascade, resident: Resident, layout: Layout, drop: Callable[[int, TokenBatch], None] | None = None
) -> None:
    """Carry out a layout, both halves."""
    moves = cascade.plan(resident, layout)
    cascade.apply(resident, moves, moves.lengths.numpy(), moves.reserve.numpy(), drop)
