"""Compaction: the kept slots of each head move to their new places in the pool."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv_kernels._triton import jit, on_device, tl, triton


@torch.library.custom_op("hardkv::rewrite", mutates_args=("pool_keys", "pool_values", "stamps", "bias"))
def rewrite(
    source: Tensor,
    stays: Tensor,
    shown: Tensor,
    target: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    stamps: Tensor,
    bias: Tensor,
) -> None:
    """Move the r-th entry that stays, in order, from its `source` slot to `target[k, r]`, for each row k.

    `source, target [K, N]` int64 are flat slots `page * S + offset`; `stays, shown [K, N]` bool. K and V of
    `pool_keys, pool_values [n, S, D]` and the stamp of `stamps [n, S]` int32 move; `bias [n, S]` float32 of the new
    slot is 0 where the entry is shown and -inf where it is not. Slots that are no target keep what they hold; sources
    that don't stay and targets beyond the last move aren't read, so may be anything.

    Rows touch disjoint slots. Within a row, `target[k, r]` is outside the row's sources or is the source of an entry
    not after the one that moves there: moving in ascending order never overwrites what is still to be read.
    """
    if source.numel() == 0:
        return
    place = target.gather(1, (stays.cumsum(1) - 1).clamp_min(0))
    moves = stays & (place != source)
    read, write = source[moves], place[moves]
    for pool in (pool_keys, pool_values, stamps[..., None]):
        flat = pool.view(-1, pool.shape[2])
        flat[write] = flat[read]  # all is read before anything is written
    bias.view(-1)[place[stays]] = torch.where(shown[stays], 0.0, float("-inf"))


@rewrite.register_fake
def _rewrite_fake(*_: object) -> None:
    return None


def launch_rewrite(
    source: Tensor,
    stays: Tensor,
    shown: Tensor,
    target: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    stamps: Tensor,
    bias: Tensor,
) -> None:
    """The CUDA form of `rewrite`: one program a row, which takes its entries tile by tile in ascending order."""
    rows, entries = source.shape
    if source.numel() == 0:
        return
    for tensor in (pool_keys, pool_values, stamps, bias):
        assert tensor.is_contiguous()
    head_dim = pool_keys.shape[2]
    block_d = triton.next_power_of_2(head_dim)
    rewrite_kernel[(rows,)](
        source.contiguous(),
        stays.contiguous(),
        shown.contiguous(),
        target.contiguous(),
        pool_keys,
        pool_values,
        stamps,
        bias,
        entries,
        D=head_dim,
        BLOCK_N=max(8, 16384 // (block_d * pool_keys.element_size())),  # a tile of 16 KiB of K and as much of V
        BLOCK_D=block_d,
        num_warps=4,
    )


rewrite.register_kernel("cuda")(on_device(launch_rewrite))


@jit
def rewrite_kernel(
    p_source,
    p_stays,
    p_shown,
    p_target,
    p_pool_keys,
    p_pool_values,
    p_stamps,
    p_bias,
    entries,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program a row: BLOCK_N entries at a time, all loaded before any is stored."""
    first = tl.program_id(0).to(tl.int64) * entries
    dim = tl.arange(0, BLOCK_D)[None, :]
    moved = 0
    for start in range(0, entries, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        inside = entry < entries
        b_stays = tl.load(p_stays + first + entry, mask=inside, other=0).to(tl.int32)
        stays = b_stays != 0
        b_rank = moved + tl.cumsum(b_stays, 0) - 1
        b_source = tl.load(p_source + first + entry, mask=stays, other=0)
        b_target = tl.load(p_target + first + b_rank, mask=stays, other=0)
        b_shown = tl.load(p_shown + first + entry, mask=stays, other=0).to(tl.int32)
        moves = stays & (b_source != b_target)
        both = moves[:, None] & (dim < D)
        origin = (b_source * D)[:, None] + dim
        place = (b_target * D)[:, None] + dim
        b_keys = tl.load(p_pool_keys + origin, mask=both, other=0.0)
        b_values = tl.load(p_pool_values + origin, mask=both, other=0.0)
        b_stamps = tl.load(p_stamps + b_source, mask=moves, other=0)
        # A target may be another entry's source: no thread may store before all have loaded.
        tl.debug_barrier()
        tl.store(p_pool_keys + place, b_keys, mask=both)
        tl.store(p_pool_values + place, b_values, mask=both)
        tl.store(p_stamps + b_target, b_stamps, mask=moves)
        tl.store(p_bias + b_target, tl.where(b_shown != 0, 0.0, float("-inf")), mask=stays)
        moved += tl.sum(b_stays, 0)
