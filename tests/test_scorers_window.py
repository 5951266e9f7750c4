"""Scorers of the query window that weigh values or count rows: against loops in float64, and their edges."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from hardkv.errors import UnsupportedModelError
from hardkv.policies.scorers import value_aware
from hardkv.policies.scorers.output_drop import OutputDrop
from hardkv.policies.scorers.quest import Quest
from hardkv.policies.scorers.scissorhands import Scissorhands
from hardkv.policies.scorers.value_aware import ValueAware
from hardkv.policies.scorers.window_rows import newest_rows, rows_newer
from hardkv.types import ModelGeometry, ScoreView
from tests.test_scorers import QUICK, SEEDS, assert_scores, by_head, literal_attention, make_view, written
from tests.test_scorers_shared import full_view, one_hot, one_slot, tied

ROWS = st.sampled_from([1, 2, 32, None])


@QUICK
@given(SEEDS, ROWS)
def test_vatp_formula(seed: int, rows: int | None) -> None:
    view = make_view(seed)
    attention = literal_attention(view)

    def formula(b: int, h: int, slots: list[int]) -> dict[int, float]:
        used = written(view, b)[:rows]
        mean = {j: sum(float(attention[b, h, a, i, j]) for a in range(2) for i in used) / 2 / len(used) for j in slots}
        return {j: mean[j] * sum(abs(x) for x in view.values[b, h, j].tolist()) for j in slots}

    assert_scores(ValueAware(ValueAware.Config(rows=rows)).score(view), by_head(view, formula))


@pytest.mark.parametrize("tile_elements", [1, 40, 1 << 24])
@QUICK
@given(seed=SEEDS, rows=ROWS)
def test_critical_formula(tile_elements: int, seed: int, rows: int | None) -> None:
    view = full_view(seed)
    attention = literal_attention(view)

    def formula(b: int, h: int, slots: list[int]) -> dict[int, float]:
        used, scores = written(view, b)[:rows], dict.fromkeys(slots, 0.0)
        for a in range(2):
            columns = view.output_weights[b][:, (h * 2 + a) * 6 : (h * 2 + a + 1) * 6].double()
            for j in slots:
                mean = sum(float(attention[b, h, a, i, j]) for i in used) / len(used)
                scores[j] += (mean + 1e-4) * float((columns @ view.values[b, h, j].double()).abs().sum()) / 2
        return scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_aware, "_TILE_ELEMENTS", tile_elements)
        actual = ValueAware(ValueAware.Config(form="critical", rows=rows)).score(view)
    assert_scores(actual, by_head(view, formula))


def test_critical_refuses_what_has_no_output_projection() -> None:
    critical, known = ValueAware(ValueAware.Config(form="critical")), torch.ones(3, 4)

    def geometry(weights: tuple[Tensor | None, ...]) -> ModelGeometry:
        return ModelGeometry(
            windows=(None, 16, None), heads=1, group=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu"),
            max_positions=64, output_weights=weights,
        )  # fmt: skip

    critical.check_model(geometry((known, None, known)))
    ValueAware().check_model(geometry(()))
    for weights, layers in (((known, known, None), "[2]"), ((), "[0, 2]")):
        with pytest.raises(UnsupportedModelError) as error:
            critical.check_model(geometry(weights))
        assert f"layers {layers} have none; write form: vatp" in str(error.value)
    with pytest.raises(ValueError, match="one output projection for each of 2 rows of the view, got 0"):
        critical.score(make_view(0))


def literal_drop(view: ScoreView, attention: Tensor, slots: list[int], b: int, h: int, a: int, i: int) -> list[float]:
    """How far row i's output moves when each slot goes, by computing the output without it, in float64."""
    values, weights = view.values[b, h].double(), attention[b, h, a, i]
    moved = []
    for j in slots:
        rest = 1.0 - float(weights[j])
        if rest < 1e-4:
            mean = values[slots].mean(0)
            moved.append(float(weights[j] * (values[j] - mean).norm()))
            continue
        others = [n for n in slots if n != j]
        whole = weights[slots] @ values[slots]
        without = (weights[others] / rest) @ values[others]
        moved.append(float((whole - without).norm()) if float(weights.sum()) > 0 else 0.0)
    return moved


@QUICK
@given(SEEDS, st.sampled_from([1.0, 2.0, 3.0, 16.0]), st.sampled_from([0.0, 0.3, 1.0]))
def test_output_drop_is_the_change_of_the_output_without_the_token(seed: int, norm: float, recency: float) -> None:
    view = make_view(seed, slots=12)
    attention = literal_attention(view)

    def formula(b: int, h: int, slots: list[int]) -> dict[int, float]:
        rows, scores = written(view, b), dict.fromkeys(slots, 0.0)
        weight = [1.0 - (1.0 - recency) * age / (len(rows) - 1) for age in range(len(rows))]
        for a in range(2):
            moved = [literal_drop(view, attention, slots, b, h, a, i) for i in rows]
            for at, j in enumerate(slots):
                power = sum(w * row[at] ** norm for w, row in zip(weight, moved, strict=True)) / sum(weight)
                scores[j] += power ** (1 / norm) / 2
        return scores

    actual = OutputDrop(OutputDrop.Config(norm=norm, recency=recency)).score(view)
    # Where 1 - A is 1e-4, float32 leaves it three digits.
    torch.testing.assert_close(actual.double(), by_head(view, formula), rtol=3e-3, atol=1e-5)


def test_output_drop_counts_a_token_that_takes_all_attention() -> None:
    """With A = 1 in float32, A / (1 - A) |o - v| is 0 / 0; the token must still rank first."""
    view = one_hot(make_view(4, batch=1, heads=1, group=1, window=2))
    assert view.query_positions is not None
    view = replace(view, query_positions=torch.tensor([[-1, 100]]))
    score, best = OutputDrop().score(view)[0, 0, 0], int(view.attention[0, 0, 0, 1].argmax())
    assert float(view.attention.amax()) == 1.0
    values = view.values[0, 0][view.valid[0, 0]]
    torch.testing.assert_close(score[best], (view.values[0, 0, best] - values.mean(0)).norm())
    assert int(score.argmax()) == best
    assert not OutputDrop().score(one_slot(full_view(1))).any()


@QUICK
@given(SEEDS)
def test_output_drop_with_learned_sinks_keeps_their_share(seed: int) -> None:
    """A sink takes up a dropped token's share like any other slot, so the formula holds with A adding up to less."""
    view = replace(make_view(seed, heads=1, group=1), sink_logits=torch.tensor([[1.5]]))
    weights, values = view.attention.double(), view.values.masked_fill(~view.valid[..., None], 0.0).double()
    output = weights[:, :, 0] @ values  # [B, 1, W, D]
    rest = 1.0 - weights[:, :, 0]
    assume(float(rest.amin()) > 1e-4)
    without = (output[..., None, :] - weights[:, :, 0, ..., None] * values[:, :, None]) / rest[..., None]
    change = (output[..., None, :] - without).norm(dim=-1)
    expected = (change.square().sum(2, keepdim=True) / 3).sqrt().masked_fill(~view.valid[:, :, None], 0.0)
    torch.testing.assert_close(OutputDrop().score(view).double(), expected, rtol=3e-3, atol=1e-5)


@QUICK
@given(SEEDS, ROWS)
def test_scissorhands_formula(seed: int, history: int | None) -> None:
    view = make_view(seed)
    attention = literal_attention(view)

    def formula(b: int, h: int, slots: list[int]) -> dict[int, float]:
        rows, scores = written(view, b)[:history], {}
        for j in slots:
            passed = 0
            for a in range(2):
                for i in rows:
                    seen = [n for n in slots if view.visible[b, h, i, n]]
                    passed += j in seen and float(attention[b, h, a, i, j]) < (1 - 1e-5) / len(seen)
            scores[j] = len(rows) - passed / 2
        return scores

    actual = Scissorhands(Scissorhands.Config(history=history)).score(view)
    assert torch.equal(actual.double(), by_head(view, formula))


def test_scissorhands_passes_nobody_over_where_all_are_average() -> None:
    view = full_view(6)
    expected = 3.0 * view.valid[:, :, None]
    assert torch.equal(Scissorhands().score(tied(view)), expected)
    assert torch.equal(Scissorhands().score(one_slot(view)), 3.0 * one_slot(view).valid[:, :, None])


def literal_quest(view: ScoreView, page: int) -> Tensor:
    assert view.queries is not None
    out = torch.zeros(2, 2, 4, view.keys.shape[2], dtype=torch.float64)
    for b, h in ((b, h) for b in range(2) for h in range(2)):
        slots = [j for j in range(view.keys.shape[2]) if view.valid[b, h, j]]
        for i in written(view, b):
            best: dict[int, float] = {}
            for a in range(2):
                bounds, query = {}, view.queries[b, h, a, i].double()
                for p in range(0, len(slots), page):
                    seen = [view.keys[b, h, j].double() for j in slots[p : p + page] if view.visible[b, h, i, j]]
                    if seen:
                        low, high = torch.stack(seen).amin(0), torch.stack(seen).amax(0)
                        bounds[p // page] = float(torch.maximum(query * low, query * high).sum()) * view.scaling
                total = math.log(sum(math.exp(bound) for bound in bounds.values())) if bounds else 0.0
                best = {p: max(best.get(p, -math.inf), bound - total) for p, bound in bounds.items()}
            lowest = min([*best.values(), math.log(1e-30)])
            for rank, j in enumerate(slots):
                out[b, h, i, j] = best[rank // page] if view.visible[b, h, i, j] else lowest
    return out


@QUICK
@given(SEEDS, st.sampled_from([1, 3, 7, 16, 64]))
def test_quest_formula(seed: int, page: int) -> None:
    view = make_view(seed)
    actual = Quest(Quest.Config(page=page)).score(view)
    torch.testing.assert_close(actual.double(), literal_quest(view, page), rtol=2e-5, atol=2e-5)


@QUICK
@given(SEEDS)
def test_quest_of_single_token_pages_and_one_head_is_log_attention(seed: int) -> None:
    view = make_view(seed, group=1)
    score = Quest(Quest.Config(page=1)).score(view)
    seen = view.visible
    torch.testing.assert_close(score[seen], torch.log(view.attention[:, :, 0][seen]), rtol=1e-4, atol=1e-4)


@QUICK
@given(SEEDS)
def test_quest_rows_are_causal(seed: int) -> None:
    view, scorer = make_view(seed, group=1), Quest(Quest.Config(page=4))
    assert view.query_positions is not None
    score = scorer.score(view)
    for i in range(1, 4):
        seen = view.visible[:, :, i]
        future = view.positions > view.query_positions[:, None, i, None]
        other = replace(view, keys=torch.where(future[..., None], view.keys * -3 + 1, view.keys))
        assert torch.equal(scorer.score(other)[:, :, i][seen], score[:, :, i][seen])


def test_quest_of_equal_keys_shares_evenly_over_the_pages_seen() -> None:
    view = full_view(7)
    everything = torch.tensor([[-1, 98, 97, 99]] * 2)
    view = replace(tied(view), valid=torch.ones_like(view.valid), positions=torch.arange(20).expand_as(view.positions))
    score = Quest(Quest.Config(page=8)).score(replace(view, query_positions=everything))
    torch.testing.assert_close(score[:, :, 1:], torch.full((2, 2, 3, 20), -math.log(3)), rtol=1e-4, atol=1e-5)
    single = Quest().score(replace(one_slot(view), query_positions=everything))
    assert single[:, :, 1:, 0].abs().amax() == 0.0


@QUICK
@given(SEEDS, ROWS)
def test_newest_rows(seed: int, rows: int | None) -> None:
    view = make_view(seed)
    chosen, newer = newest_rows(view, rows), rows_newer(view)
    for b in range(2):
        order = written(view, b)
        assert sorted(torch.arange(4)[chosen[b]].tolist()) == sorted(order[:rows])
        assert [int(newer[b, i]) for i in order] == list(range(len(order)))
