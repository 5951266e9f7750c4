"""Calibrators: what every one promises, and that selection collapse is recovered."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hardkv.calibration.exact import Exact
from hardkv.calibration.ranking import order_by_score
from hardkv.calibration.softmax import Softmax
from hardkv.calibration.temperature import Temperature
from hardkv.interfaces import Calibrator

QUICK = settings(deadline=None, max_examples=25)
SEEDS = st.integers(0, 2**31 - 1)
REGIMES = st.sampled_from(["normal", "heavy", "tied", "one_hot", "huge", "tiny", "constant"])

CALIBRATORS: dict[str, Calibrator] = {
    "exact": Exact(),
    "temperature": Temperature(),
    "temperature_per_row": Temperature(Temperature.Config(per_row=True)),
    "softmax": Softmax(),
}
each_calibrator = pytest.mark.parametrize("label", list(CALIBRATORS))
PER_ROW = Temperature(Temperature.Config(per_row=True))


def draw_scores(rng: torch.Generator, shape: tuple[int, ...], regime: str) -> Tensor:
    normal = torch.randn(shape, generator=rng)
    return {
        "normal": normal,
        "heavy": normal * torch.exp(normal.abs()),
        "tied": (normal * 1.5).round(),
        "one_hot": (normal == normal.amax(-1, keepdim=True)).float(),
        "huge": normal * 5e37,
        "tiny": normal * 1e-30,
        "constant": torch.full(shape, 3.0),
    }[regime]


def case(seed: int, regime: str, slots: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with NaN in invalid slots, raw attention `[2, 2, 3, N]`, valid `[2, 2, N]` with head 1 almost empty."""
    rng = torch.Generator().manual_seed(seed)
    valid = torch.rand(2, 2, slots, generator=rng) < 0.8
    valid[1, 1] = False
    valid[..., 1] = True
    scores = draw_scores(rng, (2, 2, 3, slots), regime).masked_fill(~valid[:, :, None], float("nan"))
    logits = torch.randn(2, 2, 3, slots, generator=rng) * 3
    reference = torch.softmax(logits.masked_fill(~valid[:, :, None], float("-inf")), -1)
    return scores, reference, valid


def top_p_count(probabilities: Tensor, p: float) -> Tensor:
    """Fewest tokens whose mass reaches p, per row."""
    mass = probabilities.double().sort(dim=-1, descending=True).values.cumsum(-1)
    return (mass < p).sum(-1) + 1


def top_mass(probabilities: Tensor, count: Tensor) -> Tensor:
    mass = probabilities.double().sort(dim=-1, descending=True).values.cumsum(-1)
    return mass.gather(-1, (count - 1)[..., None])[..., 0]


@each_calibrator
@QUICK
@given(seed=SEEDS, regime=REGIMES)
def test_gives_probabilities_in_the_order_of_the_scores(label: str, seed: int, regime: str) -> None:
    scores, reference, valid = case(seed, regime)
    before = scores.clone(), reference.clone()
    out = CALIBRATORS[label].calibrate(scores, reference, valid, {})
    assert bool((out >= 0.0).all())
    assert bool(out.isfinite().all())
    assert not out.masked_select(~valid[:, :, None]).any()
    torch.testing.assert_close(out.sum(-1), torch.ones(2, 2, 3), rtol=0.0, atol=1e-5)
    better = scores[..., :, None] > scores[..., None, :]
    assert not (better & (out[..., :, None] < out[..., None, :])).any()
    torch.testing.assert_close(scores, before[0], rtol=0.0, atol=0.0, equal_nan=True)
    assert torch.equal(reference, before[1])


@each_calibrator
@QUICK
@given(seed=SEEDS)
def test_permuting_slots_permutes_probabilities(label: str, seed: int) -> None:
    scores, reference, valid = case(seed, "normal")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    out = CALIBRATORS[label].calibrate(scores, reference, valid, {})
    moved = CALIBRATORS[label].calibrate(scores[..., order], reference[..., order], valid[..., order], {})
    torch.testing.assert_close(moved, out[..., order], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("label", ["exact", "temperature", "temperature_per_row"])
@QUICK
@given(seed=SEEDS, scale=st.sampled_from([2.0**-90, 0.25, 2.0**90]))
def test_the_scale_of_scores_does_not_matter(label: str, seed: int, scale: float) -> None:
    scores, reference, valid = case(seed, "heavy")
    out = CALIBRATORS[label].calibrate(scores, reference, valid, {})
    scaled = CALIBRATORS[label].calibrate(scores * scale, reference, valid, {})
    torch.testing.assert_close(scaled, out, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("label", ["exact", "temperature", "temperature_per_row"])
@QUICK
@given(seed=SEEDS)
def test_row_never_written_comes_out_zero_and_changes_no_other(label: str, seed: int) -> None:
    scores, reference, valid = case(seed, "normal")
    scores[:, :, 1], reference[:, :, 1] = 0.0, 0.0
    out = CALIBRATORS[label].calibrate(scores, reference, valid, {})
    assert not out[:, :, 1].any()
    rest = CALIBRATORS[label].calibrate(scores[:, :, [0, 2]], reference[:, :, [0, 2]], valid, {})
    torch.testing.assert_close(out[:, :, [0, 2]], rest, rtol=1e-4, atol=1e-6)


@each_calibrator
def test_head_without_a_valid_slot_comes_out_zero(label: str) -> None:
    scores, valid = torch.full((1, 1, 2, 4), float("nan")), torch.zeros(1, 1, 4, dtype=torch.bool)
    assert not CALIBRATORS[label].calibrate(scores, torch.zeros(1, 1, 2, 4), valid, {}).any()


def test_learned_sinks_do_not_shrink_the_result() -> None:
    scores, reference, valid = case(0, "normal")
    torch.testing.assert_close(Exact().calibrate(scores, reference * 0.3, valid, {}).sum(-1), torch.ones(2, 2, 3))


@pytest.mark.parametrize("calibrator", [Exact(), Temperature()])
def test_reference_is_required(calibrator: Calibrator) -> None:
    scores, _, valid = case(0, "normal")
    with pytest.raises(ValueError, match="needs the raw attention of the scored rows, got reference=None"):
        calibrator.calibrate(scores, None, valid, {})


@QUICK
@given(seed=SEEDS, regime=REGIMES)
def test_exact_gives_the_rth_by_score_the_rth_largest(seed: int, regime: str) -> None:
    scores, reference, valid = case(seed, regime)
    out = Exact().calibrate(scores, reference, valid, {})
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(3)).tolist():
        b, h, i = index
        slots = [j for j in range(40) if valid[b, h, j]]
        best_first = sorted(slots, key=lambda j: (float(scores[b, h, i, j]), j), reverse=True)
        largest_first = sorted((float(reference[b, h, i, j]) for j in slots), reverse=True)
        expected = torch.zeros(40)
        expected[best_first] = torch.tensor(largest_first)
        torch.testing.assert_close(out[b, h, i], expected, rtol=1e-5, atol=1e-7)


@QUICK
@given(seed=SEEDS)
def test_exact_leaves_raw_attention_as_it_is(seed: int) -> None:
    _, reference, valid = case(seed, "normal")
    torch.testing.assert_close(Exact().calibrate(reference.log(), reference, valid, {}), reference)


@QUICK
@given(seed=SEEDS, regime=st.sampled_from(["normal", "heavy"]), p=st.sampled_from([0.5, 0.9, 0.95]))
def test_solved_temperature_meets_its_mass(seed: int, regime: str, p: float) -> None:
    scores, reference, valid = case(seed, regime)
    count = top_p_count(reference, p)
    target = top_mass(reference, count)
    rows = Temperature(Temperature.Config(p=p, per_row=True)).calibrate(scores, reference, valid, {})
    torch.testing.assert_close(top_mass(rows, count), target, rtol=0.0, atol=1e-3)
    shared = Temperature(Temperature.Config(p=p)).calibrate(scores, reference, valid, {})
    torch.testing.assert_close(top_mass(shared, count).mean(-1), target.mean(-1), rtol=0.0, atol=1e-3)


@QUICK
@given(seed=SEEDS, p=st.sampled_from([0.5, 0.9]))
def test_exact_and_solved_temperature_select_the_same_top_p_set(seed: int, p: float) -> None:
    """At p = the raw mass of the k largest, which is what the temperature solves for."""
    rng = torch.Generator().manual_seed(seed)
    scores, valid = torch.randn(1, 2, 3, 200, generator=rng), torch.ones(1, 2, 200, dtype=torch.bool)
    reference = torch.softmax(torch.randn(1, 2, 3, 200, generator=rng) * 2, -1)
    target = top_mass(reference, top_p_count(reference, p))[..., None]
    sets = []
    for calibrator in (Exact(), Temperature(Temperature.Config(p=p, per_row=True))):
        out = calibrator.calibrate(scores, reference, valid, {})
        ranked = out.gather(-1, order_by_score(scores, valid))
        before = ranked.cumsum(-1) - ranked
        sets.append(before < target - 1e-6)
    assert int((sets[0] ^ sets[1]).sum(-1).max()) <= 1


def test_more_tied_maxima_than_k_falls_back_to_rank_matching() -> None:
    scores = torch.tensor([[[[5.0, 5.0, 5.0, 1.0, 0.0]]]])
    reference = torch.tensor([[[[0.95, 0.02, 0.01, 0.01, 0.01]]]])
    valid, state = torch.ones(1, 1, 5, dtype=torch.bool), dict[str, Tensor]()
    out = Temperature().calibrate(scores, reference, valid, state)
    assert state["temperature"].tolist() == [[[0.0]]]
    torch.testing.assert_close(out[0, 0, 0], torch.tensor([0.01, 0.02, 0.95, 0.01, 0.01]))


def test_temperature_is_solved_once_per_sequence() -> None:
    scores, reference, valid = case(3, "normal")
    state: dict[str, Tensor] = {}
    first = Temperature().calibrate(scores, reference, valid, state)
    solved = state["temperature"].clone()
    assert solved.shape == (2, 2, 1)
    later = torch.softmax(torch.where(valid[:, :, None], reference, float("-inf")) * 20, -1)
    again = Temperature().calibrate(scores, later, valid, state)
    assert torch.equal(state["temperature"], solved)
    torch.testing.assert_close(again[0], first[0])
    fresh: dict[str, Tensor] = {}
    Temperature().calibrate(scores, later, valid, fresh)
    assert not torch.allclose(fresh["temperature"], solved)
    kept: dict[str, Tensor] = {}
    PER_ROW.calibrate(scores, reference, valid, kept)
    assert kept == {}


def collapsing_head() -> tuple[Tensor, Tensor, Tensor]:
    """Raw attention of one head whose top-p 0.9 needs about 1,000 of 4,096 tokens, and its pooled logits.

    A few tokens (sinks and heavy hitters) hold most of the mass and a broad, heavy-tailed bulk the rest: no token of
    the bulk matters, together they do. Pooling gives each spike six copies and so drowns the bulk (paper, figure 2).
    """
    rng = torch.Generator().manual_seed(0)
    normal, chi = torch.randn(4096, generator=rng), torch.randn(6, 4096, generator=rng)
    logits = 0.35 * normal / chi.square().mean(0).sqrt()  # Student's t, 6 degrees of freedom
    spikes = torch.tensor([0, 900, 2000, 3100])
    logits[spikes] = torch.tensor([9.46, 8.26, 8.06, 7.86])
    pooled = torch.nn.functional.max_pool1d(logits[None], 7, 1, 3)[0]
    return pooled[None, None, None], torch.softmax(logits, -1)[None, None, None], torch.ones(1, 1, 4096).bool()


def test_calibration_recovers_a_collapsed_selection() -> None:
    pooled, raw, valid = collapsing_head()
    wanted = int(top_p_count(raw, 0.9))
    assert 900 <= wanted <= 1100
    assert int(top_p_count(Softmax().calibrate(pooled, None, valid, {}), 0.9)) <= wanted // 10
    assert int(top_p_count(Exact().calibrate(pooled, raw, valid, {}), 0.9)) == pytest.approx(wanted, rel=0.05)
    assert int(top_p_count(Temperature().calibrate(pooled, raw, valid, {}), 0.9)) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("calibrator", [Exact(), Temperature(), PER_ROW, Softmax()])
def test_no_host_sync(calibrator: Calibrator) -> None:
    """Fake tensors hold no data: reading one on the host raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        scores, reference = torch.randn(2, 2, 3, 8), torch.rand(2, 2, 3, 8)
        out = calibrator.calibrate(scores, reference, torch.ones(2, 2, 8, dtype=torch.bool), {})
    assert out.shape == (2, 2, 3, 8)
