"""The page pool against a plain Python model: who owns which page, and what is written in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hardkv.errors import CapacityError
from hardkv.memory import FREE, PageManager, PagePool, Pages, PageTable

HEAD_DIM = 2
EMPTY = 0  # the marker of a slot that was never written


@dataclass
class ModelTable:
    """What one table should hold: for each layer and head a list of pages, each a list of markers."""

    table: PageTable
    lane: int
    pages: list[list[list[list[int]]]]

    def counts(self) -> Pages:
        return np.array([[len(head) for head in layer] for layer in self.pages], dtype=np.int64)


def snapshot(pool: PagePool) -> list[object]:
    """Everything a failed call must leave alone."""
    manager = pool.manager
    tables = [(table.pages.tolist(), table.counts.tolist(), table.lane, table.version) for table in pool.tables]
    contents = [tensor.clone() for tensor in (pool.keys, pool.values, pool.bias, pool.positions, pool.statistic)]
    host = [manager.owner.tolist(), manager.bounds.tolist(), tables, pool.peak_pages]
    return [*host, *(tensor.numpy().tobytes() for tensor in contents)]


def owned_pages(pool: PagePool) -> torch.Tensor:
    """Which pages are in use, nobody's page at the end included."""
    return torch.from_numpy(np.append(pool.manager.owner != FREE, True))


def pool_span(pool: PagePool, layer: int) -> slice:
    """Where the pages of a layer may lie."""
    return pool.manager.region(layer if pool.layer_regions else 0)


class PoolMachine(RuleBasedStateMachine):
    """Tables come, grow, shrink, are written and go; regions move beneath them."""

    @initialize(
        pages=st.sampled_from([0, 1, 8, 24, 40]),
        page_slots=st.integers(1, 3),
        layers=st.integers(1, 4),
        heads=st.integers(1, 3),
        with_statistic=st.booleans(),
        layer_regions=st.booleans(),
    )
    def build(
        self, pages: int, page_slots: int, layers: int, heads: int, with_statistic: bool, layer_regions: bool
    ) -> None:
        self.pool = PagePool(
            pages,
            page_slots,
            layers,
            heads,
            HEAD_DIM,
            torch.float32,
            torch.device("cpu"),
            with_statistic,
            layer_regions=layer_regions,
        )
        self.live: list[ModelTable] = []
        self.dropped: list[PageTable] = []
        self.next_marker = 1
        self.next_lane = 0
        self.peak = 0
        self.addresses = [tensor.data_ptr() for tensor in (self.pool.keys, self.pool.values, self.pool.bias)]

    @rule()
    def new_table(self) -> None:
        pool, lane = self.pool, self.next_lane
        self.next_lane += 1
        empty: list[list[list[list[int]]]] = [[[] for _ in range(pool.heads)] for _ in range(pool.layers)]
        self.live.append(ModelTable(pool.new_table(lane), lane, empty))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def resize_everything(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from(self.live))
        size = self.pool.layers * self.pool.heads
        flat = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        self.resize(target, np.array(flat, dtype=np.int64).reshape(self.pool.layers, self.pool.heads))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def resize_one_head(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from(self.live))
        layer = data.draw(st.integers(0, self.pool.layers - 1))
        head = data.draw(st.integers(0, self.pool.heads - 1))
        counts = target.counts()
        counts[layer, head] = data.draw(st.integers(0, 9))
        self.resize(target, counts)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), spare=st.integers(0, 3))
    def take_what_is_free(self, data: st.DataObject, spare: int) -> None:
        """One head takes nearly all that the pool has left: every other region has to give way."""
        target = data.draw(st.sampled_from(self.live))
        counts = target.counts()
        layer = data.draw(st.integers(0, self.pool.layers - 1))
        free = self.pool.manager.pages - self.pool.manager.used_pages
        counts[layer, data.draw(st.integers(0, self.pool.heads - 1))] += max(free - spare, 0)
        self.resize(target, counts)

    @precondition(lambda self: self.live and self.pool.layers > 1)
    @rule(data=st.data())
    def give_one_layers_pages_to_another(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from(self.live))
        order = data.draw(st.permutations(range(self.pool.layers)))
        self.resize(target, target.counts()[list(order)])

    def resize(self, target: ModelTable, counts: Pages) -> None:
        pool, before = self.pool, snapshot(self.pool)
        used = sum(int(model.counts().sum()) for model in self.live)
        change = int((counts - target.counts()).sum())
        if used + change > pool.manager.pages:
            with pytest.raises(CapacityError, match=f"{change} more pages are needed, the pool has"):
                pool.resize(target.table, counts)
            assert snapshot(pool) == before
            return
        pages_before = [table.pages.tolist() for table in pool.tables]
        versions = [table.version for table in pool.tables]
        pool.resize(target.table, counts)
        for layer in range(pool.layers):
            for head in range(pool.heads):
                held = target.pages[layer][head][: counts[layer, head]]
                missing = counts[layer, head] - len(held)
                target.pages[layer][head] = held + [[EMPTY] * pool.page_slots for _ in range(missing)]
        self.peak = max(self.peak, used + change)
        for table, pages, version in zip(pool.tables, pages_before, versions, strict=True):
            assert table.pages.tolist() == pages or table.version > version
            assert pool.layer_regions or table is target.table or table.pages.tolist() == pages

    @precondition(lambda self: any(model.counts().any() for model in self.live))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from([model for model in self.live if model.counts().any()]))
        layer, head = data.draw(st.sampled_from(np.argwhere(target.counts()).tolist()))
        pool, room = self.pool, int(target.counts()[layer, head]) * self.pool.page_slots
        some = st.lists(st.integers(0, room - 1), min_size=1, max_size=6, unique=True)
        chosen = data.draw(st.just(list(range(room))) | some)
        flat = pool.slots(target.table, room)[layer, head]
        for place in chosen:
            marker, slot = self.next_marker, int(flat[place])
            self.next_marker += 1
            pool.keys.view(-1, HEAD_DIM)[slot] = float(marker)
            pool.values.view(-1, HEAD_DIM)[slot] = marker + 0.5
            pool.bias.view(-1)[slot] = -float(marker)
            pool.positions.view(-1)[slot] = marker
            if pool.statistic.shape[0]:
                pool.statistic.view(-1)[slot] = marker + 0.25
            target.pages[layer][head][place // pool.page_slots][place % pool.page_slots] = marker

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop_table(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from(self.live))
        pages = target.table.pages[target.table.pages != FREE].copy()
        self.pool.drop_table(target.table)
        self.live.remove(target)
        self.dropped.append(target.table)
        assert (self.pool.manager.owner[pages] == FREE).all()
        if len(pages):
            self.refuse_release(pages)

    @precondition(lambda self: self.pool.manager.used_pages)
    @rule(data=st.data())
    def release_a_page_twice_in_one_call(self, data: st.DataObject) -> None:
        owned = np.flatnonzero(self.pool.manager.owner != FREE)
        page = data.draw(st.sampled_from(owned.tolist()))
        self.refuse_release(np.array([page, page], dtype=np.int64))

    @precondition(lambda self: (self.pool.manager.owner == FREE).any())
    @rule(data=st.data())
    def release_a_free_page_among_owned_ones(self, data: st.DataObject) -> None:
        owner = self.pool.manager.owner
        page = data.draw(st.sampled_from(np.flatnonzero(owner == FREE).tolist()))
        self.refuse_release(np.append(np.flatnonzero(owner != FREE), page))

    def refuse_release(self, pages: Pages) -> None:
        before = snapshot(self.pool)
        with pytest.raises(ValueError, match="a page was released that is not allocated"):
            self.pool.manager.release(pages)
        assert snapshot(self.pool) == before

    @precondition(lambda self: self.dropped)
    @rule(data=st.data())
    def use_after_drop(self, data: st.DataObject) -> None:
        table, before = data.draw(st.sampled_from(self.dropped)), snapshot(self.pool)
        with pytest.raises(ValueError, match="was dropped"):
            self.pool.resize(table, np.ones_like(table.counts))
        with pytest.raises(ValueError, match="was dropped"):
            self.pool.drop_table(table)
        assert snapshot(self.pool) == before

    @invariant()
    def every_page_has_one_owner_and_none_is_lost(self) -> None:
        manager, seen = self.pool.manager, []
        for model in self.live:
            assert model.table.counts.tolist() == model.counts().tolist()
            for layer, head in np.ndindex(*model.counts().shape):
                count = int(model.counts()[layer, head])
                pages = model.table.pages[layer, head]
                assert (pages[count:] == FREE).all()
                region = pool_span(self.pool, layer)
                for page in pages[:count].tolist():
                    assert region.start <= page < region.stop
                    assert manager.owner[page] == model.lane * self.pool.heads + head
                    seen.append(page)
        assert len(set(seen)) == len(seen)
        assert sorted(seen) == np.flatnonzero(manager.owner != FREE).tolist()
        assert manager.used_pages == len(seen)
        assert self.pool.peak_pages == self.peak

    @invariant()
    def regions_cut_the_pool_and_spans_are_the_tightest(self) -> None:
        manager = self.pool.manager
        assert manager.bounds[0] == 0
        assert manager.bounds[-1] == manager.pages
        assert (np.diff(manager.bounds) >= 0).all()
        free = [(manager.owner[manager.region(index)] == FREE).sum() for index in range(manager.regions)]
        assert manager.free_pages().tolist() == free
        for layer in range(self.pool.layers):
            held = [page for model in self.live for page in model.table.pages[layer].flatten() if page != FREE]
            span = self.pool.span(layer)
            if self.pool.layer_regions:
                assert (span.start, span.stop) == ((min(held), max(held) + 1) if held else (span.start, span.start))
            else:
                assert (span.start, span.stop) == (0, manager.pages)

    @invariant()
    def contents_survive_bit_for_bit(self) -> None:
        pool = self.pool
        marks = torch.full((pool.manager.pages + 1, pool.page_slots), EMPTY, dtype=torch.int32)
        for model in self.live:
            for layer, head in np.ndindex(*model.counts().shape):
                for page, slots in zip(model.table.pages[layer, head].tolist(), model.pages[layer][head], strict=False):
                    marks[page] = torch.tensor(slots, dtype=torch.int32)
        written, number = marks != EMPTY, marks.float()
        # Free pages and slots never written: hidden, zeroed, no trace of an earlier owner.
        assert torch.equal(pool.bias, torch.where(written, -number, float("-inf")))
        assert torch.equal(pool.keys, number[..., None].expand(-1, -1, HEAD_DIM))
        assert torch.equal(pool.values, torch.where(written, number + 0.5, 0.0)[..., None].expand(-1, -1, HEAD_DIM))
        assert torch.equal(pool.positions[written], marks[written])
        if pool.statistic.shape[0]:
            owned = owned_pages(pool)
            assert torch.equal(pool.statistic[owned], torch.where(written, number + 0.25, 0.0)[owned])

    @invariant()
    def bytes_are_exact_and_addresses_constant(self) -> None:
        pool = self.pool
        tensors = (pool.keys, pool.values, pool.bias, pool.positions, pool.statistic)
        assert pool.reserved_bytes == sum(tensor.nbytes for tensor in tensors)
        owned = owned_pages(pool)
        assert pool.used_bytes == sum(tensor[owned].nbytes for tensor in tensors if len(tensor))
        assert [tensor.data_ptr() for tensor in tensors[:3]] == self.addresses


TestPool = PoolMachine.TestCase


def test_pages_of_one_layer_can_go_to_another_in_a_full_pool() -> None:
    """A resize whose result fits was refused while the pool was full (it asked for the new pages on top of the old)."""
    pool = PagePool(4, 2, 2, 1, HEAD_DIM, torch.float32, torch.device("cpu"), False)
    table = pool.new_table(0)
    pool.resize(table, np.array([[3], [1]]))
    kept = int(table.pages[1, 0, 0])
    pool.keys[kept] = 7.0
    pool.resize(table, np.array([[1], [3]]))
    assert table.counts.tolist() == [[1], [3]]
    assert pool.keys[int(table.pages[1, 0, 0])].tolist() == [[7.0] * HEAD_DIM] * 2


def test_a_move_leaves_nothing_of_the_old_owner_behind() -> None:
    """Pages that a region moved out of kept their K and V: a NaN in them would have poisoned the next owner."""
    pool = PagePool(6, 1, 3, 1, HEAD_DIM, torch.float32, torch.device("cpu"), False)
    first, second = pool.new_table(0), pool.new_table(1)
    pool.resize(first, np.array([[1], [2], [1]]))
    place = first.pages[first.pages != FREE]
    pool.keys[torch.from_numpy(place)] = float("nan")
    pool.resize(second, np.array([[2], [0], [0]]))
    moved = first.pages[first.pages != FREE]
    assert moved.tolist() != place.tolist()
    written = torch.zeros(7, dtype=torch.bool).index_fill_(0, torch.from_numpy(moved), True)
    assert pool.keys[written].isnan().all()
    assert not pool.keys[~written].any()


@given(data=st.data(), layers=st.integers(2, 5))
def test_regions_that_slide_over_each_other_keep_their_contents(data: st.DataObject, layers: int) -> None:
    """One layer after another takes or gives back pages, with no page to spare: whole regions move left and right."""
    pool = PagePool(5 * layers, 1, layers, 1, HEAD_DIM, torch.float32, torch.device("cpu"), True)
    table = pool.new_table(0)
    counts = np.full((layers, 1), 5, dtype=np.int64)
    pool.resize(table, counts)
    for layer in range(layers):
        pool.keys[torch.from_numpy(table.pages[layer, 0])] = float(layer + 1)
    for _ in range(4):
        weights = np.array(data.draw(st.lists(st.integers(0, 9), min_size=layers, max_size=layers))) + 1
        wanted = np.maximum(weights * 5 * layers // weights.sum(), 1)
        wanted[int(wanted.argmax())] += 5 * layers - wanted.sum()
        pool.resize(table, wanted[:, None])
        assert pool.manager.used_pages == 5 * layers
        for layer in range(layers):
            marks = pool.keys[torch.from_numpy(table.pages[layer, 0, : wanted[layer]])][:, 0, 0].tolist()
            kept = min(int(counts[layer, 0]), int(wanted[layer]))
            assert marks == [layer + 1.0] * kept + [0.0] * (int(wanted[layer]) - kept)
            pool.keys[torch.from_numpy(table.pages[layer, 0, : wanted[layer]])] = float(layer + 1)
        counts = wanted[:, None]


def test_slots_of_a_head_without_a_page_are_those_of_page_zero() -> None:
    pool = PagePool(4, 4, 1, 2, HEAD_DIM, torch.float32, torch.device("cpu"), False)
    table = pool.new_table(0)
    pool.resize(table, np.array([[2, 0]]))
    pages = table.pages[0, 0]
    expected = [int(page) * 4 + slot for page in pages for slot in range(4)][:6]
    assert pool.slots(table, 6).tolist() == [[expected, [0, 1, 2, 3, 0, 1]]]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.lists(st.integers(0, 6), min_size=5, max_size=5))
def test_planned_regions_have_the_room_asked_for(held: list[int], extra: list[int]) -> None:
    layers, pages = len(held), 24
    manager = PageManager(pages, layers)
    manager.bounds = np.linspace(0, pages, layers + 1).astype(np.int64)
    held = [min(count, int(size)) for count, size in zip(held, np.diff(manager.bounds), strict=True)]
    for layer, count in enumerate(held):
        manager.allocate(layer, np.full(count, layer, dtype=np.int64))
    wanted = np.array(held) + np.array(extra[:layers])
    if wanted.sum() > pages:
        with pytest.raises(CapacityError, match=f"{sum(extra[:layers])} more pages are needed"):
            manager.plan_regions(np.array(extra[:layers]))
    else:
        sizes = np.diff(manager.plan_regions(np.array(extra[:layers])))
        assert (sizes >= wanted).all()
        assert sizes.sum() == pages
