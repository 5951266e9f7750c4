"""What a decode step writes into the pool: one new slot per head, and the query's place in the ring."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv_kernels._triton import jit, on_device, tl, triton


@torch.library.custom_op("hardkv::open_slots", mutates_args=("lengths", "seen", "bias", "stamps", "ring_positions"))
def open_slots(
    block_table: Tensor,
    lanes: Tensor,
    lengths: Tensor,
    seen: Tensor,
    bias: Tensor,
    stamps: Tensor,
    ring_positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Give the new token of each row its slot in every layer and head: `(slots [L, R * H], positions [R])`, int64.

    `block_table [L, A, H, P]` int32 names the pages of each lane, `lanes [R]` int64 the lane of each row. The slot is
    the one at `lengths [A]` int64, all heads of a lane being that long; the position is `seen [A]` int64. The slot's
    `bias [n, S]` float32 becomes 0, its stamp in `stamps [n, S]` int32 the position, and so does
    `ring_positions [A, W]` int64 at `position % W`. Then `lengths` and `seen` of the lane grow by one. The last lane is
    a dummy one: it may stand in several rows, its counters stay, and what its slots hold is undefined.
    """
    layers, places, heads, width = block_table.shape
    page_slots = bias.shape[1]
    length = lengths.index_select(0, lanes)
    positions = seen.index_select(0, lanes)
    head = torch.arange(heads, device=lanes.device)
    entry = ((lanes[:, None] * heads + head) * width + (length // page_slots)[:, None]).view(-1)  # [R * H]
    pages = block_table.view(layers, -1).index_select(1, entry)  # [L, R * H]
    offset = (length % page_slots)[:, None].expand(-1, heads).reshape(-1)
    slots = torch.add(offset, pages, alpha=page_slots)
    flat = slots.view(-1)
    stamp = positions.to(stamps.dtype)[None, :, None].expand(layers, -1, heads).reshape(-1)
    bias.view(-1).index_fill_(0, flat, 0.0)
    stamps.view(-1).index_copy_(0, flat, stamp)
    if ring_positions is not None:
        ring_positions.view(-1).index_copy_(0, _ring_rows(ring_positions, lanes, positions), positions)
    grown = (lanes < places - 1).to(torch.int64)
    lengths.index_add_(0, lanes, grown)
    seen.index_add_(0, lanes, grown)
    return slots, positions


@open_slots.register_fake
def _open_slots_fake(
    block_table: Tensor,
    lanes: Tensor,
    lengths: Tensor,
    seen: Tensor,
    bias: Tensor,
    stamps: Tensor,
    ring_positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    layers, _, heads, _ = block_table.shape
    return lanes.new_empty(layers, lanes.shape[0] * heads), torch.empty_like(lanes)


def launch_open_slots(
    block_table: Tensor,
    lanes: Tensor,
    lengths: Tensor,
    seen: Tensor,
    bias: Tensor,
    stamps: Tensor,
    ring_positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The CUDA form of `open_slots`: one program a row, which alone reads and advances its lane's counters."""
    layers, places, heads, width = block_table.shape
    for tensor in (block_table, lanes, bias, stamps):
        assert tensor.is_contiguous()
    rows = lanes.shape[0]
    slots = lanes.new_empty(layers, rows * heads)
    positions = torch.empty_like(lanes)
    ring_rows = 1 if ring_positions is None else ring_positions.shape[1]
    open_slots_kernel[(rows,)](
        block_table,
        lanes,
        lengths,
        seen,
        bias,
        stamps,
        ring_positions,
        slots,
        positions,
        places,
        width,
        layers,
        ring_rows,
        HEADS=heads,
        PAGE_SLOTS=bias.shape[1],
        BLOCK=min(256, triton.next_power_of_2(layers * heads)),
        num_warps=4,
    )
    return slots, positions


open_slots.register_kernel("cuda")(on_device(launch_open_slots))


def append_plain(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    query: Tensor | None,
    ring: Tensor | None,
    lanes: Tensor,
    positions: Tensor,
) -> None:
    """Write the new token's `keys, values [R, H, D]` of one layer to `slots [R * H]` int64 of the pools `[n, S, D]`.

    Where `ring [A, W, H, G, D]` is given, `query [R, H, G, D]` goes to row `position % W` of each row's lane, by
    `lanes, positions [R]` int64. Where two rows name one slot (the dummy lane), one of them is kept.
    """
    head_dim = keys.shape[2]
    pool_keys.view(-1, head_dim).index_copy_(0, slots, keys.reshape(-1, head_dim))
    pool_values.view(-1, head_dim).index_copy_(0, slots, values.reshape(-1, head_dim))
    if ring is not None and query is not None:
        row = query.shape[1:].numel()
        ring.view(-1, row).index_copy_(0, _ring_rows(ring, lanes, positions), query.reshape(-1, row))


append = torch.library.custom_op("hardkv::append", mutates_args=("pool_keys", "pool_values", "ring"))(append_plain)


@append.register_fake
def _append_fake(*_: object) -> None:
    return None


def launch_append(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    query: Tensor | None,
    ring: Tensor | None,
    lanes: Tensor,
    positions: Tensor,
) -> None:
    """The CUDA form of `append`: programs of the grid's second axis take K and V, then a query head of each group."""
    rows, heads, head_dim = keys.shape
    keep_query = ring is not None and query is not None
    assert keys.stride(2) == values.stride(2) == 1
    assert pool_keys.is_contiguous()
    assert pool_values.is_contiguous()
    ring_rows, group, query_strides = 1, 0, [0, 0, 0]
    if ring is not None and query is not None:
        assert query.stride(3) == 1
        assert ring.is_contiguous()
        ring_rows, group, query_strides = ring.shape[1], query.shape[2], list(query.stride()[:3])
    block_d = triton.next_power_of_2(head_dim)
    block_o = max(1, 2048 // (block_d * keys.element_size()))  # 16 bytes for each of 128 threads
    append_kernel[(triton.cdiv(rows * heads, block_o), 1 + group)](
        keys,
        values,
        slots,
        pool_keys,
        pool_values,
        query if keep_query else None,
        ring if keep_query else None,
        lanes,
        positions,
        rows * heads,
        ring_rows,
        *keys.stride()[:2],
        *values.stride()[:2],
        *query_strides,
        HEADS=heads,
        GROUP=group,
        D=head_dim,
        BLOCK_O=block_o,
        BLOCK_D=block_d,
        num_warps=4,
    )


append.register_kernel("cuda")(on_device(launch_append))


def _ring_rows(ring: Tensor, lanes: Tensor, positions: Tensor) -> Tensor:
    """Where in a ring `[A, W, ...]`, flattened to `[A * W, ...]`, each row's newest query goes: `[R]`."""
    rows = ring.shape[1]
    return torch.add(positions % rows, lanes, alpha=rows)


@jit
def open_slots_kernel(
    p_block_table,
    p_lanes,
    p_lengths,
    p_seen,
    p_bias,
    p_stamps,
    p_ring_positions,
    p_slots,
    p_positions,
    places,
    width,
    layers,
    ring_rows,
    HEADS: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: the slot of each layer and head, then the lane's counters."""
    row = tl.program_id(0)
    lane = tl.load(p_lanes + row)
    length = tl.load(p_lengths + lane)
    position = tl.load(p_seen + lane)
    # No thread may advance the counters before all have read them.
    tl.debug_barrier()
    page_index = length // PAGE_SLOTS
    offset = length % PAGE_SLOTS
    for first in range(0, layers * HEADS, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        inside = entry < layers * HEADS
        layer = (entry // HEADS).to(tl.int64)
        head = entry % HEADS
        where = ((layer * places + lane) * HEADS + head) * width + page_index
        b_page = tl.load(p_block_table + where, mask=inside, other=0).to(tl.int64)
        b_slot = b_page * PAGE_SLOTS + offset
        tl.store(p_slots + (layer * tl.num_programs(0) + row) * HEADS + head, b_slot, mask=inside)
        tl.store(p_bias + b_slot, 0.0, mask=inside)
        tl.store(p_stamps + b_slot, position.to(tl.int32), mask=inside)
    tl.store(p_positions + row, position)
    if p_ring_positions is not None:
        tl.store(p_ring_positions + lane * ring_rows + position % ring_rows, position)
    real = lane < places - 1
    tl.store(p_lengths + lane, length + 1, mask=real)
    tl.store(p_seen + lane, position + 1, mask=real)


@jit
def append_kernel(
    p_keys,
    p_values,
    p_slots,
    p_pool_keys,
    p_pool_values,
    p_query,
    p_ring,
    p_lanes,
    p_positions,
    owners,
    ring_rows,
    s_key_row,
    s_key_head,
    s_value_row,
    s_value_head,
    s_query_row,
    s_query_head,
    s_query_group,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program writes BLOCK_O heads: K and V, or on the grid's second axis one query of each group."""
    owner = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = (owner // HEADS).to(tl.int64)
    head = owner % HEADS
    inside = owner < owners
    dim = tl.arange(0, BLOCK_D)[None, :]
    both = inside[:, None] & (dim < D)
    part = tl.program_id(1)
    if part == 0:
        b_slot = tl.load(p_slots + owner, mask=inside, other=0)
        place = (b_slot * D)[:, None] + dim
        b_key = tl.load(p_keys + (row * s_key_row + head * s_key_head)[:, None] + dim, mask=both, other=0.0)
        b_value = tl.load(p_values + (row * s_value_row + head * s_value_head)[:, None] + dim, mask=both, other=0.0)
        tl.store(p_pool_keys + place, b_key, mask=both)
        tl.store(p_pool_values + place, b_value, mask=both)
    elif p_ring is not None:
        b_lane = tl.load(p_lanes + row, mask=inside, other=0)
        b_position = tl.load(p_positions + row, mask=inside, other=0)
        query_row = row * s_query_row + head * s_query_head + (part - 1) * s_query_group
        ring_row = ((b_lane * ring_rows + b_position % ring_rows) * HEADS + head) * GROUP + part - 1
        b_query = tl.load(p_query + query_row[:, None] + dim, mask=both, other=0.0)
        tl.store(p_ring + (ring_row * D)[:, None] + dim, b_query, mask=both)
