"""What a decode step writes, in plain torch, against a loop over rows and heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hardkv_kernels.append import append, open_slots
from tests.no_sync import NoSync
from tests.operators import check_operator

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Opening:
    """A step's arguments to `open_slots`; the last lane is the dummy one and holds the last pages."""

    block_table: Tensor
    lanes: Tensor
    counters: tuple[Tensor, Tensor]
    slots: tuple[Tensor, Tensor]
    ring_positions: Tensor | None

    def arguments(self) -> tuple[Any, ...]:
        """All of them, those that change as copies."""
        ring = None if self.ring_positions is None else self.ring_positions.clone()
        changed = [tensor.clone() for tensor in (*self.counters, *self.slots)]
        return self.block_table, self.lanes, *changed, ring


def opening(seed: int, rows: int, layers: int, heads: int, slots: int, width: int, ring: bool) -> Opening:
    """Shuffled pages and lanes; every third row is a padded one."""
    made = torch.Generator().manual_seed(seed)
    places = rows + 2
    pages = layers * places * heads * width
    dummies = torch.arange(rows) % 3 == 2
    order = torch.randperm(pages, generator=made).view(layers, places, heads, width)
    lanes = torch.where(dummies, places - 1, torch.randperm(places - 1, generator=made)[:rows])
    lengths = torch.randint(width * slots, (places,), generator=made)
    seen = lengths + torch.randint(1000, (places,), generator=made)
    lengths[-1], seen[-1] = 0, 0
    bias = torch.full((pages, slots), float("-inf"))
    stamps = torch.full((pages, slots), -1, dtype=torch.int32)
    rings = torch.full((places, 5), -1) if ring else None
    return Opening(order.to(torch.int32), lanes, (lengths, seen), (bias, stamps), rings)


def check_opening(case: Opening, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    block_table, lanes, *changed = case.arguments()
    found = function(block_table, lanes, *changed)
    _, _, lengths, seen, bias, stamps, rings = case.arguments()
    layers, places, heads, _ = case.block_table.shape
    slots = torch.empty(layers, len(case.lanes) * heads, dtype=torch.int64)
    positions = seen[case.lanes]
    for row, lane in enumerate(case.lanes.tolist()):
        page, offset = divmod(int(lengths[lane]), bias.shape[1])
        for layer in range(layers):
            for head in range(heads):
                slot = int(case.block_table[layer, lane, head, page]) * bias.shape[1] + offset
                slots[layer, row * heads + head] = slot
                bias.view(-1)[slot] = 0.0
                stamps.view(-1)[slot] = seen[lane]
        if rings is not None:
            rings[lane, int(seen[lane]) % rings.shape[1]] = seen[lane]
    for lane in case.lanes.tolist():
        if lane < places - 1:
            lengths[lane] += 1
            seen[lane] += 1
    for ours, wanted in zip((*found, *changed), (slots, positions, lengths, seen, bias, stamps, rings), strict=True):
        if wanted is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, wanted, rtol=0, atol=0)


@dataclass(frozen=True)
class Writing:
    """A layer's arguments to `append`; rows that share a slot bring the same K and V, since either may stay."""

    new: tuple[Tensor, Tensor, Tensor | None]
    slots: Tensor
    pools: tuple[Tensor, Tensor]
    ring: Tensor | None
    lanes: Tensor
    positions: Tensor

    def arguments(self) -> tuple[Any, ...]:
        """All of them, those that change as copies."""
        keys, values, query = self.new
        ring = None if self.ring is None else self.ring.clone()
        return (
            keys,
            values,
            self.slots,
            self.pools[0].clone(),
            self.pools[1].clone(),
            query,
            ring,
            self.lanes,
            self.positions,
        )


def writing(
    seed: int, rows: int, heads: int, group: int, slots: int, head_dim: int, dtype: torch.dtype, ring: bool
) -> Writing:
    """K and V as a fused projection gives them, rows apart; every third row is a padded one."""
    made = torch.Generator().manual_seed(seed)
    places, window = rows + 2, 3
    fused = torch.randn(rows, heads * 3, head_dim, generator=made).to(dtype)
    query = torch.randn(rows, heads, group * 2, head_dim, generator=made).to(dtype)[:, :, ::2]
    dummies = torch.arange(rows) % 3 == 2
    fused[dummies], query[dummies] = 7.0, 8.0
    pages = -(-rows * heads // slots) + 2
    lanes = torch.where(dummies, places - 1, torch.randperm(places - 1, generator=made)[:rows])
    chosen = torch.randperm((pages - 1) * slots, generator=made)[: rows * heads].view(rows, heads)
    chosen[dummies] = pages * slots - 1
    positions = torch.randint(1000, (rows,), generator=made)
    positions[dummies] = 0
    keys, values = (torch.full((pages, slots, head_dim), float("nan"), dtype=dtype) for _ in range(2))
    rings = torch.zeros(places, window, heads, group, head_dim, dtype=dtype) if ring else None
    new = (fused[:, :heads], fused[:, heads : heads * 2], query if ring else None)
    return Writing(new, chosen.view(-1), (keys, values), rings, lanes, positions)


def check_writing(case: Writing, function: Callable[..., None]) -> None:
    """Bit for bit, and nothing else changes."""
    arguments = case.arguments()
    function(*arguments)
    _, _, _, keys, values, _, rings, _, _ = case.arguments()
    heads = case.new[0].shape[1]
    for index, slot in enumerate(case.slots.tolist()):
        for pool, new in zip((keys, values), case.new[:2], strict=True):
            pool.flatten(0, 1)[slot] = new[index // heads, index % heads]
    for row, lane in enumerate(case.lanes.tolist()):
        if rings is not None and case.new[2] is not None:
            rings[lane, int(case.positions[row]) % rings.shape[1]] = case.new[2][row]
    for ours, wanted in zip((arguments[3], arguments[4], arguments[6]), (keys, values, rings), strict=True):
        if wanted is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, wanted, rtol=0, atol=0, equal_nan=True)


sizes = st.integers(1, 4)


@given(st.integers(0, 2**31), st.integers(1, 7), sizes, sizes, sizes, sizes, st.booleans())
def test_slots_open(seed: int, rows: int, layers: int, heads: int, slots: int, width: int, ring: bool) -> None:
    check_opening(opening(seed, rows, layers, heads, slots, width, ring), open_slots)


@given(st.integers(0, 2**31), st.integers(1, 7), sizes, sizes, sizes, sizes, st.sampled_from(DTYPES), st.booleans())
def test_new_tokens_are_written(
    seed: int, rows: int, heads: int, group: int, slots: int, head_dim: int, dtype: torch.dtype, ring: bool
) -> None:
    check_writing(writing(seed, rows, heads, group, slots, head_dim, dtype, ring), append)


def test_the_operators_are_registered_rightly() -> None:
    for ring in (False, True):
        check_operator(open_slots, opening(0, 4, 2, 2, 4, 3, ring).arguments())
        check_operator(append, writing(0, 4, 2, 3, 4, 8, torch.float32, ring).arguments())


def test_the_host_never_waits() -> None:
    opened = opening(0, 4, 2, 2, 4, 3, True).arguments()
    written = writing(0, 4, 2, 3, 4, 8, torch.float32, True).arguments()
    with NoSync():  # type: ignore[no-untyped-call]  # torch does not annotate it
        slots, positions = open_slots(*opened)
        append(*written)
    with FakeTensorMode() as mode:

        def fake(tensors: tuple[Any, ...]) -> list[Any]:
            return [None if tensor is None else mode.from_tensor(tensor) for tensor in tensors]

        for function in (open_slots, open_slots._init_fn):
            found = function(*fake(opened))
            assert [tensor.shape for tensor in found] == [slots.shape, positions.shape]
            assert [tensor.dtype for tensor in found] == [torch.int64, torch.int64]
        assert append._init_fn(*fake(written)) is None
