"""The contract of regularizers: what they lay out is carried out on a real cascade."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hardkv.interfaces import Regularizer
from hardkv.memory import PagePool
from hardkv.testing.cases import SCALING, SelectionCase
from hardkv.testing.contracts.base import Contract, Property, require, require_same
from hardkv.testing.draws import generator
from hardkv.testing.strategies import selections
from hardkv.tiers.cascade import Cascade, Resident
from hardkv.tiers.evict import Evict
from hardkv.types import Layout, Selection, TokenBatch
from hardkv_kernels import attend_slots, merge_states

HEAD_DIM, GROUP, WINDOW = 4, 2, 2


@dataclass(frozen=True)
class Round:
    """One compression: what was held and selected before, the layout, and the cascade after it."""

    cascade: Cascade
    before: Resident
    keys: Tensor  # [L, H, N, D], before
    values: Tensor
    selection: Selection
    layout: Layout


def rounds(component: Regularizer, case: SelectionCase) -> Iterator[Round]:
    """Fill a cascade, select, lay out and carry out, again and again."""
    rng = generator(case.seed)
    pages = 8 * case.layers * case.heads * (WINDOW + case.interval * case.rounds + case.upper)
    shape = (case.layers, case.heads, HEAD_DIM)
    pool = PagePool(pages, case.page_slots, *shape, torch.float32, torch.device("cpu"), False)
    cascade = Cascade(pool, 0, 1, WINDOW, case.interval, Evict())
    cascade.allocate(0)
    for stage in range(case.rounds):
        _decode(cascade, rng)
        before = cascade.resident()
        keys, values = cascade.gather(before, slice(None))
        selection = case.select(before.valid.clone(), before.protected, stage)
        given = Selection(selection.keep.clone(), before.valid, selection.held_slots.clone())
        layout = component.layout(given, case.cost(), case.limits())
        moves = cascade.plan(before, layout)
        cascade.apply(before, moves, moves.lengths.numpy(), moves.reserve.numpy(), None)
        yield Round(cascade, before, keys, values, selection, layout)


def check_layout_shapes(component: Regularizer, case: SelectionCase) -> None:
    """A layout is `keep` bool of the selection's shape, `rewrite` bool and `reserve_slots` int64 `[L, H]`."""
    valid = torch.arange(8).expand(case.layers, case.heads, 8) < 6
    selection = case.select(valid, valid & (torch.arange(8) < 1), 0)
    layout = component.layout(selection, case.cost(), case.limits())
    for what, tensor, shape, dtype in (
        ("keep", layout.keep, tuple(valid.shape), torch.bool),
        ("rewrite", layout.rewrite, tuple(valid.shape[:2]), torch.bool),
        ("reserve_slots", layout.reserve_slots, tuple(valid.shape[:2]), torch.int64),
    ):
        came = (tuple(tensor.shape), tensor.dtype)
        require(came == (shape, dtype), f"the layout's {what} is {came}; expected {(shape, dtype)}")


def check_no_slot_lost(component: Regularizer, case: SelectionCase) -> None:
    """Every slot that the selection keeps is there afterwards, and seen by attention."""
    for done in rounds(component, case):
        after = done.cascade.resident()
        for head, held in _heads(done.before.positions, done.selection.keep).items():
            shown = after.positions[head][after.shown[head]].tolist()
            lost = sorted(set(held) - set(shown))
            require(not lost, f"layer, head {head}: positions {lost} were kept by the selection and are gone")


def check_no_slot_doubled(component: Regularizer, case: SelectionCase) -> None:
    """No slot is there twice, and none that was not held before."""
    for done in rounds(component, case):
        after = done.cascade.resident()
        before = _heads(done.before.positions, done.selection.valid)
        for head, held in _heads(after.positions, after.valid).items():
            extra = sorted(position for position in held if held.count(position) > before[head].count(position))
            require(not extra, f"layer, head {head}: positions {extra} are there more often than before")


def check_positions_ascend(component: Regularizer, case: SelectionCase) -> None:
    """Slots stay in position order."""
    for done in rounds(component, case):
        after = done.cascade.resident()
        for head, held in _heads(after.positions, after.valid).items():
            ascends = all(one < other for one, other in pairwise(held))
            require(ascends, f"layer, head {head}: positions {held} do not ascend")


def check_attention(component: Regularizer, case: SelectionCase) -> None:
    """Attention over the result equals masked attention over the original, in output and log-sum-exp."""
    query = torch.randn(case.heads, GROUP, HEAD_DIM, generator=generator(case.seed, 99))
    for done in rounds(component, case):
        # A layout may keep more than was selected, but nothing less.
        keep = (done.layout.keep & done.selection.valid) | done.selection.keep
        bias = torch.zeros(keep.shape).masked_fill(~keep, float("-inf"))
        for layer in range(case.layers):
            states = [tier.attend(layer, query, SCALING) for tier in (done.cascade.sparse, done.cascade.dense)]
            outs, lses = (torch.stack(parts).flatten(1, 2) for parts in zip(*states, strict=True))
            out, lse = merge_states(outs, lses)
            expected = attend_slots(query, done.keys[layer], done.values[layer], bias[layer], SCALING)
            require_same(lse.view_as(expected[1]), expected[1], "attention after the layout has another log-sum-exp")
            require_same(out.view_as(expected[0]), expected[0], "attention after the layout gives another output")


def check_bytes_as_claimed(component: Regularizer, case: SelectionCase) -> None:
    """Pages are asked for what is kept, and for more only by a regularizer that says `pads_heads`."""
    for done in rounds(component, case):
        reserve, kept = done.layout.reserve_slots, done.layout.keep.sum(-1)
        require((reserve >= kept).all(), f"reserves {reserve.tolist()} slots for {kept.tolist()} kept ones")
        most = kept.amax().clamp(min=case.upper) if component.pads_heads else done.selection.held_slots
        why = "the most it may pad to" if component.pads_heads else "what is held; set `pads_heads` to pad"
        require((reserve <= most).all(), f"reserves {reserve.tolist()} slots, more than {most.tolist()}: {why}")
        window = torch.minimum(done.before.window.sum(-1), kept)
        held = torch.from_numpy(done.cascade.sparse.table.counts) * case.page_slots
        require((held >= reserve - window).all(), f"holds {held.tolist()} slots, fewer than it reserved")


def _decode(cascade: Cascade, rng: torch.Generator) -> None:
    """Fill the dense tier with new tokens."""
    fresh, pool = cascade.dense.capacity - cascade.dense.length, cascade.pool
    positions = torch.arange(cascade.seen_tokens, cascade.seen_tokens + fresh).expand(pool.heads, fresh)
    for layer in range(pool.layers):
        keys, values = torch.randn(2, pool.heads, fresh, pool.head_dim, generator=rng)
        cascade.dense.admit(layer, TokenBatch(keys, values, positions, positions >= 0))
    cascade.seen_tokens += fresh


def _heads(positions: Tensor, mask: Tensor) -> dict[tuple[int, int], list[int]]:
    """The masked positions of every layer and head."""
    layers, heads = positions.shape[:2]
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    return {place: positions[place][mask[place]].tolist() for place in places}


class RegularizerContract(Contract):
    """What every regularizer promises."""

    interface = Regularizer
    properties = (
        Property(check_layout_shapes, selections),
        Property(check_no_slot_lost, selections),
        Property(check_no_slot_doubled, selections),
        Property(check_positions_ascend, selections),
        Property(check_attention, selections),
        Property(check_bytes_as_claimed, selections),
    )
