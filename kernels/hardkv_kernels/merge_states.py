"""Partial attention results into one softmax over all their slots, by log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv_kernels._numbers import LOWEST
from hardkv_kernels._triton import jit, on_device, tl, triton


@torch.library.custom_op("hardkv::merge_states", mutates_args=())
def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine partial results over disjoint sets of slots: `(out [M, D], lse [M])`, both float32.

    `outs [parts, M, D]` of any float dtype holds each part's softmax-weighted mean, `lses [parts, M]` float32 its
    log-sum-exp. A part that saw nothing has an lse of -inf; its out, NaN included, counts nothing. A row of such parts
    alone answers zeros and -inf.
    """
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse.clamp_min(LOWEST))  # [parts, M]
    shown = outs.float().masked_fill(torch.isneginf(lses)[..., None], 0.0)
    return (weights[..., None] * shown).sum(0), lse


@merge_states.register_fake
def _fake(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:], dtype=torch.float32), lses.new_empty(lses.shape[1:])


def launch_merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_states` as a kernel: one program for each row."""
    outs, lses = outs.contiguous(), lses.contiguous()
    parts, rows, head_dim = outs.shape
    out = outs.new_empty((rows, head_dim), dtype=torch.float32)
    lse = lses.new_empty(rows)
    if rows:
        merge_kernel[(rows,)](
            outs,
            lses,
            out,
            lse,
            parts,
            rows,
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            BLOCK_PARTS=4,
            num_warps=1,
        )
    return out, lse


merge_states.register_kernel("cuda")(on_device(launch_merge_states))


def launch_combine(
    partial_outs: Tensor,
    partial_lses: Tensor,
    page_starts: Tensor,
    sink_logits: Tensor | None,
    query: Tensor,
    programs: int,
    min_pages: int,
) -> tuple[Tensor, Tensor]:
    """Merge what `ragged_decode`'s programs left: `(out [R, H, G, D] in the query's dtype, lse [R, H, G] float32)`.

    `partial_outs [programs + R * H, G, D]` and `partial_lses [programs + R * H, G]` float32 hold the result of program
    p for owner o at `p + o`; entries of no program may be anything. `page_starts` and `sink_logits` are those of
    `ragged_decode`; `programs` and `min_pages` say how the pages were dealt out.
    """
    rows, heads, group, head_dim = query.shape
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    combine_kernel[(rows * heads * group,)](
        partial_outs,
        partial_lses,
        out,
        lse,
        page_starts,
        partial_lses if sink_logits is None else sink_logits,
        rows * heads,
        heads,
        programs,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_PARTS=16,
        MIN_PAGES=min_pages,
        HAS_SINK=sink_logits is not None,
        num_warps=4,
    )
    return out, lse


@jit
def pages_each(p_page_starts, owners, programs, MIN_PAGES: tl.constexpr):
    """How many pages each program of `ragged_decode` takes from the list of all owners' pages."""
    return tl.maximum(tl.cdiv(tl.load(p_page_starts + owners), programs), MIN_PAGES)


@jit
def merge_kernel(
    p_outs,
    p_lses,
    p_out,
    p_lse,
    parts,
    rows,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """One program: one row of `merge_states`."""
    row = tl.program_id(0).to(tl.int64)
    nothing = tl.full([1], float("-inf"), tl.float32)
    b_out, b_lse = _merge_parts(p_outs, p_lses, row, rows, parts, nothing, HEAD_DIM, PADDED_DIM, BLOCK_PARTS)
    b_dim = tl.arange(0, PADDED_DIM)
    tl.store(p_out + row * HEAD_DIM + b_dim, b_out, mask=b_dim < HEAD_DIM)
    tl.store(p_lse + row + tl.arange(0, 1), b_lse)


@jit
def combine_kernel(
    p_outs,
    p_lses,
    p_out,
    p_lse,
    p_page_starts,
    p_sinks,
    owners,
    heads,
    programs,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """One program: one query head of one owner, over the programs that shared its pages."""
    row = tl.program_id(0).to(tl.int64)
    owner = row // GROUP
    first_page = tl.load(p_page_starts + owner)
    last_page = tl.load(p_page_starts + owner + 1)
    each = pages_each(p_page_starts, owners, programs, MIN_PAGES)
    first = first_page // each
    parts = tl.where(last_page > first_page, (last_page - 1) // each - first + 1, 0)
    b_sink = tl.full([1], float("-inf"), tl.float32)
    if HAS_SINK:
        b_sink = tl.load(p_sinks + row % (heads * GROUP) + tl.arange(0, 1))
    start = (first + owner) * GROUP + row % GROUP
    b_out, b_lse = _merge_parts(p_outs, p_lses, start, GROUP, parts, b_sink, HEAD_DIM, PADDED_DIM, BLOCK_PARTS)
    b_dim = tl.arange(0, PADDED_DIM)
    tl.store(p_out + row * HEAD_DIM + b_dim, b_out.to(p_out.dtype.element_ty), mask=b_dim < HEAD_DIM)
    tl.store(p_lse + row + tl.arange(0, 1), b_lse)


@jit
def _merge_parts(
    p_outs,
    p_lses,
    start,
    s_part,
    parts,
    b_sink,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """One softmax over `parts` results at `start, start + s_part, ...` and the sink `[1]`: out `[D]` and lse `[1]`."""
    b_dim = tl.arange(0, PADDED_DIM)
    b_top = b_sink
    b_total = tl.where(b_sink > float("-inf"), 1.0, 0.0)
    b_out = tl.zeros([PADDED_DIM], tl.float32)
    for first in range(0, parts, BLOCK_PARTS):
        b_part = first + tl.arange(0, BLOCK_PARTS)
        b_at = start + b_part.to(tl.int64) * s_part
        b_lse = tl.load(p_lses + b_at, mask=b_part < parts, other=float("-inf"))
        b_shown = (b_lse > float("-inf"))[:, None] & (b_dim < HEAD_DIM)[None, :]
        b_part_out = tl.load(p_outs + b_at[:, None] * HEAD_DIM + b_dim[None, :], mask=b_shown, other=0.0)
        b_new_top = tl.maximum(b_top, tl.max(b_lse, 0))
        # Where nothing has been seen, any finite number keeps -inf minus -inf away.
        b_shift = tl.where(b_new_top > float("-inf"), b_new_top, 0.0)
        b_weight = tl.exp(b_lse - b_shift)
        b_old = tl.exp(b_top - b_shift)
        b_out = b_out * b_old + tl.sum(b_weight[:, None] * b_part_out.to(tl.float32), 0)
        b_total = b_total * b_old + tl.sum(b_weight, 0)
        b_top = b_new_top
    b_divisor = tl.where(b_total > 0.0, b_total, 1.0)
    return b_out / b_divisor, b_top + tl.log(b_divisor)
