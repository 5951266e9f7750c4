"""`expected_attention` and its rotations: against loops over complex numbers, and what must hold at any position."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hardkv.errors import UnsupportedModelError
from hardkv.policies.scorers.expected_attention import ExpectedAttention
from hardkv.policies.scorers.rotation import mean_rotation, rotate, rotate_by
from hardkv.types import ModelGeometry, ScoreView
from tests.test_scorers import QUICK, SEEDS, assert_scores, by_head, make_view, written
from tests.test_scorers_shared import full_view, one_slot, tied

CONFIGS = st.builds(
    ExpectedAttention.Config,
    horizon=st.sampled_from([1, 3, 50]),
    covariance=st.booleans(),
    value_norm=st.booleans(),
)


def turned(vector: Tensor, frequencies: list[float], factors: list[complex]) -> Tensor:
    """Pair (i, i + F) of `vector [D]` as a complex number times `factors[i]`, in float64."""
    out, pairs = vector.double().clone(), len(frequencies)
    for i in range(pairs):
        product = complex(vector[i], vector[i + pairs]) * factors[i]
        out[i], out[i + pairs] = product.real, product.imag
    return out


def literal(view: ScoreView, config: ExpectedAttention.Config, b: int, h: int, slots: list[int]) -> dict[int, float]:
    """The class's formula: position taken off, moments, one D x D mean rotation from position 0."""
    assert view.queries is not None
    assert view.query_positions is not None
    assert view.frequencies is not None
    frequencies, rows = view.frequencies[b].double().tolist(), written(view, b)
    newest = int(view.query_positions[b, rows[0]])
    ahead = range(newest + 1, newest + config.horizon + 1)
    mean_factor = [sum(cmath.exp(1j * w * p) for p in ahead) / config.horizon for w in frequencies]
    total = dict.fromkeys(slots, 0.0)
    for a in range(view.queries.shape[2]):
        raw = []
        for i in rows:
            position = int(view.query_positions[b, i])
            factors = [cmath.exp(-1j * w * position) for w in frequencies]
            raw.append(turned(view.queries[b, h, a, i], frequencies, factors))
        mean = torch.stack(raw).mean(0)
        sigma = torch.stack([torch.outer(row - mean, row - mean) for row in raw]).mean(0)
        basis = torch.eye(len(mean), dtype=torch.float64)
        matrix = torch.stack([turned(column, frequencies, mean_factor) for column in basis], 1)
        logits = {}
        for j in slots:
            key = view.keys[b, h, j].double() * view.scaling
            logits[j] = float(key @ matrix @ mean)
            if config.covariance:
                logits[j] += 0.5 * float(key @ matrix @ sigma @ matrix.T @ key)
        top = max(logits.values())
        normaliser = sum(math.exp(logit - top) for logit in logits.values())
        for j in slots:
            total[j] += math.exp(logits[j] - top) / normaliser / view.queries.shape[2]
    size = {j: float(view.values[b, h, j].double().norm()) if config.value_norm else 1.0 for j in slots}
    return {j: total[j] * size[j] for j in slots}


@QUICK
@given(SEEDS, CONFIGS)
def test_formula(seed: int, config: ExpectedAttention.Config) -> None:
    view = full_view(seed)
    actual = ExpectedAttention(config).score(view)
    expected = by_head(view, lambda b, h, js: literal(view, config, b, h, js))
    torch.testing.assert_close(actual.double(), expected, rtol=2e-4, atol=1e-5)


@QUICK
@given(SEEDS, CONFIGS, st.integers(0, 100))
def test_shifting_all_positions_changes_nothing(seed: int, config: ExpectedAttention.Config, shift: int) -> None:
    view = full_view(seed)
    assert view.queries is not None
    assert view.query_positions is not None
    assert view.frequencies is not None
    offset, frequencies = torch.full((2, 1, 1), shift), view.frequencies[:, None, None]
    moved = replace(
        view,
        keys=rotate_by(view.keys, offset, frequencies),
        positions=view.positions + shift,
        queries=rotate_by(view.queries, offset[..., None], frequencies[:, None]),
        query_positions=torch.where(view.row_valid, view.query_positions + shift, -1),
    )
    scorer = ExpectedAttention(config)
    torch.testing.assert_close(scorer.score(moved), scorer.score(view), rtol=2e-3, atol=1e-4)


def test_positions_are_those_to_come_whatever_was_dropped() -> None:
    """A key that answers a query one step ahead wins over one that answered it where the count of slots would point."""
    frequencies = torch.full((1, 1), 0.1)
    content = torch.tensor([1.0, 0.0])
    embedded = [rotate_by(content, torch.tensor(p), frequencies[0]) for p in (101, 5)]
    view = ScoreView(
        keys=torch.stack(embedded)[None, None],
        values=torch.ones(1, 1, 2, 2),
        positions=torch.tensor([[[5, 101]]]),
        valid=torch.ones(1, 1, 2, dtype=torch.bool),
        scaling=1.0,
        queries=rotate_by(content, torch.tensor(100), frequencies[0]).view(1, 1, 1, 1, 2),
        query_positions=torch.tensor([[100]]),
        frequencies=frequencies,
    )
    config = ExpectedAttention.Config(horizon=1, value_norm=False)
    score = ExpectedAttention(config).score(view)[0, 0, 0]
    torch.testing.assert_close(score, torch.softmax(torch.tensor([1.0, math.cos(9.6)]), -1))


@QUICK
@given(SEEDS)
def test_one_row_or_no_covariance_is_the_softmax_of_the_mean_query(seed: int) -> None:
    view = full_view(seed)
    assert view.queries is not None
    still = replace(view, frequencies=torch.zeros(2, 3))
    scorer = ExpectedAttention(ExpectedAttention.Config(covariance=False, value_norm=False))
    mean = view.queries.masked_fill(~view.row_valid[:, None, None, :, None], 0.0).sum(3) / 3  # three rows are written
    logits = torch.einsum("bhgd,bhnd->bhgn", mean, view.keys) * view.scaling
    logits = logits.masked_fill(~view.valid[:, :, None], float("-inf"))
    expected = torch.softmax(logits, -1).mean(2)[:, :, None]
    torch.testing.assert_close(scorer.score(still), expected, rtol=1e-4, atol=1e-6)
    one_row = replace(view, query_positions=torch.tensor([[-1, 30, -1, -1]]).expand(2, -1))
    with_covariance = ExpectedAttention(ExpectedAttention.Config(value_norm=False))
    torch.testing.assert_close(with_covariance.score(one_row), scorer.score(one_row))


@QUICK
@given(SEEDS)
def test_equal_tokens_share_evenly_and_a_single_one_takes_all(seed: int) -> None:
    view, scorer = full_view(seed), ExpectedAttention()
    norm = tied(view).values.norm(dim=-1)
    share = (norm / view.valid.sum(-1, keepdim=True)).masked_fill(~view.valid, 0.0)
    torch.testing.assert_close(scorer.score(tied(view))[:, :, 0], share)
    alone = one_slot(view)
    torch.testing.assert_close(scorer.score(alone)[:, :, 0, 0], norm[:, :, 0])
    unwritten = replace(tied(view), query_positions=torch.full((2, 4), -1))
    torch.testing.assert_close(scorer.score(unwritten)[:, :, 0], share)


@QUICK
@given(SEEDS, st.integers(0, 60), st.integers(-40, 40))
def test_rotating_by_an_offset_equals_embedding_at_the_sum(seed: int, position: int, offset: int) -> None:
    """Rotary embedding as models apply it: `x cos + rotate_half(x) sin`, angles doubled over both halves."""
    rng = torch.Generator().manual_seed(seed)
    vectors, frequencies = torch.randn(3, 8, generator=rng), torch.rand(4, generator=rng)

    def embedded(at: int) -> Tensor:
        angles = (at * frequencies).repeat(2)
        half = torch.cat((-vectors[:, 4:], vectors[:, :4]), -1)
        return vectors * angles.cos() + half * angles.sin()

    moved = rotate_by(embedded(position), torch.full((3,), offset), frequencies)
    torch.testing.assert_close(moved, embedded(position + offset), rtol=1e-4, atol=1e-4)
    back = rotate_by(embedded(position), torch.full((3,), -position), frequencies)
    torch.testing.assert_close(back, vectors, rtol=1e-4, atol=1e-4)


def test_a_partial_rotation_leaves_the_last_dims_and_still_pairs_alone() -> None:
    vectors = torch.arange(1.0, 8.0)
    moved = rotate_by(vectors, torch.tensor(3), torch.tensor([0.5, 0.0]))
    assert moved[[1, 3, 4, 5, 6]].tolist() == [2.0, 4.0, 5.0, 6.0, 7.0]
    expected = complex(1.0, 3.0) * cmath.exp(1.5j)
    assert moved[[0, 2]].tolist() == pytest.approx([expected.real, expected.imag], rel=1e-6)


@QUICK
@given(SEEDS, st.integers(1, 20))
def test_mean_rotation_is_the_mean_of_rotated_vectors(seed: int, horizon: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    vector, frequencies = torch.randn(7, generator=rng), torch.rand(3, generator=rng)
    each = [rotate_by(vector, torch.tensor(step), frequencies) for step in range(1, horizon + 1)]
    moved = rotate(vector, *mean_rotation(frequencies, horizon))
    torch.testing.assert_close(moved, torch.stack(each).mean(0), rtol=1e-4, atol=1e-5)


def geometry(frequencies: tuple[Tensor | None, ...]) -> ModelGeometry:
    return ModelGeometry(
        windows=(None, 16, None), heads=1, group=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu"),
        max_positions=64, frequencies=frequencies,
    )  # fmt: skip


def test_a_model_without_frequencies_is_refused() -> None:
    known = torch.ones(2)
    ExpectedAttention().check_model(geometry((known, None, known)))
    for frequencies, layers in (((known, known, None), "[2]"), ((), "[0, 2]")):
        with pytest.raises(UnsupportedModelError) as error:
            ExpectedAttention().check_model(geometry(frequencies))
        assert f"layers {layers} have none; write another scorer, such as 'attention_power'" in str(error.value)
    with pytest.raises(ValueError, match="carries no rotary frequencies"):
        ExpectedAttention().score(make_view(0))


def test_scores_read_one_sequence_of_frequencies_each() -> None:
    view = full_view(2)
    assert view.frequencies is not None
    other = replace(view, frequencies=torch.stack((view.frequencies[0], view.frequencies[0])))
    first, second = ExpectedAttention().score(view), ExpectedAttention().score(other)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert_scores(first, by_head(view, lambda b, h, js: literal(view, ExpectedAttention.Config(), b, h, js)))
