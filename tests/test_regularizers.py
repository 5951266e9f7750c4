"""Regularizers: no token lost or doubled, their rules literally, and attention unchanged by the layout they choose."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardkv.interfaces import Regularizer
from hardkv.memory import PagePool
from hardkv.regularize.auto import Auto
from hardkv.regularize.flatten_max import FlattenMax
from hardkv.regularize.flatten_sum import FlattenSum
from hardkv.regularize.modal import ModalOptions
from hardkv.regularize.rewrite import Rewrite
from hardkv.regularize.sparse_load import SparseLoad
from hardkv.tiers.cascade import Cascade
from hardkv.tiers.evict import Evict
from hardkv.types import CostModel, Layout, Limits, Selection, TokenBatch
from tests.oracles import lay_out, merged

SEEDS = st.integers(0, 2**31 - 1)
REGULARIZERS: dict[str, Regularizer] = {
    "sparse_load": SparseLoad(),
    "rewrite": Rewrite(),
    "flatten_max": FlattenMax(),
    "flatten_sum": FlattenSum(),
    "auto": Auto(),
}
each_regularizer = pytest.mark.parametrize("name", list(REGULARIZERS))
COSTS = st.builds(
    CostModel,
    read_seconds_per_byte=st.sampled_from([1e-11, 3e-11, 1e-9]),
    copy_seconds_per_byte=st.sampled_from([1e-11, 1e-10, 1e-7]),
    launch_seconds=st.sampled_from([0.0, 1e-6, 1e-3]),
    slot_bytes=st.sampled_from([64, 512]),
    horizon_steps=st.integers(1, 256),
)


def draw_selection(seed: int, layers: int, heads: int, slots: int) -> Selection:
    """Heads of unequal length, each with its own density; sometimes nothing is dropped."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, slots + 1, (layers, heads, 1), generator=rng)
    valid = torch.arange(slots) < lengths
    density = torch.rand(layers, heads, 1, generator=rng) * 1.4
    keep = valid & (torch.rand(valid.shape, generator=rng) < density)
    return Selection(keep=keep, valid=valid, held_slots=valid.sum(-1))


def limits_of(upper: int) -> Limits:
    return Limits(sinks=1, local_window=2, lower=4, upper=upper)


@each_regularizer
@given(seed=SEEDS, layers=st.integers(1, 3), heads=st.integers(1, 3), upper=st.integers(1, 40), cost=COSTS)
def test_a_layout_keeps_what_was_selected(
    name: str, seed: int, layers: int, heads: int, upper: int, cost: CostModel
) -> None:
    selection = draw_selection(seed, layers, heads, 32)
    before = selection.keep.clone()
    layout = REGULARIZERS[name].layout(selection, cost, limits_of(upper))
    assert torch.equal(layout.keep, selection.keep)
    assert torch.equal(selection.keep, before)
    assert layout.rewrite.shape == layout.reserve_slots.shape == (layers, heads)
    assert layout.rewrite.dtype == torch.bool
    assert layout.reserve_slots.dtype == torch.int64
    kept = selection.keep.sum(-1)
    assert (layout.reserve_slots >= kept).all()
    assert name == "flatten_max" or torch.equal(layout.reserve_slots, kept)


@given(seed=SEEDS, upper=st.integers(1, 40), cost=COSTS)
def test_rewrite_rules_are_the_literal_ones(seed: int, upper: int, cost: CostModel) -> None:
    selection, limits = draw_selection(seed, 3, 2, 32), limits_of(upper)
    layouts = {name: part.layout(selection, cost, limits) for name, part in REGULARIZERS.items()}
    longest = max(int(kept) for kept in selection.keep.sum(-1).flatten())
    for layer in range(3):
        dropped = [int(selection.valid[layer, h].sum()) - int(selection.keep[layer, h].sum()) for h in range(2)]
        for head in range(2):
            held, kept = int(selection.held_slots[layer, head]), int(selection.keep[layer, head].sum())
            at = (layer, head)
            assert bool(layouts["sparse_load"].rewrite[at]) == (held > upper)
            assert bool(layouts["rewrite"].rewrite[at])
            assert bool(layouts["flatten_max"].rewrite[at])
            assert bool(layouts["flatten_sum"].rewrite[at]) == any(dropped)
            assert layouts["flatten_max"].reserve_slots[at] == longest
            gain = cost.horizon_steps * cost.read_seconds_per_byte * (held - kept) * cost.slot_bytes
            price = cost.copy_seconds_per_byte * kept * cost.slot_bytes + cost.launch_seconds
            if not math.isclose(gain, price, rel_tol=1e-5):  # the sum is taken in float32
                assert bool(layouts["auto"].rewrite[at]) == (gain > price or held > upper)


def test_auto_weighs_reading_against_copying() -> None:
    """100 of 200 slots of 10 bytes go: reading them for 50 steps costs 50 000 c_read, moving the rest 1 000 c_copy."""
    valid = torch.ones(1, 1, 200, dtype=torch.bool)
    selection = Selection(keep=valid & (torch.arange(200) < 100), valid=valid, held_slots=valid.sum(-1))
    for copy, launch, upper, expected in (
        (49.0, 0.0, 1000, True),
        (51.0, 0.0, 1000, False),
        (40.0, 9_000.0, 1000, True),
        (40.0, 11_000.0, 1000, False),
        (51.0, 0.0, 199, True),
        (51.0, 0.0, 200, False),
    ):
        cost = CostModel(1.0, copy, launch, slot_bytes=10, horizon_steps=50)
        assert Auto().layout(selection, cost, limits_of(upper)).rewrite.tolist() == [[expected]]


@each_regularizer
def test_the_mode_is_an_option(name: str) -> None:
    part = REGULARIZERS[name]
    assert part.mode == "per_head"
    assert type(part)(ModalOptions(mode="union")).mode == "union"
    assert part.pads_heads == (name == "flatten_max")


@each_regularizer
@given(
    seed=SEEDS,
    rounds=st.integers(1, 3),
    page_slots=st.integers(1, 4),
    density=st.floats(0.0, 1.0),
    upper=st.integers(4, 30),
    cost=COSTS,
)
def test_attention_over_the_layout_is_masked_attention_over_the_original(
    name: str, seed: int, rounds: int, page_slots: int, density: float, upper: int, cost: CostModel
) -> None:
    """Applied to a real cascade, round after round, in float64."""
    rng = torch.Generator().manual_seed(seed)
    layers, heads, window, interval, head_dim, scaling = 2, 2, 2, 4, 4, 0.5
    device, dtype = torch.device("cpu"), torch.float64
    pool = PagePool(160, page_slots, layers, heads, head_dim, dtype, device, False)
    cascade = Cascade(pool, 0, 1, window, interval, Evict())
    cascade.allocate(0)
    for _ in range(rounds):
        fresh = cascade.dense.capacity - cascade.dense.length
        positions = torch.arange(cascade.seen_tokens, cascade.seen_tokens + fresh).expand(heads, fresh)
        for layer in range(layers):
            keys, values = torch.randn(2, heads, fresh, head_dim, generator=rng, dtype=dtype)
            cascade.dense.admit(layer, TokenBatch(keys, values, positions, positions >= 0))
        cascade.seen_tokens += fresh
        resident = cascade.resident()
        original = list(zip(*cascade.gather(resident, slice(None)), strict=True))
        chosen = torch.rand(resident.valid.shape, generator=rng) < density
        selection = Selection(
            keep=(chosen | resident.protected) & resident.valid,
            valid=resident.valid,
            held_slots=resident.valid.sum(-1),
        )
        layout = REGULARIZERS[name].layout(selection, cost, limits_of(upper))
        lay_out(cascade, resident, layout)
        check_residents(cascade, resident.positions, selection, layout)
        query = torch.randn(heads, 3, head_dim, generator=rng, dtype=dtype)
        for layer, (keys, values) in enumerate(original):
            states = [tier.attend(layer, query, scaling) for tier in (cascade.sparse, cascade.dense)]
            out, lse = merged([state[0] for state in states], [state[1] for state in states])
            mask = layout.keep[layer][:, None]
            logits = (query @ keys.transpose(-1, -2) * scaling).masked_fill(~mask, float("-inf"))
            expected = torch.softmax(logits, -1) @ values.masked_fill(~resident.valid[layer][..., None], 0.0)
            # `attend` works in float32.
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse.double(), torch.logsumexp(logits, -1), rtol=1e-5, atol=1e-5)
        if name == "flatten_max":
            counts = cascade.sparse.table.counts
            assert (counts == counts.max()).all()


def check_residents(cascade: Cascade, positions: torch.Tensor, selection: Selection, layout: Layout) -> None:
    """Ascending positions; compacted heads hold the kept ones, masked heads everything, each once."""
    after = cascade.resident()
    for layer in range(positions.shape[0]):
        for head in range(positions.shape[1]):
            stays = selection.keep if layout.rewrite[layer, head] else selection.valid
            expected = positions[layer, head][stays[layer, head]].tolist()
            found = after.positions[layer, head][after.valid[layer, head]].tolist()
            assert found == expected == sorted(set(expected))
            assert cascade.kept_tokens()[layer, head] == selection.keep[layer, head].sum()
