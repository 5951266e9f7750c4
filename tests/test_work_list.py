"""The block tables and the work list against plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardkv.block_tables import BlockTables
from hardkv.memory import PagePool
from hardkv.tiers.dense import DenseTier
from hardkv.tiers.sparse import SparseTier
from hardkv.tiers.store import PagedStore
from hardkv.types import TierShape
from hardkv_kernels import plan_decode
from tests.no_sync import NoSync

CPU = torch.device("cpu")
LANES, HEADS, PAGE_SLOTS = 3, 2, 4


@given(
    data=st.data(),
    layers=st.integers(1, 3),
    regions=st.booleans(),
    rounds=st.integers(1, 4),
)
def test_tables_and_plan_say_who_owns_which_page(data: st.DataObject, layers: int, regions: bool, rounds: int) -> None:
    """Round after round: sparse tiers change their lengths, lanes are closed and opened, rows are bound anew."""
    pool = PagePool(200, PAGE_SLOTS, layers, HEADS, 2, torch.float32, CPU, False, layer_regions=regions)
    tables = BlockTables(pool, LANES, 12)
    address = tables.pages.data_ptr()
    shape = TierShape(layers, HEADS, 2, 6, torch.float32, CPU)
    held: dict[int, Any] = {}
    for _ in range(rounds):
        for lane in range(LANES):
            if lane in held and data.draw(st.booleans()):
                for tier in held.pop(lane):
                    tier.reset()
            if lane not in held and data.draw(st.booleans()):
                sparse, dense = SparseTier(pool, lane), DenseTier(pool, lane, 6)  # made in any order
                store = PagedStore(pool, lane, 6)
                held[lane] = [dense, store, sparse]
                dense.allocate(shape)
                store.allocate(shape)
            if lane in held:
                slots = data.draw(st.lists(st.integers(0, 20), min_size=layers * HEADS, max_size=layers * HEADS))
                lengths = np.array(slots).reshape(layers, HEADS)
                sparse_tier = held[lane][2]

                sparse_tier.set_lengths(lengths, lengths)
        tables.refresh()
        rows = data.draw(st.permutations(sorted(held)).map(lambda order: order[: max(len(order) - 1, 0)]))
        check(pool, tables, held, [*rows, LANES])
    assert tables.pages.data_ptr() == address


def check(pool: PagePool, tables: BlockTables, held: dict[int, Any], rows: list[int]) -> None:
    owners = len(rows) * HEADS
    starts = torch.full((pool.layers, owners + 1), -1, dtype=torch.int32)
    page_owner = torch.full((pool.manager.pages + 1,), -1)
    plan_decode(tables.pages, tables.counts, torch.tensor(rows), starts, page_owner)
    nobody = pool.layers * owners
    expected_owner = [nobody] * (pool.manager.pages + 1)
    for layer in range(pool.layers):
        expected_starts = [0]
        for row, lane in enumerate(rows):
            for head in range(HEADS):
                pages = [
                    page
                    for tier in held.get(lane, [])
                    for page in tier.table.pages[layer, head][: tier.table.counts[layer, head]].tolist()
                ]
                count = int(tables.counts[layer, lane, head])
                assert tables.pages[layer, lane, head, :count].tolist() == pages
                expected_starts.append(expected_starts[-1] + count)
                for page in pages:
                    expected_owner[page] = (layer * len(rows) + row) * HEADS + head
        assert starts[layer].tolist() == expected_starts
    assert page_owner.tolist() == expected_owner


def test_planning_never_waits_for_the_device() -> None:
    table = torch.tensor([[[[3, 1], [2, 9]], [[0, 9], [4, 5]]]], dtype=torch.int32)  # one layer, two lanes, two heads
    counts = torch.tensor([[[2, 1], [1, 2]]], dtype=torch.int32)
    starts, owner = torch.zeros(1, 5, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    with NoSync():  # type: ignore[no-untyped-call]
        plan_decode(table, counts, torch.arange(2).flip(0), starts, owner)
    assert starts.tolist() == [[0, 1, 3, 5, 6]]
    assert owner.tolist() == [0, 2, 3, 2, 1, 1, 4, 4]
