"""Attention of one new token per sequence over ragged, paged heads (flash decoding, split over pages)."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv_kernels._triton import interprets, jit, on_device, programs_for, tl, triton
from hardkv_kernels.attend_pages import attend_logits, page_logits, page_run
from hardkv_kernels.merge_states import launch_combine, pages_each

BLOCK_GROUP = 16
"""Rows of the smallest matrix product; a query group of fewer heads leaves the rest of them empty."""
TILE_BYTES = 8192
"""Bytes of a tile of keys: small tiles leave room for several programs on a multiprocessor, which hide each other's
latencies."""


@torch.library.custom_op("hardkv::ragged_decode", mutates_args=("logits",))
def ragged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    block_table: Tensor,
    lanes: Tensor,
    page_starts: Tensor,
    page_owner: Tensor,
    first_owner: int,
    first_page: int,
    last_page: int,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    logits: Tensor | None,
    with_probabilities: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend `query [R, H, G, D]` over the pages each (row, head) owns; `(out [R, H, G, D], lse [R, H, G] float32, p)`.

    `keys, values [n, S, D]` and `bias [n, S]` float32 are the page pool; a slot's bias is added to its logit: 0 for a
    kept slot, -inf for an empty or dropped one, a log-bias for a merged one. `block_table [A, H, P]` int32 names the
    pages of each lane and head, `lanes [R]` int64 the lane of each row, `page_starts [R * H + 1]` int32 the prefix sums
    of their page counts. `page_owner [n]` int64 says the same the other way round: `first_owner + row * H + h`; all
    pages of this call lie in `[first_page, last_page)`. `sink_logits [H, G]` float32 join the denominator only. A head
    that sees nothing answers zeros and -inf.

    What attention each slot got can be had in two ways. The biased logits are written to the call's pages of
    `logits [n, G, S]` float32, where that is given, for `score_update`. The probabilities p are
    `[last_page - first_page, G, S]` float32 where `with_probabilities` says so, else empty; the rows of pages that are
    not this call's are undefined. A CUDA graph, in which that slice cannot vary, takes the first way.

    This form reads the slice as one batched product and goes by `page_owner`; the CUDA kernel goes by the block table,
    and gives no probabilities.
    """
    owners, span = query.shape[0] * query.shape[1], slice(first_page, last_page)
    run = page_run(keys, values, bias, page_owner, first_owner, span, owners)
    weights = page_logits(query, run, scaling, softcap)
    if logits is not None:
        logits[span] = torch.where((run.adds < owners)[:, None, None], weights, logits[span])
    return attend_logits(query, run, weights, sink_logits, with_probabilities)


@ragged_decode.register_fake
def _fake(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    block_table: Tensor,
    lanes: Tensor,
    page_starts: Tensor,
    page_owner: Tensor,
    first_owner: int,
    first_page: int,
    last_page: int,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    logits: Tensor | None,
    with_probabilities: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (last_page - first_page, query.shape[2], keys.shape[1]) if with_probabilities else (0,)
    return torch.empty_like(query), bias.new_empty(query.shape[:-1]), bias.new_empty(shape)


def launch_ragged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    block_table: Tensor,
    lanes: Tensor,
    page_starts: Tensor,
    page_owner: Tensor,
    first_owner: int,
    first_page: int,
    last_page: int,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    logits: Tensor | None,
    with_probabilities: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ragged_decode` as two kernels: a fixed grid shares the list of all owners' pages, then the shares are merged."""
    if with_probabilities:
        raise NotImplementedError("the CUDA kernel gives no probabilities: give `logits` and call `score_update`")
    query = query.contiguous()
    rows, heads, group, head_dim = query.shape
    slots = keys.shape[1]
    assert group <= BLOCK_GROUP, "one tile of a matrix product holds the query group"
    assert all(t.is_contiguous() for t in (keys, values, bias, block_table)), "the pool and its table have no gaps"
    assert keys.shape[0] * slots < 2**31, "slots of the pool are counted in int32"
    padded_dim, block_slots, crowd, options = _config(keys.dtype, head_dim)
    min_pages = triton.cdiv(block_slots, slots)
    programs = programs_for(query.device, crowd)
    partial_outs = query.new_empty((programs + rows * heads, group, head_dim), dtype=torch.float32)
    partial_lses = query.new_empty((programs + rows * heads, group), dtype=torch.float32)
    ragged_decode_kernel[(programs,)](
        query,
        keys,
        values,
        bias,
        block_table,
        lanes,
        page_starts,
        bias if logits is None else logits,
        partial_outs,
        partial_lses,
        rows * heads,
        heads,
        block_table.shape[2],
        scaling,
        1.0 if softcap is None else softcap,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_GROUP=BLOCK_GROUP,
        SLOTS=slots,
        BLOCK_SLOTS=block_slots,
        MIN_PAGES=min_pages,
        HAS_SOFTCAP=softcap is not None,
        WRITE_LOGITS=logits is not None,
        OWNERS=triton.next_power_of_2(rows * heads),
        UPCAST=interprets() and keys.dtype == torch.bfloat16,
        **options,
    )
    out, lse = launch_combine(partial_outs, partial_lses, page_starts, sink_logits, query, programs, min_pages)
    return out, lse, bias.new_empty(0)


ragged_decode.register_kernel("cuda")(on_device(launch_ragged_decode))


def _config(dtype: torch.dtype, head_dim: int) -> tuple[int, int, int, dict[str, int]]:
    """Padded head dim, slots of a tile, programs for each multiprocessor, and launch options that spill nothing.

    Shared memory holds two tiles of keys and two of values; the registers allowed leave room for all the programs.
    """
    full = dtype == torch.float32
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    slot_bytes = padded_dim * dtype.itemsize
    least, most = (16, 32) if full else (32, 64)
    block_slots = min(max(TILE_BYTES // slot_bytes, least), most)
    if full or block_slots * slot_bytes != TILE_BYTES:
        return padded_dim, block_slots, 2, {"num_warps": 8 if slot_bytes > 512 else 4, "num_stages": 3, "maxnreg": 255}
    return padded_dim, block_slots, 4, {"num_warps": 4, "num_stages": 3, "maxnreg": 128}


@jit
def ragged_decode_kernel(
    p_query,
    p_keys,
    p_values,
    p_bias,
    p_block_table,
    p_lanes,
    p_page_starts,
    p_logits,
    p_partial_outs,
    p_partial_lses,
    owners,
    heads,
    table_width,
    scaling,
    softcap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WRITE_LOGITS: tl.constexpr,
    OWNERS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program: an equal share of the list of all owners' pages, one partial result for each owner it meets."""
    program = tl.program_id(0)
    each = pages_each(p_page_starts, owners, tl.num_programs(0), MIN_PAGES)
    page = program * each
    end = tl.minimum(page + each, tl.load(p_page_starts + owners))
    # The owner of a page comes after as many owners as end at or before it.
    b_owner = tl.arange(0, OWNERS)
    b_ends = tl.load(p_page_starts + 1 + b_owner, mask=b_owner < owners, other=2147483647)
    owner = tl.sum((b_ends <= page).to(tl.int32), 0)
    b_group = tl.arange(0, BLOCK_GROUP)
    b_dim = tl.arange(0, PADDED_DIM)
    b_read = (b_group < GROUP)[:, None] & (b_dim < HEAD_DIM)[None, :]
    while page < end:
        start = tl.load(p_page_starts + owner)
        stop = tl.minimum(tl.load(p_page_starts + owner + 1), end)
        lane = tl.load(p_lanes + owner // heads)
        p_table = p_block_table + (lane * heads + owner % heads) * table_width
        b_query_at = (owner.to(tl.int64) * GROUP + b_group)[:, None] * HEAD_DIM + b_dim[None, :]
        b_query = tl.load(p_query + b_query_at, mask=b_read, other=0.0)
        if UPCAST:
            b_query = b_query.to(tl.float32)
        b_top = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
        b_total = tl.zeros([BLOCK_GROUP], tl.float32)
        b_out = tl.zeros([BLOCK_GROUP, PADDED_DIM], tl.float32)
        last_slot = (stop - start) * SLOTS
        b_slot = (page - start) * SLOTS + tl.arange(0, BLOCK_SLOTS)
        b_page = tl.load(p_table + b_slot // SLOTS, mask=b_slot < last_slot, other=0)
        b_ahead = b_slot + BLOCK_SLOTS
        b_next_page = tl.load(p_table + b_ahead // SLOTS, mask=b_ahead < last_slot, other=0)
        b_at = b_page * SLOTS + b_slot % SLOTS
        b_bias = tl.load(p_bias + b_at, mask=b_slot < last_slot, other=float("-inf"))
        for first_slot in range((page - start) * SLOTS, last_slot, BLOCK_SLOTS):
            b_slot = first_slot + tl.arange(0, BLOCK_SLOTS)
            b_inside = b_slot < last_slot
            b_place = b_at.to(tl.int64)[:, None] * HEAD_DIM + b_dim[None, :]
            b_wanted = (b_bias > float("-inf"))[:, None] & (b_dim < HEAD_DIM)[None, :]
            b_keys = tl.load(p_keys + b_place, mask=b_wanted, other=0.0)
            b_values = tl.load(p_values + b_place, mask=b_wanted, other=0.0)
            # Page ids are read two tiles ahead and biases one, so that no load waits for another.
            b_ahead = b_slot + BLOCK_SLOTS
            b_next_at = b_next_page * SLOTS + b_ahead % SLOTS
            b_next_bias = tl.load(p_bias + b_next_at, mask=b_ahead < last_slot, other=float("-inf"))
            b_ahead += BLOCK_SLOTS
            b_later_page = tl.load(p_table + b_ahead // SLOTS, mask=b_ahead < last_slot, other=0)
            if UPCAST:
                b_keys = b_keys.to(tl.float32)
                b_values = b_values.to(tl.float32)
            b_logits = tl.dot(b_query, tl.trans(b_keys), input_precision="ieee") * scaling
            if HAS_SOFTCAP:
                b_logits = _tanh(b_logits / softcap) * softcap
            b_logits += b_bias[None, :]
            if WRITE_LOGITS:
                # Read again, from a cache by now: carried along, the ids of this tile would take registers.
                b_here = tl.load(p_table + b_slot // SLOTS, mask=b_inside, other=0).to(tl.int64)
                b_logits_at = (b_here * (GROUP * SLOTS) + b_slot % SLOTS)[None, :] + (b_group * SLOTS)[:, None]
                tl.store(p_logits + b_logits_at, b_logits, mask=(b_group < GROUP)[:, None] & b_inside[None, :])
            b_new_top = tl.maximum(b_top, tl.max(b_logits, 1))
            # Where nothing has been seen, any finite number keeps -inf minus -inf away.
            b_shift = tl.where(b_new_top > float("-inf"), b_new_top, 0.0)
            b_weights = tl.exp(b_logits - b_shift[:, None])
            b_old = tl.exp(b_top - b_shift)
            b_total = b_total * b_old + tl.sum(b_weights, 1)
            b_out = b_out * b_old[:, None]
            b_out = tl.dot(b_weights.to(b_values.dtype), b_values, b_out, input_precision="ieee")
            b_top, b_at, b_bias, b_next_page = b_new_top, b_next_at, b_next_bias, b_later_page
        b_divisor = tl.where(b_total > 0.0, b_total, 1.0)
        partial = (program + owner).to(tl.int64) * GROUP
        b_out_at = (partial + b_group)[:, None] * HEAD_DIM + b_dim[None, :]
        tl.store(p_partial_outs + b_out_at, b_out / b_divisor[:, None], mask=b_read)
        tl.store(p_partial_lses + partial + b_group, b_top + tl.log(b_divisor), mask=b_group < GROUP)
        page = stop
        owner += 1
        # Owners without pages have no partial result.
        while (page < end) & (tl.load(p_page_starts + tl.minimum(owner + 1, owners)) <= page):
            owner += 1


@jit
def _tanh(b_x):
    b_small = tl.exp(-2.0 * tl.abs(b_x))
    b_tanh = (1.0 - b_small) / (1.0 + b_small)
    return tl.where(b_x < 0.0, -b_tanh, b_tanh)
