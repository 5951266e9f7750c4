"""The tiers and the cascade against plain lists, attention against one float64 softmax."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from hardkv.errors import CapacityError
from hardkv.interfaces import CacheTier
from hardkv.memory import FREE, PagePool
from hardkv.query_ring import QueryRing
from hardkv.tiers.cascade import Cascade
from hardkv.tiers.dense import DenseTier
from hardkv.tiers.evict import Evict
from hardkv.tiers.merge import Merge
from hardkv.tiers.paged import PagedTier
from hardkv.tiers.sliding import SlidingRings
from hardkv.tiers.sparse import SparseTier
from hardkv.types import AttentionCall, Layout, TierShape, TokenBatch
from hardkv_kernels import append
from tests.oracles import lay_out, merged

SEEDS = st.integers(0, 2**31 - 1)
CPU = torch.device("cpu")
HEAD_DIM, GROUP, SCALING = 4, 2, 0.5


@lru_cache(maxsize=100_000)
def token(number: int) -> tuple[Tensor, Tensor]:
    """K and V of one token, known by its number alone."""
    rng = torch.Generator().manual_seed(number)
    return torch.randn(HEAD_DIM, generator=rng), torch.randn(HEAD_DIM, generator=rng)


def exact(query: Tensor, keys: list[Tensor], values: list[Tensor], scaling: float = SCALING) -> tuple[Tensor, Tensor]:
    """Attention of `query [G, D]` over a list of tokens, and its log-sum-exp, in float64."""
    if not keys:
        return torch.zeros_like(query).double(), torch.full(query.shape[:-1], -torch.inf).double()
    logits = query.double() @ torch.stack(keys).double().T * scaling
    return torch.softmax(logits, -1) @ torch.stack(values).double(), torch.logsumexp(logits, -1)


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """By default: float32 sums of a few dozen terms of order one, against float64."""
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def batch_of(rows: list[list[int]], positions: list[list[int]], rng: torch.Generator) -> TokenBatch:
    """A batch in which row h holds the numbered tokens, with NaN and other positions strewn between them."""
    width = max(len(row) for row in rows) + 2
    keys = torch.full((len(rows), width, HEAD_DIM), float("nan"))
    values, mask = keys.clone(), torch.zeros(len(rows), width, dtype=torch.bool)
    where = torch.full((len(rows), width), -7)
    for head, row in enumerate(rows):
        columns = torch.randperm(width, generator=rng)[: len(row)].sort().values.tolist()
        for column, number, position in zip(columns, row, positions[head], strict=True):
            keys[head, column], values[head, column] = token(number)
            mask[head, column], where[head, column] = True, position
    return TokenBatch(keys=keys, values=values, positions=where, mask=mask)


def frozen(pool: PagePool, *tiers: PagedTier) -> list[object]:
    """Everything that a refused call must leave alone."""
    tensors = [tensor.numpy().tobytes() for tensor in (pool.keys, pool.values, pool.bias, pool.positions)]
    held = [tier.table.pages[tier.table.pages != FREE].tolist() for tier in tiers]
    state = [(tier.lengths.tolist(), tier.table.counts.tolist()) for tier in tiers]
    return [*tensors, pool.manager.owner.tolist(), pool.manager.bounds.tolist(), held, state]


class PagedTierMachine(RuleBasedStateMachine):
    """Dense and sparse tiers of several sequences over one pool."""

    @initialize(
        layers=st.integers(1, 3),
        heads=st.integers(1, 2),
        pages=st.integers(8, 40),
        page_slots=st.integers(1, 4),
        seed=SEEDS,
    )
    def build(self, layers: int, heads: int, pages: int, page_slots: int, seed: int) -> None:
        self.pool = PagePool(pages, page_slots, layers, heads, HEAD_DIM, torch.float32, CPU, False)
        self.rng = torch.Generator().manual_seed(seed)
        self.tiers: list[PagedTier] = []
        self.tokens: list[list[list[list[int]]]] = []  # of each tier, layer, head: token numbers in slot order
        self.next_token = 0
        self.addresses = (self.pool.keys.data_ptr(), self.pool.values.data_ptr(), self.pool.bias.data_ptr())

    def add(self, tier: PagedTier) -> None:
        self.tiers.append(tier)
        self.tokens.append([[[] for _ in range(self.pool.heads)] for _ in range(self.pool.layers)])

    @precondition(lambda self: len(self.tiers) < 6)
    @rule(capacity=st.integers(1, 6), lane=st.integers(0, 3))
    def open_dense(self, capacity: int, lane: int) -> None:
        tier = DenseTier(self.pool, lane, capacity)
        self.add(tier)
        self.allocate(len(self.tiers) - 1)

    @precondition(lambda self: len(self.tiers) < 6)
    @rule(lane=st.integers(0, 3))
    def open_sparse(self, lane: int) -> None:
        self.add(SparseTier(self.pool, lane))

    def allocate(self, index: int) -> None:
        """Room for a dense tier's capacity; where the pool is short, it has none and refuses its first token."""
        tier, pool = self.tiers[index], self.pool
        assert isinstance(tier, DenseTier)
        needed = -(-tier.capacity // pool.page_slots) * pool.layers * pool.heads - int(tier.table.counts.sum())
        shape = TierShape(pool.layers, pool.heads, HEAD_DIM, tier.capacity, torch.float32, CPU)
        if needed > pool.manager.pages - pool.manager.used_pages:
            before = frozen(pool, *self.tiers)
            with pytest.raises(CapacityError, match="more pages are needed"):
                tier.allocate(shape)
            assert frozen(pool, *self.tiers) == before
        else:
            tier.allocate(shape)

    @precondition(lambda self: self.tiers)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tiers) - 1))
        layer = data.draw(st.integers(0, self.pool.layers - 1))
        tier, held, pool = self.tiers[index], self.tokens[index][layer], self.pool
        rows = []
        for _ in range(pool.heads):
            count = data.draw(st.integers(0, 4))
            rows.append(list(range(self.next_token, self.next_token + count)))
            self.next_token += count
        tokens = batch_of(rows, rows, self.rng)
        lengths = np.array([len(old) + len(new) for old, new in zip(held, rows, strict=True)])
        if isinstance(tier, DenseTier):
            fits = (lengths <= np.minimum(tier.capacity, tier.table.counts[layer] * pool.page_slots)).all()
        else:
            needed = (-(-lengths // pool.page_slots) - tier.table.counts[layer]).sum()
            fits = needed <= pool.manager.pages - pool.manager.used_pages
            if tier.table not in pool.tables:
                return
        if not fits:
            before = frozen(pool, *self.tiers)
            with pytest.raises(CapacityError):
                tier.admit(layer, tokens)
            assert frozen(pool, *self.tiers) == before
            return
        tier.admit(layer, tokens)
        for old, new in zip(held, rows, strict=True):
            old.extend(new)

    @precondition(lambda self: self.tiers)
    @rule(data=st.data(), again=st.booleans())
    def reset(self, data: st.DataObject, again: bool) -> None:
        index = data.draw(st.integers(0, len(self.tiers) - 1))
        tier, pool = self.tiers[index], self.pool
        pages = tier.table.pages[tier.table.pages != FREE].copy()
        tier.reset()
        after = frozen(pool, *self.tiers)
        tier.reset()
        assert frozen(pool, *self.tiers) == after
        assert tier.allocated_bytes == 0
        assert (pool.manager.owner[pages] == FREE).all()
        self.tokens[index] = [[[] for _ in range(pool.heads)] for _ in range(pool.layers)]
        if again and isinstance(tier, DenseTier):
            self.allocate(index)
        elif again:
            fresh = tier.fresh()
            assert isinstance(fresh, SparseTier)
            self.tiers[index] = fresh

    @invariant()
    def attends_to_its_own_tokens_exactly(self) -> None:
        query = torch.randn(self.pool.heads, GROUP, HEAD_DIM, generator=self.rng)
        for tier, held in zip(self.tiers, self.tokens, strict=True):
            assert tier.lengths.tolist() == [[len(row) for row in layer] for layer in held]
            for layer in range(self.pool.layers):
                out, lse = tier.attend(layer, query, SCALING)
                for head, row in enumerate(held[layer]):
                    keys, values = [token(number)[0] for number in row], [token(number)[1] for number in row]
                    expected, expected_lse = exact(query[head], keys, values)
                    assert_close(out[head], expected)
                    assert_close(lse[head], expected_lse)

    @invariant()
    def bytes_and_addresses(self) -> None:
        pool = self.pool
        assert sum(tier.allocated_bytes for tier in self.tiers) == pool.used_bytes - pool.page_bytes
        assert (pool.keys.data_ptr(), pool.values.data_ptr(), pool.bias.data_ptr()) == self.addresses


TestPagedTiers = PagedTierMachine.TestCase
TestPagedTiers.settings = settings(stateful_step_count=25)


def test_a_dense_tier_without_pages_refuses_tokens() -> None:
    """It wrote them over page 0, whoever owned that."""
    pool = PagePool(4, 4, 1, 1, HEAD_DIM, torch.float32, CPU, False)
    tier = DenseTier(pool, 0, capacity=4)
    with pytest.raises(CapacityError, match="holds 0 of 0 tokens, 1 more came"):
        tier.admit(0, batch_of([[1]], [[0]], torch.Generator()))
    assert not pool.keys.any()


def test_a_reset_tier_can_be_allocated_again_and_survives_region_moves() -> None:
    """After a reset the pool no longer knew the tier's table, so a move would have left it with another's pages."""
    pool = PagePool(8, 1, 2, 1, HEAD_DIM, torch.float32, CPU, False)
    dense, sparse = DenseTier(pool, 0, capacity=1), SparseTier(pool, 1)
    shape = TierShape(2, 1, HEAD_DIM, 1, torch.float32, CPU)
    dense.allocate(shape)
    dense.reset()
    dense.allocate(shape)
    for layer in (0, 1):
        dense.admit(layer, batch_of([[layer + 1]], [[0]], torch.Generator()))
    place = int(dense.table.pages[1, 0, 0])
    sparse.admit(0, batch_of([[3, 4, 5, 6, 7]], [[1, 2, 3, 4, 5]], torch.Generator()))
    assert int(dense.table.pages[1, 0, 0]) != place
    query = torch.ones(1, 1, HEAD_DIM)
    assert_close(dense.attend(1, query, SCALING)[0][0, 0], token(2)[1])


# The cascade


@dataclass
class HeadModel:
    """One head of one layer: its sparse tokens with their keep bits, and its dense tokens."""

    sparse: list[tuple[int, bool]]
    dense: list[int]


class CascadeMachine(RuleBasedStateMachine):
    """Two sequences decode and are compressed with random layouts, over one pool that is barely large enough."""

    @initialize(
        layers=st.integers(1, 3),
        heads=st.integers(1, 2),
        page_slots=st.integers(1, 4),
        sinks=st.integers(0, 2),
        local_window=st.integers(1, 4),
        interval=st.integers(1, 4),
        with_statistic=st.booleans(),
        seed=SEEDS,
    )
    def build(
        self,
        layers: int,
        heads: int,
        page_slots: int,
        sinks: int,
        local_window: int,
        interval: int,
        with_statistic: bool,
        seed: int,
    ) -> None:
        dense = 2 * layers * heads * -(-(local_window + interval) // page_slots)
        self.pages = dense + layers * heads * -(-16 // page_slots)
        self.pool = PagePool(self.pages, page_slots, layers, heads, HEAD_DIM, torch.float32, CPU, with_statistic)
        self.rng = torch.Generator().manual_seed(seed)
        self.sinks, self.local_window = sinks, local_window
        self.capacity = local_window + interval
        self.cascades: list[Cascade] = []
        self.models: list[list[list[HeadModel]]] = []
        self.dropped: dict[tuple[int, int], list[int]] = {}
        for lane in range(2):
            cascade = Cascade(self.pool, lane, sinks, local_window, interval, Evict())
            cascade.allocate(0)
            self.cascades.append(cascade)
            self.models.append([[HeadModel([], []) for _ in range(heads)] for _ in range(layers)])

    def number(self, lane: int, layer: int, head: int, position: int) -> int:
        return ((lane * 8 + layer) * 8 + head) * 10_000 + position

    @rule(lane=st.integers(0, 1), tokens=st.integers(1, 8))
    def decode(self, lane: int, tokens: int) -> None:
        cascade, model = self.cascades[lane], self.models[lane]
        tokens = min(tokens, self.capacity - cascade.dense.length)
        positions = list(range(cascade.seen_tokens, cascade.seen_tokens + tokens))
        for layer, heads in enumerate(model):
            rows = [[self.number(lane, layer, head, position) for position in positions] for head in range(len(heads))]
            cascade.dense.admit(layer, batch_of(rows, [positions] * len(heads), self.rng))
            for head in heads:
                head.dense.extend(positions)
        cascade.seen_tokens += tokens
        assert cascade.dense.full == (cascade.dense.length == self.capacity)
        if self.pool.statistic.shape[0]:
            self.pool.statistic.fill_(3.0)

    @precondition(lambda self: any(cascade.dense.full for cascade in self.cascades))
    @rule(data=st.data(), density=st.sampled_from([0.0, 0.3, 0.7, 1.0]), flat=st.booleans())
    def compress(self, data: st.DataObject, density: float, flat: bool) -> None:
        lane = data.draw(st.sampled_from([lane for lane in (0, 1) if self.cascades[lane].dense.full]))
        cascade, model = self.cascades[lane], self.models[lane]
        resident = cascade.resident()
        chosen = torch.rand(resident.valid.shape, generator=self.rng) < density
        keep = (chosen | resident.protected) & resident.valid
        rewrite = torch.rand(keep.shape[:2], generator=self.rng) < 0.5
        kept = keep.sum(-1)
        layout = Layout(keep=keep, rewrite=rewrite, reserve_slots=kept.amax().expand_as(kept) if flat else kept)
        expected, gone = self.apply_to_model(model, layout)
        needed = sum(self.pages_of(head, int(layout.reserve_slots[i, j])) for (i, j), head in expected.items())
        held = int(cascade.sparse.table.counts.sum())
        if needed - held > self.pages - self.pool.manager.used_pages:
            layout = Layout(keep=keep, rewrite=torch.ones_like(rewrite), reserve_slots=kept)
            expected, gone = self.apply_to_model(model, layout)
            needed = sum(self.pages_of(head, 0) for head in expected.values())
            if needed - held > self.pages - self.pool.manager.used_pages:
                return
        heard: dict[tuple[int, int], list[tuple[int, Tensor]]] = {key: [] for key in expected}

        def drop(layer: int, tokens: TokenBatch) -> None:
            for head in range(self.pool.heads):
                mask = tokens.mask[head]
                pairs = zip(tokens.positions[head][mask].tolist(), tokens.keys[head][mask], strict=True)
                heard[layer, head].extend(pairs)

        lay_out(cascade, resident, layout, drop)
        for (layer, head), dropped in heard.items():
            model[layer][head] = expected[layer, head]
            assert [position for position, _ in dropped] == gone[layer, head]
            for position, key in dropped:
                assert torch.equal(key, token(self.number(lane, layer, head, position))[0])
            pages = self.pages_of(expected[layer, head], int(layout.reserve_slots[layer, head]))
            assert cascade.sparse.table.counts[layer, head] == pages
        if self.pool.statistic.shape[0]:
            tables = (cascade.sparse.table, cascade.dense.table)
            pages_held = np.concatenate([table.pages[table.pages != FREE] for table in tables])
            assert not self.pool.statistic[torch.from_numpy(pages_held)].any()

    def pages_of(self, head: HeadModel, reserve: int) -> int:
        return -(-max(len(head.sparse), reserve - self.local_window) // self.pool.page_slots)

    def apply_to_model(
        self, model: list[list[HeadModel]], layout: Layout
    ) -> tuple[dict[tuple[int, int], HeadModel], dict[tuple[int, int], list[int]]]:
        """What every head should hold after a layout, and the positions it lets go."""
        expected, gone = {}, {}
        for layer, heads in enumerate(model):
            for index, head in enumerate(heads):
                old = [position for position, _ in head.sparse] + head.dense
                ageing = old[: len(old) - self.local_window]
                bits = layout.keep[layer, index].tolist()
                compacts = bool(layout.rewrite[layer, index])
                sparse = [(at, bit) for at, bit in zip(ageing, bits, strict=False) if bit or not compacts]
                expected[layer, index] = HeadModel(sparse, head.dense[-self.local_window :])
                stay = {at for at, _ in sparse}
                gone[layer, index] = [at for at in ageing if at not in stay]
        return expected, gone

    @rule(lane=st.integers(0, 1))
    def close_and_open(self, lane: int) -> None:
        old, pool = self.cascades[lane], self.pool
        old.close()
        assert not (pool.manager.owner // pool.heads == lane)[pool.manager.owner != FREE].any()
        fresh = Cascade(pool, lane, self.sinks, self.local_window, self.capacity - self.local_window, old.last.fresh())
        fresh.allocate(0)
        self.cascades[lane] = fresh
        self.models[lane] = [[HeadModel([], []) for _ in range(pool.heads)] for _ in range(pool.layers)]

    @invariant()
    def residents_are_those_of_the_model_in_position_order(self) -> None:
        for lane, (cascade, model) in enumerate(zip(self.cascades, self.models, strict=True)):
            resident = cascade.resident()
            for layer, heads in enumerate(model):
                keys, values = (part[0] for part in cascade.gather(resident, slice(layer, layer + 1)))
                for head, held in enumerate(heads):
                    valid = resident.valid[layer, head]
                    positions = [position for position, _ in held.sparse] + held.dense
                    assert resident.positions[layer, head][valid].tolist() == positions == sorted(positions)
                    window = [False] * len(held.sparse) + [
                        offset >= len(held.dense) - self.local_window for offset in range(len(held.dense))
                    ]
                    assert resident.window[layer, head][valid].tolist() == window
                    protected = [near or at < self.sinks for near, at in zip(window, positions, strict=True)]
                    assert resident.protected[layer, head][valid].tolist() == protected
                    assert not (resident.protected & ~resident.valid).any()
                    assert set(range(min(self.sinks, cascade.seen_tokens))) <= set(positions)
                    tokens = [token(self.number(lane, layer, head, at)) for at in positions]
                    if tokens:
                        assert torch.equal(keys[head][valid], torch.stack([key for key, _ in tokens]))
                        assert torch.equal(values[head][valid], torch.stack([value for _, value in tokens]))

    @invariant()
    def attention_sees_exactly_the_kept_ones(self) -> None:
        query = torch.randn(self.pool.heads, GROUP, HEAD_DIM, generator=self.rng)
        for lane, (cascade, model) in enumerate(zip(self.cascades, self.models, strict=True)):
            shown = [[[at for at, bit in head.sparse if bit] + head.dense for head in layer] for layer in model]
            assert cascade.kept_tokens().tolist() == [[len(row) for row in layer] for layer in shown]
            for layer, rows in enumerate(shown):
                states = [tier.attend(layer, query, SCALING) for tier in (cascade.dense, cascade.sparse, cascade.last)]
                out, lse = merged([state[0] for state in states], [state[1] for state in states])
                for head, row in enumerate(rows):
                    tokens = [token(self.number(lane, layer, head, at)) for at in row]
                    expected = exact(query[head], [key for key, _ in tokens], [value for _, value in tokens])
                    assert_close(out[head], expected[0])
                    assert_close(lse[head], expected[1])

    @invariant()
    def pages_are_those_of_the_tiers(self) -> None:
        tables = [table for cascade in self.cascades for table in (cascade.dense.table, cascade.sparse.table)]
        assert self.pool.manager.used_pages == sum(int(table.counts.sum()) for table in tables)
        assert len(self.pool.tables) == 4


TestCascade = CascadeMachine.TestCase
TestCascade.settings = settings(stateful_step_count=25)


# The last tier


def random_tokens(rng: torch.Generator, heads: int, width: int, query: Tensor, dtype: torch.dtype) -> TokenBatch:
    """Donors strewn over NaN; sometimes none in a head."""
    mask = torch.rand(heads, width, generator=rng) < torch.rand(heads, 1, generator=rng)
    keys, values = (torch.randn(heads, width, HEAD_DIM, generator=rng, dtype=dtype) for _ in range(2))
    hole = ~mask[..., None]
    positions = torch.arange(width).expand(heads, width)
    return TokenBatch(
        keys.masked_fill(hole, float("nan")), values.masked_fill(hole, float("nan")), positions, mask, SCALING, query
    )


@given(seed=SEEDS, slots=st.integers(1, 4), rounds=st.integers(1, 4), strong=st.sampled_from([1.0, 6.0]))
def test_merge_is_exact_for_the_reference_query_round_after_round(
    seed: int, slots: int, rounds: int, strong: float
) -> None:
    """After each merge the newest query sees what it would have over the tier as it was plus the donors themselves."""
    rng, heads = torch.Generator().manual_seed(seed), 3
    tier = Merge().fresh()
    assert isinstance(tier, Merge)
    tier.allocate(TierShape(2, heads, HEAD_DIM, slots, torch.float64, CPU))
    same_query = torch.randn(heads, HEAD_DIM, generator=rng, dtype=torch.float64) * strong
    history: list[TokenBatch] = []
    for round_number in range(rounds):
        fixed = bool(seed % 2)
        query = same_query if fixed else torch.randn(heads, HEAD_DIM, generator=rng, dtype=torch.float64) * strong
        before = tier.attend(1, query[:, None], SCALING)
        tokens = random_tokens(rng, heads, 9, query, torch.float64)
        history.append(tokens)
        tier.admit(1, tokens)
        out, lse = tier.attend(1, query[:, None], SCALING)
        for head in range(heads):
            mask = tokens.mask[head]
            donors = exact(query[head][None], list(tokens.keys[head][mask]), list(tokens.values[head][mask]))
            expected = merged([before[0][head].double(), donors[0]], [before[1][head].double(), donors[1]])
            assert_close(out[head], expected[0], 1e-4)
            assert_close(lse[head], expected[1], 1e-4)
            if fixed:  # the same reference all along: exact over every donor there ever was
                keys = [key for past in history for key in past.keys[head][past.mask[head]]]
                values = [value for past in history for value in past.values[head][past.mask[head]]]
                expected = exact(query[head][None], keys, values)
                assert_close(out[head], expected[0], 1e-4)
                assert_close(lse[head], expected[1], 1e-4)
        assert round_number or torch.isfinite(tier.read(1)[2]).sum(-1).tolist() == [
            min(slots, int(count)) for count in tokens.mask.sum(-1)
        ]
    untouched_keys, _, untouched_bias = tier.read(0)
    assert torch.isneginf(untouched_bias).all()
    assert not untouched_keys.any()
    assert tier.allocated_bytes == 2 * heads * slots * (2 * HEAD_DIM * 8 + 4)
    tier.reset()
    assert tier.allocated_bytes == 0
    tier.reset()
    assert tier.allocated_bytes == 0


def test_merge_without_slots_says_what_to_set() -> None:
    with pytest.raises(CapacityError, match=r"set cache\.condensed_slots above 0"):
        Merge().allocate(TierShape(1, 1, HEAD_DIM, 0, torch.float32, CPU))


def test_a_single_donor_is_kept_as_it_is() -> None:
    tier = Merge()
    tier.allocate(TierShape(1, 1, HEAD_DIM, 2, torch.float32, CPU))
    key, value = token(1)
    positions, mask = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    tier.admit(0, TokenBatch(key[None, None], value[None, None], positions, mask, SCALING, torch.ones(1, HEAD_DIM)))
    keys, values, bias = tier.read(0)
    assert torch.equal(keys[0, 0], key)
    assert torch.equal(values[0, 0], value)
    assert bias[0].tolist() == [0.0, -torch.inf]


def test_evict_keeps_and_answers_nothing() -> None:
    tier: CacheTier = Evict()
    tier.allocate(TierShape(1, 1, HEAD_DIM, 0, torch.float32, CPU))
    tier.admit(0, batch_of([[1, 2]], [[0, 1]], torch.Generator()))
    out, lse = tier.attend(0, torch.ones(1, 3, HEAD_DIM, dtype=torch.bfloat16), SCALING)
    assert out.dtype == lse.dtype == torch.float32
    assert out.tolist() == [[[0.0] * HEAD_DIM] * 3]
    assert lse.tolist() == [[-torch.inf] * 3]
    assert (tier.allocated_bytes, tier.holds_tokens, tier.needs_queries) == (0, False, False)


@given(seed=SEEDS, sparse=st.integers(0, 9), dense=st.integers(0, 5), donors=st.integers(0, 7), slots=st.integers(1, 3))
def test_tiers_compose_by_log_sum_exp(seed: int, sparse: int, dense: int, donors: int, slots: int) -> None:
    """Dense, sparse and merge together are one softmax over all their slots, for every query."""
    rng, heads = torch.Generator().manual_seed(seed), 2
    pool = PagePool(32, 2, 1, heads, HEAD_DIM, torch.float32, CPU, False)
    tiers: list[CacheTier] = [DenseTier(pool, 0, 5), SparseTier(pool, 0), Merge()]
    query = torch.randn(heads, GROUP, HEAD_DIM, generator=rng)
    keys: list[list[Tensor]] = [[] for _ in range(heads)]
    values: list[list[Tensor]] = [[] for _ in range(heads)]
    for tier, count in zip(tiers, (dense, sparse, donors), strict=True):
        if not isinstance(tier, SparseTier):
            size = 5 if isinstance(tier, DenseTier) else slots
            tier.allocate(TierShape(1, heads, HEAD_DIM, size, torch.float32, CPU))
        numbers = [[int(torch.randint(1 << 30, (), generator=rng)) for _ in range(count)] for _ in range(heads)]
        tokens = batch_of(numbers, [list(range(count))] * heads, rng)
        tier.admit(0, TokenBatch(tokens.keys, tokens.values, tokens.positions, tokens.mask, SCALING, query.mean(1)))
        for head, row in enumerate(numbers):
            if not isinstance(tier, Merge):
                keys[head] += [token(number)[0] for number in row]
                values[head] += [token(number)[1] for number in row]
    merge = tiers[-1]
    assert isinstance(merge, Merge)
    out, lse = merged(*map(list, zip(*(tier.attend(0, query, SCALING) for tier in tiers), strict=True)))
    for head in range(heads):
        merged_keys, merged_values, merged_bias = (part[head] for part in merge.read(0))
        filled = torch.isfinite(merged_bias)
        every_key = torch.stack([*keys[head], *merged_keys[filled], torch.zeros(HEAD_DIM)]).double()
        every_value = torch.stack([*values[head], *merged_values[filled], torch.zeros(HEAD_DIM)]).double()
        bias = torch.cat([torch.zeros(len(keys[head])), merged_bias[filled], torch.tensor([-torch.inf])])
        logits = query[head].double() @ every_key.T * SCALING + bias
        expected = torch.softmax(logits, -1).nan_to_num(0.0) @ every_value
        assert_close(out[head], expected)
        assert_close(lse[head], torch.logsumexp(logits, -1))


# Rings


@given(
    seed=SEEDS,
    window=st.integers(1, 6),
    prompt=st.integers(1, 14),
    steps=st.integers(1, 9),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
)
def test_sliding_ring_is_sliding_window_attention(
    seed: int, window: int, prompt: int, steps: int, softcap: float | None, sinks: bool
) -> None:
    """Lanes run at their own positions, one joins each step or not; a lane's last owner leaves no trace."""
    rng, heads, lanes = torch.Generator().manual_seed(seed), 2, 3
    rings = SlidingRings({5: window}, lanes, lanes + 1, heads, HEAD_DIM, torch.float32, CPU)
    ring = rings._rings[5]
    addresses = (ring.keys.data_ptr(), ring.values.data_ptr(), ring.bias.data_ptr())
    assert ring.allocated_bytes == (lanes + 1) * heads * window * (2 * HEAD_DIM * 4 + 4)
    assert rings.allocated_bytes > ring.allocated_bytes
    sink_logits = torch.randn(heads, GROUP, generator=rng)
    history: list[list[tuple[Tensor, Tensor]]] = []
    for lane in range(lanes):
        rings.fill(5, lane, *(torch.full((heads, window + lane, HEAD_DIM), 9.0) for _ in range(2)))  # an earlier owner
        keys, values = torch.randn(2, heads, prompt + 2 * lane, HEAD_DIM, generator=rng)
        rings.fill(5, lane, keys, values)
        history.append([(keys[:, i], values[:, i]) for i in range(keys.shape[1])])
    for _ in range(steps):
        batch = torch.randperm(lanes, generator=rng)[: int(torch.randint(1, lanes + 1, (), generator=rng))]
        positions = torch.tensor([*(len(history[lane]) for lane in batch.tolist()), 0])
        bound = torch.cat([batch, torch.tensor([lanes])])  # the last row stands for nobody
        query = torch.randn(len(bound), heads, GROUP, HEAD_DIM, generator=rng)
        keys, values = torch.randn(2, len(bound), heads, HEAD_DIM, generator=rng)
        rings.bind(bound)
        rings.open(bound, positions)
        call = AttentionCall(5, query.flatten(1, 2)[:, :, None], keys[:, :, None], values[:, :, None], SCALING, softcap)
        out = rings.attend(5, call, query, bound, sink_logits if sinks else None)
        for row, lane in enumerate(batch.tolist()):
            history[lane].append((keys[row], values[row]))
            seen = history[lane][-window:]
            for head in range(heads):
                logits = query[row, head].double() @ torch.stack([key[head] for key, _ in seen]).double().T * SCALING
                if softcap is not None:
                    logits = torch.tanh(logits / softcap) * softcap
                if sinks:
                    logits = torch.cat([logits, sink_logits[head].double()[:, None]], -1)
                weights = torch.softmax(logits, -1)[:, : len(seen)]
                expected = weights @ torch.stack([value[head] for _, value in seen]).double()
                assert_close(out[row, head], expected)
    assert (ring.keys.data_ptr(), ring.values.data_ptr(), ring.bias.data_ptr()) == addresses
    rings.clear(1)
    assert torch.isneginf(ring._of(1, ring.bias)).all()
    assert not ring._of(1, ring.keys).any()
    assert not ring._of(1, ring.values).any()
    assert not torch.isneginf(ring._of(0, ring.bias)).all()


@given(seed=SEEDS, rows=st.integers(1, 5), prompt=st.integers(0, 9), steps=st.integers(0, 9))
def test_query_ring_holds_the_last_rows_oldest_first(seed: int, rows: int, prompt: int, steps: int) -> None:
    rng, lanes, heads = torch.Generator().manual_seed(seed), 3, 2
    ring = QueryRing(2, lanes, heads, GROUP, rows, HEAD_DIM, torch.float32, CPU)
    assert ring.allocated_bytes == (lanes + 1) * rows * (2 * heads * GROUP * HEAD_DIM * 4 + 8)
    lane, history = 1, [torch.randn(heads, GROUP, HEAD_DIM, generator=rng) for _ in range(prompt)]
    kept = history[-rows:]
    if kept:
        ring.fill(1, lane, torch.stack(kept, 2), torch.arange(prompt - len(kept), prompt))
    for _ in range(steps):
        query = torch.randn(1, heads, GROUP, HEAD_DIM, generator=rng)
        where, place = torch.tensor([len(history)]), len(history) % rows
        ring.positions[lane, place] = len(history)  # as `open_slots` does
        pool, fresh = torch.zeros(2, 1, heads, HEAD_DIM)
        append(
            fresh, fresh, torch.arange(heads), pool, pool.clone(), query, ring.queries[1], torch.tensor([lane]), where
        )
        history.append(query[0])
    queries, positions = ring.read(slice(1, 2), lane)
    known = min(rows, len(history))
    expected = [-1] * (rows - known) + list(range(len(history) - known, len(history)))
    assert positions.tolist() == [expected]
    assert queries.shape == (1, heads, GROUP, rows, HEAD_DIM)
    for row, position in enumerate(expected):
        assert position < 0 or torch.equal(queries[0, :, :, row], history[position])
    assert ring.read(slice(1, 2), 0)[1].tolist() == [[-1] * rows]
    assert not ring.queries[0].any()
    ring.clear(lane)
    assert ring.read(slice(1, 2), lane)[1].tolist() == [[-1] * rows]


def test_a_ring_step_never_waits_for_the_device() -> None:
    """Under FakeTensorMode a read-back or a data-dependent shape raises."""
    with FakeTensorMode():
        rings = SlidingRings({0: 3}, 4, 2, 2, HEAD_DIM, torch.float32, CPU)
        lanes, positions = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        query, fresh = torch.zeros(2, 2, GROUP, HEAD_DIM), torch.zeros(2, 2, 1, HEAD_DIM)
        rings.bind(lanes)
        rings.open(lanes, positions)
        call = AttentionCall(0, query.flatten(1, 2)[:, :, None], fresh, fresh, SCALING)
        out = rings.attend(0, call, query, lanes, torch.zeros(2, GROUP))
    assert out.shape == (2, 2, GROUP, HEAD_DIM)
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.zeros(2).sum().item()
