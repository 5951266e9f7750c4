"""Every scorer against a slow, literal restatement of its formula, and the properties all of them share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from hardkv.interfaces import ImportanceScorer, OnlineScorer
from hardkv.pipeline import seeded_statistic
from hardkv.policies.scorers.attention import Attention
from hardkv.policies.scorers.attention_power import AttentionPower
from hardkv.policies.scorers.h2o import H2O
from hardkv.policies.scorers.key_norm import KeyNorm
from hardkv.policies.scorers.random import Random
from hardkv.policies.scorers.rkv import RKV
from hardkv.policies.scorers.snapkv import SnapKV
from hardkv.policies.scorers.streaming import Streaming
from hardkv.policies.scorers.tova import Tova
from hardkv.policies.scorers.window_max import WindowMax
from hardkv.types import ScoreView
from hardkv_kernels import score_update

QUICK = settings(deadline=None, max_examples=25)
SEEDS = st.integers(0, 2**31 - 1)

SCORERS: dict[str, ImportanceScorer] = {
    "attention_mean": Attention(),
    "attention_max": Attention(Attention.Config(reduce="max")),
    "attention_power": AttentionPower(),
    "attention_power_6": AttentionPower(AttentionPower.Config(power=6.0, decay=0.9, value_weight=False)),
    "attention_power_plain": AttentionPower(AttentionPower.Config(reach=0, layer_weight=0.0)),
    "window_max_online": WindowMax(),
    "window_max": WindowMax(WindowMax.Config(online=False)),
    "snapkv": SnapKV(SnapKV.Config(rows=3)),
    "snapkv_logit": SnapKV(SnapKV.Config(pool="logit", kernel=3)),
    "rkv": RKV(RKV.Config(tile=4, kernel=3)),
    "h2o": H2O(),
    "h2o_aged": H2O(H2O.Config(age_normalised=True)),
    "tova": Tova(),
    "streaming": Streaming(),
    "key_norm": KeyNorm(),
    "random": Random(Random.Config(seed=7)),
}
each_scorer = pytest.mark.parametrize("label", list(SCORERS))


def make_view(
    seed: int, batch: int = 2, heads: int = 2, group: int = 2, window: int = 4, slots: int = 20, dim: int = 4
) -> ScoreView:
    """A view with gaps in its positions, unwritten rows in ring order, and NaN wherever nothing may look."""
    rng = torch.Generator().manual_seed(seed)
    ranks = torch.rand(batch, heads, slots * 2, generator=rng).argsort(-1)[..., :slots]
    positions = ranks.sort(-1).values
    valid = torch.rand(batch, heads, slots, generator=rng) < 0.8
    valid[..., 0] = True
    hole = ~valid[..., None]
    query_positions = torch.stack([torch.randperm(slots * 2, generator=rng)[:window] for _ in range(batch)])
    query_positions[:, 0] = -1
    queries = torch.randn(batch, heads, group, window, dim, generator=rng) * 3
    statistic = torch.rand(batch, heads, slots, generator=rng) * 3
    return ScoreView(
        keys=torch.randn(batch, heads, slots, dim, generator=rng).masked_fill(hole, float("nan")),
        values=torch.randn(batch, heads, slots, dim, generator=rng).masked_fill(hole, float("nan")),
        positions=positions.masked_fill(~valid, -(2**40)),
        valid=valid,
        scaling=dim**-0.5,
        layers=(3,),
        queries=queries.masked_fill((query_positions < 0)[:, None, None, :, None], float("nan")),
        query_positions=query_positions,
        statistic=statistic.masked_fill(~valid, float("nan")),
    )


def literal_attention(view: ScoreView) -> Tensor:
    """`A[b, h, a, i, j]` in float64, by loops over everything but the row."""
    assert view.queries is not None
    assert view.query_positions is not None
    batch, heads, group, window, _ = view.queries.shape
    out = torch.zeros(batch, heads, group, window, view.keys.shape[2], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for a in range(group):
                for i in range(window):
                    newest = int(view.query_positions[b, i])
                    seen = [
                        j
                        for j in range(view.keys.shape[2])
                        if newest >= 0 and view.valid[b, h, j] and int(view.positions[b, h, j]) <= newest
                    ]
                    if not seen:
                        continue
                    query = view.queries[b, h, a, i].double()
                    weights = [math.exp(float(query @ view.keys[b, h, j].double()) * view.scaling) for j in seen]
                    for j, weight in zip(seen, weights, strict=True):
                        out[b, h, a, i, j] = weight / sum(weights)
    return out


def written(view: ScoreView, b: int) -> list[int]:
    """Rows of sequence b that were written, newest first."""
    assert view.query_positions is not None
    rows = [i for i in range(view.query_positions.shape[1]) if view.query_positions[b, i] >= 0]
    return sorted(rows, key=lambda i: -int(view.query_positions[b, i]))  # type: ignore[index]  # asserted above


def by_head(view: ScoreView, formula: Callable[[int, int, list[int]], dict[int, float]]) -> Tensor:
    """Assemble `[B, H, 1, N]` from a formula that maps valid slots of one head to scores."""
    out = torch.zeros(*view.valid.shape, dtype=torch.float64)
    for b in range(out.shape[0]):
        for h in range(out.shape[1]):
            slots = [j for j in range(out.shape[2]) if view.valid[b, h, j]]
            for j, score in formula(b, h, slots).items():
                out[b, h, j] = score
    return out[:, :, None]


def literal_pooled(attention: Tensor, slots: list[int], rows: list[int], kernel: int) -> dict[int, float]:
    """Mean over the rows and the group of `attention [G, W, N]`, then the maximum over valid neighbours."""
    mean = {j: sum(float(attention[a, i, j]) for a in range(len(attention)) for i in rows) for j in slots}
    scale = max(1, len(rows)) * len(attention)
    return {j: max(mean[n] for n in slots if abs(n - j) <= kernel // 2) / scale for j in slots}


def cosine(view: ScoreView, b: int, h: int, i: int, j: int) -> float:
    left, right = view.keys[b, h, i].double(), view.keys[b, h, j].double()
    return float(left @ right / (left.norm() * right.norm()))


def assert_scores(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=1e-6)


def decode(scorer: OnlineScorer, steps: Tensor) -> Tensor:
    """Run `steps [B, H, G, R, N]` through `update`, one at a time."""
    statistic = torch.zeros_like(steps[:, :, 0, 0])
    for row in range(steps.shape[3]):
        scorer.update(statistic, steps[:, :, :, row].clone())
    return statistic


def random_steps(seed: int, slots: int = 20, rows: int = 5) -> Tensor:
    logits = torch.randn(2, 2, 3, rows, slots, generator=torch.Generator().manual_seed(seed)) * 3
    return torch.softmax(logits, -1)


@QUICK
@given(SEEDS)
def test_attention_formula(seed: int) -> None:
    view = make_view(seed)
    attention = literal_attention(view)
    assert_scores(SCORERS["attention_mean"].score(view), attention.sum(2) / attention.shape[2])
    assert_scores(SCORERS["attention_max"].score(view), attention.max(2).values)
    assert_scores(SCORERS["window_max"].score(view), attention.max(2).values.max(2).values[:, :, None])


@QUICK
@given(SEEDS, st.sampled_from([1, 2, 32, None]), st.sampled_from([1, 3, 7]))
def test_snapkv_probability_formula(seed: int, rows: int | None, kernel: int) -> None:
    view = make_view(seed)
    attention = literal_attention(view)

    def formula(b: int, h: int, slots: list[int]) -> dict[int, float]:
        return literal_pooled(attention[b, h], slots, written(view, b)[:rows], kernel)

    scorer = SnapKV(SnapKV.Config(rows=rows, kernel=kernel))
    assert_scores(scorer.score(view), by_head(view, formula))


@QUICK
@given(SEEDS)
def test_snapkv_logit_formula(seed: int) -> None:
    view = make_view(seed)
    attention = literal_attention(view).mean(2).clamp(min=1e-30)
    expected = torch.zeros_like(attention)
    for b in range(2):
        for h in range(2):
            for i in written(view, b):
                seen = [j for j in range(20) if view.visible[b, h, i, j]]
                for j in range(20):
                    near = [math.log(attention[b, h, i, n]) for n in seen if j in seen and abs(n - j) <= 1]
                    expected[b, h, i, j] = max(near, default=math.log(1e-30)) * bool(view.valid[b, h, j])
    assert_scores(SCORERS["snapkv_logit"].score(view), expected)


@QUICK
@given(SEEDS)
def test_snapkv_logit_of_one_query_head_pools_logits(seed: int) -> None:
    view = make_view(seed, group=1)
    pooled = torch.nn.functional.max_pool1d(view.logits[:, :, 0].flatten(0, 1), 3, 1, 1).view(2, 2, 4, 20)
    shift = SCORERS["snapkv_logit"].score(view) - pooled
    for b in range(2):
        for h in range(2):
            for i in written(view, b):
                rows = shift[b, h, i][view.visible[b, h, i]]
                torch.testing.assert_close(rows, rows[:1].expand_as(rows), rtol=0.0, atol=2e-5)


@QUICK
@given(SEEDS, st.sampled_from([1, 3, 512]))
def test_rkv_formula(seed: int, tile: int) -> None:
    view = make_view(seed)
    attention = literal_attention(view)

    def formula(b: int, h: int, slots: list[int]) -> dict[int, float]:
        importance = literal_pooled(attention[b, h], slots, written(view, b), 7)
        total = dict.fromkeys(slots, 0.0)
        for i in slots:
            row = {j: cosine(view, b, h, i, j) for j in slots if j != i}
            newest = max((j for j in row if row[j] > 0.5), default=None)
            for j in row:
                total[j] += 0.0 if j == newest else row[j] / len(slots)
        normaliser = sum(math.exp(total[j]) for j in slots)
        return {j: 0.1 * importance[j] - 0.9 * math.exp(total[j]) / normaliser for j in slots}

    assert_scores(RKV(RKV.Config(tile=tile)).score(view), by_head(view, formula))


def test_rkv_never_holds_the_whole_similarity() -> None:
    view = make_view(0, batch=1, heads=1, window=2, slots=64)
    with torch.profiler.profile(record_shapes=True) as profile:
        RKV(RKV.Config(tile=8)).score(view)
    sizes = [math.prod(shape) for event in profile.events() for shape in event.input_shapes if shape]
    assert max(sizes) == 64 * 8


@QUICK
@given(
    SEEDS,
    st.sampled_from([(4.0, 0.98), (1.0, 1.0), (2.5, 0.5)]),
    st.booleans(),
    st.sampled_from([(4, 0.2), (0, 0.5), (1, 1.0), (30, 0.7)]),
    st.sampled_from([0.5, 0.0, 1.3]),
    st.sampled_from([(0.8, 1.0, 1.2), (1.0, 0.0, 0.0), (0.5, 0.0, 2.0), (1.5, 2.0, 0.0)]),
)
def test_attention_power_formula(
    seed: int,
    shape: tuple[float, float],
    value_weight: bool,
    lending: tuple[int, float],
    layer_weight: float,
    forecast: tuple[float, float, float],
) -> None:
    (power, decay), (reach, lend), (own_weight, head_weight, key_weight) = shape, lending, forecast
    view, steps = make_view(seed), random_steps(seed)
    scorer = AttentionPower(
        AttentionPower.Config(
            power=power,
            decay=decay,
            value_weight=value_weight,
            reach=reach,
            lend=lend,
            layer_weight=layer_weight,
            own_weight=own_weight,
            head_weight=head_weight,
            key_weight=key_weight,
        )
    )

    def formula(b: int, h: int, slots: list[int]) -> dict[int, float]:
        values = view.values[b, h].double()
        mean = sum(values[j] for j in slots) / len(slots)
        own = {}
        for j in slots:
            gathered = 0.0
            for r in range(5):
                powers = [max(float(steps[b, h, a, r, j]), 1e-8) ** power for a in range(3)]
                gathered = decay * gathered + sum(powers) / 3
            own[j] = gathered ** (1 / power)
        lent = {}
        for j in slots:
            lent[j] = own[j]
            for i in slots:
                distance = int(view.positions[b, h, j] - view.positions[b, h, i])
                if 1 <= distance <= reach:
                    lent[j] = max(lent[j], own[i] * lend * (1 - (distance - 1) / reach))
        gone = max((int(view.positions[b, h, j]) + 1 for j in slots), default=0) - len(slots)
        logs = [math.log(lent[j] + 1e-4) for j in slots] + [math.log(1e-4)] * gone
        lengths = {j: float(view.keys[b, h, j].double().norm()) for j in slots}
        scores = {}
        for j in slots:
            exponent = head_weight * sum(logs) / len(logs)
            exponent -= key_weight * lengths[j] * len(slots) / sum(lengths.values())
            weight = float((values[j] - mean).norm()) if value_weight else 1.0
            scores[j] = (lent[j] + 1e-4) ** own_weight * math.exp(exponent) * weight
            scores[j] /= (3 + 1) ** layer_weight  # the view is of layer 3
        return scores

    assert_scores(scorer.score(replace(view, statistic=decode(scorer, steps))), by_head(view, formula))


@QUICK
@given(SEEDS)
def test_online_accumulators_formula(seed: int) -> None:
    view, steps = make_view(seed), random_steps(seed)

    def score(scorer: OnlineScorer) -> Tensor:
        return scorer.score(replace(view, statistic=decode(scorer, steps)))

    mean = steps.double().mean(2)  # [B, H, R, N]
    assert_scores(score(H2O()), by_head(view, lambda b, h, js: {j: sum(mean[b, h, :, j].tolist()) for j in js}))
    peak = steps.double().max(2).values.max(2).values
    assert_scores(score(WindowMax()), by_head(view, lambda b, h, js: {j: float(peak[b, h, j]) for j in js}))

    def last_query(b: int, h: int, slots: list[int]) -> dict[int, float]:
        heads = {j: [g for g in range(2) if view.valid[b, g, j]] for j in slots}
        return {j: sum(float(mean[b, g, -1, j]) for g in heads[j]) / len(heads[j]) for j in slots}

    assert_scores(score(Tova()), by_head(view, last_query))


def test_h2o_age_normalised_divides_by_the_queries_that_saw_the_token() -> None:
    view = make_view(1, batch=1, heads=1, slots=8)
    view = replace(view, valid=torch.ones(1, 1, 8, dtype=torch.bool), positions=torch.arange(10, 18).view(1, 1, 8))
    steps = torch.zeros(1, 1, 1, 3, 8)  # positions 15, 16 and 17 decode; each spreads evenly over what it sees
    for row, seen in enumerate((6, 7, 8)):
        steps[..., row, :seen] = 1.0 / seen
    scorer = H2O(H2O.Config(age_normalised=True))
    every_step = (1 / 6 + 1 / 7 + 1 / 8) / 3
    expected = torch.tensor([every_step] * 6 + [(1 / 7 + 1 / 8) / 2, 1 / 8])
    actual = scorer.score(replace(view, statistic=decode(scorer, steps)))
    torch.testing.assert_close(actual[0, 0, 0], expected)


@QUICK
@given(SEEDS)
def test_scores_without_attention_formula(seed: int) -> None:
    view = make_view(seed)
    recency = by_head(view, lambda b, h, js: {j: float(view.positions[b, h, j]) for j in js})
    assert torch.equal(Streaming().score(view).double(), recency)
    norms = by_head(view, lambda b, h, js: {j: -math.sqrt(sum(x * x for x in view.keys[b, h, j].tolist())) for j in js})
    assert_scores(KeyNorm().score(view), norms)


def test_streaming_tells_neighbours_apart_up_to_two_to_the_24() -> None:
    view = make_view(0, batch=1, heads=1, slots=2)
    positions = torch.tensor([[[2**24 - 2, 2**24 - 1]]])
    score = Streaming().score(replace(view, positions=positions, valid=torch.ones(1, 1, 2, dtype=torch.bool)))
    assert score.tolist() == [[[[2**24 - 2, 2**24 - 1]]]]


ONLINE = [label for label, scorer in SCORERS.items() if isinstance(scorer, OnlineScorer) and scorer.online]


@pytest.mark.parametrize("label", ONLINE)
@QUICK
@given(seed=SEEDS)
def test_the_fused_form_equals_update(label: str, seed: int) -> None:
    """What the kernel does from logits and log-sum-exps is what `update` does from probabilities."""
    scorer, rng = SCORERS[label], torch.Generator().manual_seed(seed)
    assert isinstance(scorer, OnlineScorer)
    fused = scorer.fused
    assert fused is not None
    pages, group, slots = 4, 3, 5
    logits, lse = torch.randn(pages, group, slots, generator=rng) * 4, 8 + torch.rand(pages, group, generator=rng)
    statistic = torch.rand(pages, slots, generator=rng)
    expected, owner = statistic.clone(), torch.arange(pages)
    scorer.update(expected, torch.exp(logits - lse[..., None]))
    options = (fused.reduction, fused.power, fused.decay, fused.floor)
    score_update(statistic, logits, owner, lse, 0, 0, pages, *options)
    torch.testing.assert_close(statistic, expected, rtol=2e-4, atol=1e-25)


@pytest.mark.parametrize("label", ONLINE)
@QUICK
@given(seed=SEEDS)
def test_a_prompt_seeds_as_if_each_row_had_been_a_step(label: str, seed: int) -> None:
    scorer, view = SCORERS[label], make_view(seed)
    assert isinstance(scorer, OnlineScorer)
    assert view.queries is not None
    rows = torch.arange(view.queries.shape[3]) + view.keys.shape[2]
    view = replace(view, queries=view.queries.nan_to_num(1.0), query_positions=rows.expand(len(view.keys), -1))
    if isinstance(scorer, AttentionPower):
        scorer = AttentionPower(scorer.config.model_copy(update={"past_weight": 0.0}))
    looped = torch.zeros(view.valid.shape)
    scorer.seed(looped, view.attention)
    seeded = seeded_statistic(scorer, view)
    torch.testing.assert_close(seeded[view.valid], looped[view.valid], rtol=1e-4, atol=1e-12)


@QUICK
@given(
    SEEDS,
    st.sampled_from([(64, 0.33), (2, 0.5), (3, 0.1), (1, 0.9)]),
    st.sampled_from([(4.0, 8, 0.2), (1.0, 0, 0.5), (2.5, 30, 0.7)]),
)
def test_attention_power_reads_a_prompt_by_formula(
    seed: int, groups: tuple[int, float], options: tuple[float, int, float]
) -> None:
    (recent, past), (power, reach, lend) = groups, options
    view = make_view(seed)
    attention = literal_attention(view)  # [B, H, G, W, N]
    scorer = AttentionPower(
        AttentionPower.Config(recent_rows=recent, past_weight=past, power=power, reach=reach, lend=lend)
    )
    newest = view.query_positions
    assert newest is not None
    written = (newest >= 0).tolist()

    def read(b: int, h: int, slots: list[int], rows: list[int]) -> dict[int, float]:
        own = {}
        for j in slots:
            gathered = 0.0
            for i in rows:
                sees = written[b][i] and view.positions[b, h, j] <= newest[b, i]
                if sees:
                    gathered += sum(max(float(attention[b, h, a, i, j]), 1e-8) ** power for a in range(2)) / 2
            own[j] = gathered ** (1 / power)
        lent = dict(own)
        for j in slots:
            for i in slots:
                distance = int(view.positions[b, h, j] - view.positions[b, h, i])
                if 1 <= distance <= reach:
                    lent[j] = max(lent[j], own[i] * lend * (1 - (distance - 1) / reach))
        return {j: math.log(lent[j] + 1e-4) for j in slots}

    def formula(b: int, h: int, slots: list[int]) -> dict[int, float]:
        logs = read(b, h, slots, list(range(4))[-recent:])
        if recent < 4:
            older = read(b, h, slots, list(range(4 - recent)))
            logs = {j: (1 - past) * logs[j] + past * older[j] for j in slots}
        return {j: (math.exp(logs[j]) - 1e-4) for j in slots}

    statistic = scorer.read_prompt(view)
    assert statistic is not None
    found = statistic.double().pow(1 / power)
    for b in range(2):
        for h in range(2):
            slots = view.valid[b, h].nonzero()[:, 0].tolist()
            for j, expected in formula(b, h, slots).items():
                assert float(found[b, h, j]) == pytest.approx(expected, rel=1e-3, abs=2e-9 ** (1 / power) + 1e-7)


@QUICK
@given(SEEDS)
def test_window_max_online_equals_the_window_form(seed: int) -> None:
    view = make_view(seed)
    online, window = WindowMax(), WindowMax(WindowMax.Config(online=False))
    statistic = decode(online, view.attention)
    torch.testing.assert_close(online.score(replace(view, statistic=statistic)), window.score(view), rtol=0.0, atol=0.0)
    assert (online.online, online.needs_queries) == (True, False)
    assert (window.online, window.needs_queries) == (False, True)


@pytest.mark.parametrize("power", [1.0, 4.0, 16.0])
def test_attention_power_makes_no_denormals(power: float) -> None:
    scorer = AttentionPower(AttentionPower.Config(power=power))
    statistic = decode(scorer, torch.zeros(1, 1, 1, 4, 3))
    assert bool((statistic > torch.finfo(torch.float32).tiny).all())


@each_scorer
@QUICK
@given(seed=SEEDS)
def test_shape_finite_and_zero_rows(label: str, seed: int) -> None:
    scorer, view = SCORERS[label], make_view(seed)
    score = scorer.score(view)
    rows = 4 if label in {"attention_mean", "attention_max", "snapkv_logit"} else 1
    assert score.shape == (2, 2, rows, 20)
    assert score.dtype == torch.float32
    assert bool(score.isfinite().all())
    if rows > 1:
        assert not score[:, :, 0].any()


@each_scorer
@QUICK
@given(seed=SEEDS)
def test_pure_and_blind_to_invalid_slots(label: str, seed: int) -> None:
    scorer, view = SCORERS[label], make_view(seed)
    before = {name: value.clone() for name, value in vars(view).items() if isinstance(value, Tensor)}
    score = scorer.score(view)
    for name, value in before.items():
        torch.testing.assert_close(getattr(view, name), value, rtol=0.0, atol=0.0, equal_nan=True)
    assert torch.equal(score, scorer.score(make_view(seed)))
    hole = ~view.valid
    assert view.statistic is not None
    other = replace(
        view,
        keys=view.keys.masked_fill(hole[..., None], 1e4),
        values=view.values.masked_fill(hole[..., None], 1e4),
        positions=view.positions.masked_fill(hole, 10**6),
        statistic=view.statistic.masked_fill(hole, 1e4),
    )
    valid = view.valid[:, :, None].expand_as(score)
    assert torch.equal(scorer.score(other)[valid], score[valid])


@each_scorer
@QUICK
@given(seed=SEEDS)
def test_batch_rows_are_independent(label: str, seed: int) -> None:
    scorer, view = SCORERS[label], make_view(seed)
    names = ("keys", "values", "positions", "valid", "queries", "query_positions", "statistic")
    alone = replace(view, **{name: getattr(view, name)[1:] for name in names})
    torch.testing.assert_close(scorer.score(alone), scorer.score(view)[1:], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("label", [label for label in SCORERS if label != "random"])
@QUICK
@given(seed=SEEDS)
def test_permuting_heads_permutes_scores(label: str, seed: int) -> None:
    scorer, view = SCORERS[label], make_view(seed, heads=3)
    order = [2, 0, 1]
    per_head = ("keys", "values", "positions", "valid", "queries", "statistic")
    permuted = replace(view, **{name: getattr(view, name)[:, order] for name in per_head})
    torch.testing.assert_close(scorer.score(permuted), scorer.score(view)[:, order], rtol=1e-5, atol=1e-7)


def test_tova_is_the_same_for_every_head() -> None:
    view = make_view(5, heads=3)
    score = Tova().score(replace(view, valid=torch.ones_like(view.valid), statistic=torch.rand(2, 3, 20)))
    assert torch.equal(score, score[:, :1].expand_as(score))


@pytest.mark.parametrize("label", ["attention_mean", "attention_max", "snapkv_logit"])
@QUICK
@given(seed=SEEDS)
def test_rows_are_causal(label: str, seed: int) -> None:
    scorer, view = SCORERS[label], make_view(seed)
    assert view.query_positions is not None
    for i in range(1, 4):
        future = view.positions > view.query_positions[:, None, i, None]
        other = replace(view, keys=torch.where(future[..., None], view.keys * -3 + 1, view.keys))
        seen, score = view.visible[:, :, i], scorer.score(view)[:, :, i]
        assert torch.equal(scorer.score(other)[:, :, i][seen], score[seen])
        unseen = score.masked_fill(seen | ~view.valid, float("-inf")).amax(-1)
        assert bool((unseen <= score.masked_fill(~seen, float("inf")).amin(-1) + 1e-4).all())


def test_random_is_seeded_and_leaves_the_global_generator_alone() -> None:
    view = make_view(0)
    state = torch.get_rng_state()
    score = SCORERS["random"].score(view)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(score, SCORERS["random"].score(replace(view, layers=(4,))))
    assert not torch.equal(score, Random(Random.Config(seed=8)).score(view))


@pytest.mark.parametrize("component", [SnapKV, RKV])
def test_even_kernel_is_refused(component: type[SnapKV] | type[RKV]) -> None:
    with pytest.raises(ValidationError, match=r"must be odd, .* \(got 6; use 7\)"):
        component.Config(kernel=6)


@each_scorer
def test_no_host_sync(label: str) -> None:
    """Fake tensors hold no data: reading one on the host raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    view, scorer = make_view(0), SCORERS[label]
    names = ("keys", "values", "positions", "valid", "queries", "query_positions", "statistic")
    with FakeTensorMode() as mode:
        parts: dict[str, Any] = {name: mode.from_tensor(getattr(view, name)) for name in names}
        fake = replace(view, **parts)
        if isinstance(scorer, OnlineScorer):
            assert fake.statistic is not None
            scorer.update(fake.statistic, torch.rand(2, 2, 2, 20))
        assert scorer.score(fake).shape[-1] == 20
