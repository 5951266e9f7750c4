"""Scorers that read keys and values alone: `keydiff` and `lagkv` against loops, and their edges."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hardkv.policies.scorers.keydiff import KeyDiff
from hardkv.policies.scorers.lagkv import LagKV
from hardkv.policies.scorers.ranks import pack, unpack
from hardkv.types import ScoreView
from tests.test_scorers import QUICK, SEEDS, assert_scores, by_head, make_view
from tests.test_scorers_shared import full_view, one_slot, scaled, tied


def keydiff(view: ScoreView, b: int, h: int, slots: list[int]) -> dict[int, float]:
    units = {j: view.keys[b, h, j].double() / view.keys[b, h, j].double().norm() for j in slots}
    anchor = torch.zeros(view.keys.shape[-1], dtype=torch.float64)
    for j in slots:
        anchor += units[j] / len(slots)
    return {j: -float(units[j] @ anchor / anchor.norm()) for j in slots}


def spreads(rows: list[Tensor], reference: list[Tensor]) -> list[float]:
    """Softmax over `rows` of the deviation of their channels, each in the range of `reference`, in float64."""
    deviations = []
    for row in rows:
        channels = []
        for c in range(len(row)):
            column = [float(other[c]) for other in reference]
            low, high = min(column), max(column)
            channels.append((float(row[c]) - low) / (high - low) if high > low else 0.0)
        mean = sum(channels) / len(channels)
        deviations.append(math.sqrt(sum((x - mean) ** 2 for x in channels) / (len(channels) - 1)))
    top = max(deviations)
    return [math.exp(x - top) / sum(math.exp(y - top) for y in deviations) for x in deviations]


def lagkv(view: ScoreView, b: int, h: int, slots: list[int], sinks: int, lag: int) -> dict[int, float]:
    scores = dict.fromkeys(slots, 3.0)
    start = sinks
    while start + 2 * lag <= len(slots):
        chunk, after = slots[start : start + lag], slots[start + lag : start + 2 * lag]
        keys = spreads([view.keys[b, h, j] for j in chunk], [view.keys[b, h, j] for j in after])
        values = spreads([view.values[b, h, j] for j in chunk], [view.values[b, h, j] for j in after])
        for j, key, value in zip(chunk, keys, values, strict=True):
            scores[j] = key + value
        start += lag
    return scores


@QUICK
@given(SEEDS)
def test_keydiff_formula(seed: int) -> None:
    view = make_view(seed)
    assert_scores(KeyDiff().score(view), by_head(view, lambda b, h, js: keydiff(view, b, h, js)))


@QUICK
@given(SEEDS, st.sampled_from([1e-30, 1e-20, 1e20, 1e30]))
def test_keydiff_reads_directions_alone(seed: int, factor: float) -> None:
    view = full_view(seed)
    larger = replace(view, keys=view.keys * factor)
    torch.testing.assert_close(KeyDiff().score(larger), KeyDiff().score(view), rtol=0.0, atol=1e-5)


@QUICK
@given(SEEDS)
def test_keydiff_of_equal_keys_is_minus_one_and_of_zero_keys_zero(seed: int) -> None:
    view = full_view(seed)
    expected = -view.valid[:, :, None].float()
    torch.testing.assert_close(KeyDiff().score(tied(view)), expected)
    assert not KeyDiff().score(replace(view, keys=torch.zeros_like(view.keys))).any()


@QUICK
@given(SEEDS, st.sampled_from([(0, 1), (2, 3), (4, 5), (0, 16), (4, 128), (30, 2)]))
def test_lagkv_formula(seed: int, shape: tuple[int, int]) -> None:
    view = make_view(seed, slots=40)
    scorer = LagKV(LagKV.Config(sinks=shape[0], lag=shape[1]))
    assert_scores(scorer.score(view), by_head(view, lambda b, h, js: lagkv(view, b, h, js, *shape)))


@QUICK
@given(SEEDS)
def test_lagkv_ignores_where_the_holes_are(seed: int) -> None:
    """Moving the same tokens to other slots, in the same order, moves their scores along."""
    view, scorer = make_view(seed), LagKV(LagKV.Config(sinks=1, lag=4))
    count = view.valid.sum(-1, keepdim=True)
    front = torch.arange(20) < count
    keys, values = pack(view.keys, view.valid), pack(view.values, view.valid)
    moved = scorer.score(replace(view, keys=keys, values=values, valid=front))[:, :, 0]
    assert torch.equal(unpack(moved, view.valid).masked_fill(~view.valid, 0.0), scorer.score(view)[:, :, 0])


@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e8])
def test_lagkv_of_one_key_and_value_is_even_within_chunks(factor: float) -> None:
    view = scaled(tied(full_view(3)), factor)
    view = replace(view, valid=torch.ones_like(view.valid), keys=view.keys[:, :1, :1].expand_as(view.keys))
    view = replace(view, values=view.keys)
    score = LagKV(LagKV.Config(sinks=2, lag=5)).score(view)[0, 0, 0]
    torch.testing.assert_close(score, torch.tensor([3.0] * 2 + [2 / 5] * 10 + [3.0] * 8))


def test_lagkv_of_a_reference_without_range_stays_finite() -> None:
    """A channel that hardly moves in the next chunk would give a deviation beyond float32."""
    keys = torch.zeros(1, 1, 4, 2)
    keys[0, 0, 0], keys[0, 0, 3, 0] = torch.tensor([1e30, -1e30]), 1e-38
    view = make_view(0, batch=1, heads=1, slots=4, dim=2)
    view = replace(view, keys=keys, values=torch.zeros_like(keys), valid=torch.ones(1, 1, 4, dtype=torch.bool))
    score = LagKV(LagKV.Config(sinks=0, lag=2)).score(view)
    torch.testing.assert_close(score, torch.tensor([[[[1.5, 0.5, 3.0, 3.0]]]]))


def test_a_single_slot() -> None:
    view = one_slot(full_view(1))
    torch.testing.assert_close(KeyDiff().score(view)[..., 0], torch.full((2, 2, 1), -1.0))
    assert LagKV().score(view)[..., 0].tolist() == [[[3.0]] * 2] * 2


@QUICK
@given(SEEDS)
def test_pack_keeps_the_order_of_valid_slots_and_unpack_brings_them_back(seed: int) -> None:
    view = make_view(seed)
    packed = pack(view.keys, view.valid)
    for b in range(2):
        for h in range(2):
            kept = view.keys[b, h][view.valid[b, h]]
            assert torch.equal(packed[b, h], torch.cat((kept, torch.zeros(20 - len(kept), 4))))
    back = unpack(packed[..., 0], view.valid)
    assert torch.equal(back[view.valid], view.keys[..., 0][view.valid])
