"""What every scorer that reads keys, values or projections has in common; their formulas have files of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from hardkv.interfaces import ImportanceScorer
from hardkv.policies.scorers.expected_attention import ExpectedAttention
from hardkv.policies.scorers.keydiff import KeyDiff
from hardkv.policies.scorers.lagkv import LagKV
from hardkv.policies.scorers.output_drop import OutputDrop
from hardkv.policies.scorers.quest import Quest
from hardkv.policies.scorers.scissorhands import Scissorhands
from hardkv.policies.scorers.value_aware import ValueAware
from hardkv.types import ScoreView
from tests.no_sync import NoSync
from tests.test_scorers import QUICK, SEEDS, make_view

SCORERS: dict[str, ImportanceScorer] = {
    "keydiff": KeyDiff(),
    "lagkv": LagKV(LagKV.Config(sinks=2, lag=3)),
    "expected_attention": ExpectedAttention(ExpectedAttention.Config(horizon=5)),
    "expected_attention_mean": ExpectedAttention(ExpectedAttention.Config(covariance=False, value_norm=False)),
    "vatp": ValueAware(ValueAware.Config(rows=2)),
    "critical": ValueAware(ValueAware.Config(form="critical")),
    "output_drop": OutputDrop(),
    "output_drop_recent": OutputDrop(OutputDrop.Config(norm=3.0, recency=0.3)),
    "scissorhands": Scissorhands(Scissorhands.Config(history=2)),
    "quest": Quest(Quest.Config(page=3)),
}
WITHOUT_QUERIES = {"keydiff", "lagkv"}
each_scorer = pytest.mark.parametrize("label", list(SCORERS))
PER_HEAD = ("keys", "values", "positions", "valid", "queries")
TENSORS = (*PER_HEAD, "query_positions", "frequencies")


def full_view(seed: int, heads: int = 2, slots: int = 20) -> ScoreView:
    """`make_view` with rotary frequencies (one pair stands still, two dims turn in no pair) and output projections."""
    view = make_view(seed, heads=heads, dim=6, slots=slots)
    rng = torch.Generator().manual_seed(seed)
    frequencies = torch.tensor([[1.0, 0.0], [0.3, 0.01]])
    weights = tuple(torch.randn(5, heads * 2 * 6, generator=rng) for _ in range(2))
    return replace(view, frequencies=frequencies, output_weights=weights)


def scaled(view: ScoreView, factor: float) -> ScoreView:
    assert view.queries is not None
    return replace(view, keys=view.keys * factor, values=view.values * factor, queries=view.queries * factor)


def one_slot(view: ScoreView) -> ScoreView:
    """The same view with slot 0 alone valid in every head."""
    return replace(view, valid=torch.arange(20).expand_as(view.valid) == 0)


def tied(view: ScoreView) -> ScoreView:
    """The same view with one key and one value in all slots of a head."""
    keys, values = (states[:, :, :1].expand_as(states) for states in (view.keys, view.values))
    return replace(view, keys=keys, values=values)


def one_hot(view: ScoreView) -> ScoreView:
    """The same view with logits so far apart that each row attends a single slot."""
    assert view.queries is not None
    return replace(view, queries=view.queries * 1e4)


def half(view: ScoreView) -> ScoreView:
    """The same view as a model in bfloat16 hands it over."""
    assert view.queries is not None
    weights = tuple(weight.bfloat16() for weight in view.output_weights)
    queries = view.queries.bfloat16()
    return replace(
        view, keys=view.keys.bfloat16(), values=view.values.bfloat16(), queries=queries, output_weights=weights
    )


REGIMES: dict[str, Callable[[ScoreView], ScoreView]] = {
    "normal": lambda view: view,
    "bfloat16": half,
    "huge": lambda view: scaled(view, 1e8),
    "tiny": lambda view: scaled(view, 1e-20),
    "tied": tied,
    "one_hot": one_hot,
    "single": one_slot,
    "no_slot": lambda view: replace(view, valid=torch.zeros_like(view.valid)),
    "no_row": lambda view: replace(view, query_positions=torch.full((2, 4), -1)),
}


@each_scorer
@pytest.mark.parametrize("regime", list(REGIMES))
@QUICK
@given(seed=SEEDS)
def test_finite_float32_and_zero_where_nothing_may_score(label: str, regime: str, seed: int) -> None:
    view = REGIMES[regime](full_view(seed))
    score = SCORERS[label].score(view)
    assert score.shape == (2, 2, 4 if label == "quest" else 1, 20)
    assert score.dtype == torch.float32
    assert bool(score.isfinite().all())
    assert not score.masked_fill(view.valid[:, :, None], 0.0).any()
    if label == "quest":
        assert not score.masked_fill(view.row_valid[:, None, :, None], 0.0).any()


@each_scorer
@QUICK
@given(seed=SEEDS)
def test_pure_and_blind_to_invalid_slots_and_rows(label: str, seed: int) -> None:
    scorer, view = SCORERS[label], full_view(seed)
    parts = [value for value in vars(view).values() if isinstance(value, Tensor)] + list(view.output_weights)
    before = [part.clone() for part in parts]
    score = scorer.score(view)
    torch.testing.assert_close(parts, before, rtol=0.0, atol=0.0, equal_nan=True)
    assert torch.equal(score, scorer.score(full_view(seed)))
    assert view.queries is not None
    hole, unwritten = ~view.valid, ~view.row_valid[:, None, None, :, None]
    other = replace(
        view,
        keys=view.keys.masked_fill(hole[..., None], 1e4),
        values=view.values.masked_fill(hole[..., None], 1e4),
        positions=view.positions.masked_fill(hole, 10**6),
        queries=view.queries.masked_fill(unwritten, 1e4),
    )
    assert torch.equal(scorer.score(other), score)


@each_scorer
@QUICK
@given(seed=SEEDS)
def test_batch_rows_are_independent(label: str, seed: int) -> None:
    scorer, view = SCORERS[label], full_view(seed)
    parts: dict[str, Any] = {name: getattr(view, name)[1:] for name in TENSORS}
    alone = replace(view, **parts, output_weights=view.output_weights[1:])
    torch.testing.assert_close(scorer.score(alone), scorer.score(view)[1:], rtol=1e-5, atol=1e-6)


@each_scorer
@QUICK
@given(seed=SEEDS)
def test_permuting_heads_permutes_scores(label: str, seed: int) -> None:
    scorer, view, order = SCORERS[label], full_view(seed, heads=3), [2, 0, 1]
    parts: dict[str, Any] = {name: getattr(view, name)[:, order] for name in PER_HEAD}
    weights = tuple(weight.view(5, 3, 12)[:, order].flatten(1) for weight in view.output_weights)
    permuted = replace(view, **parts, output_weights=weights)
    torch.testing.assert_close(scorer.score(permuted), scorer.score(view)[:, order], rtol=1e-5, atol=1e-6)


@each_scorer
def test_needs_queries_unless_it_reads_keys_alone(label: str) -> None:
    scorer, view = SCORERS[label], full_view(0)
    assert scorer.needs_queries == (label not in WITHOUT_QUERIES)
    blind = replace(view, queries=None, query_positions=None)
    if scorer.needs_queries:
        with pytest.raises(ValueError, match="carries no queries: set `needs_queries = True`"):
            scorer.score(blind)
    else:
        assert torch.equal(scorer.score(blind), scorer.score(view))


@each_scorer
def test_no_host_sync_and_no_shape_from_data(label: str) -> None:
    """Fake tensors hold no data: reading one on the host, or a shape that depends on one, raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    view, scorer = full_view(0), SCORERS[label]
    with FakeTensorMode() as mode:
        parts: dict[str, Any] = {name: mode.from_tensor(getattr(view, name)) for name in TENSORS}
        weights = tuple(mode.from_tensor(weight) for weight in view.output_weights)
        assert scorer.score(replace(view, **parts, output_weights=weights)).shape[-1] == 20
    with torch.inference_mode(), NoSync():  # type: ignore[no-untyped-call]  # torch does not annotate it
        score = scorer.score(view)
    assert torch.equal(score, scorer.score(full_view(0)))


@each_scorer
def test_never_holds_a_square_of_the_slots(label: str) -> None:
    view = full_view(0, slots=512)
    with torch.profiler.profile(record_shapes=True) as profile:
        SCORERS[label].score(view)
    sizes = [math.prod(shape) for event in profile.events() for shape in event.input_shapes if shape]
    assert max(sizes) < 2 * 2 * 512 * 512 // 8
