"""Budgets: bounds, targets met, ties, nesting, and the final choice against a literal sort."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from hardkv.calibration.exact import Exact
from hardkv.config import Components
from hardkv.interfaces import Budget
from hardkv.pipeline import keep_best, select
from hardkv.policies.budgets.ada import Ada
from hardkv.policies.budgets.target import FlooredTargetOptions, TargetOptions
from hardkv.policies.budgets.threshold import Threshold
from hardkv.policies.budgets.top_k import TopK
from hardkv.policies.budgets.top_p import TopP, TopPOptions
from hardkv.policies.scorers.streaming import Streaming
from hardkv.regularize.modal import ModalOptions
from hardkv.regularize.rewrite import Rewrite
from hardkv.tiers.evict import Evict
from hardkv.types import Claims, Limits

SEEDS = st.integers(0, 2**31 - 1)
REGIMES = st.sampled_from(["flat", "peaked", "tied", "constant", "zero", "tiny"])
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 40))
NO_CAP = 1 << 40


def draw_values(rng: torch.Generator, shape: tuple[int, ...], regime: str) -> Tensor:
    """Non-negative values as probabilities are, in regimes that break thresholds."""
    uniform = torch.rand(shape, generator=rng)
    return {
        "flat": uniform,
        "peaked": torch.softmax(torch.randn(shape, generator=rng) * 6, -1),
        "tied": (uniform * 4).round() / 8,
        "constant": torch.full(shape, 0.125),
        "zero": torch.full(shape, -0.0),
        "tiny": uniform * 1e-42,  # denormal
    }[regime]


def draw_claims(seed: int, shape: tuple[int, int, int], regime: str, sinks: int = 1, window: int = 2) -> Claims:
    """Claims of heads of unequal length; sinks and window protected; NaN where nothing is held."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, shape[-1] + 1, shape[:2], generator=rng)[..., None]
    column = torch.arange(shape[-1])
    valid = column < lengths
    protected = ((column < sinks) | (column >= lengths - window)) & valid
    value = draw_values(rng, shape, regime).masked_fill(~valid, float("nan"))
    votes = torch.randint(0, 4, shape, generator=rng, dtype=torch.int32)
    return Claims(value=value, votes=votes, valid=valid, protected=protected)


def limits_of(claims: Claims, upper: int = NO_CAP, **changes: int) -> Limits:
    return replace(Limits(1, 2, 0, upper, seen_tokens=100, total_layers=claims.value.shape[0]), **changes)


def budgets(target: int, floor_share: float) -> dict[str, Budget]:
    floored = FlooredTargetOptions(mean_tokens=target, floor_share=floor_share)
    return {
        "top_k": TopK(TargetOptions(mean_tokens=target)),
        "top_p": TopP(TopPOptions(floor_tokens=max(1, target // 2), cap_tokens=None)),
        "top_p_capped": TopP(TopPOptions(floor_tokens=1, cap_tokens=target)),
        "threshold": Threshold(floored),
        "ada": Ada(floored),
    }


def sort_literally(claims: Claims, counts: Tensor, votes: bool) -> Tensor:
    """The best slots of every head by (protected, votes, value, recency)."""
    keep = torch.zeros_like(claims.valid)
    layers, heads, slots = claims.value.shape
    for layer in range(layers):
        for head in range(heads):

            def rank(slot: int, layer: int = layer, head: int = head) -> tuple[bool, int, float, int]:
                at = (layer, head, slot)
                protected = bool(claims.protected[at])
                ballots = int(claims.votes[at]) if votes and not protected else 0
                return protected, ballots, 0.0 if protected else float(claims.value[at]), slot

            held = [slot for slot in range(slots) if claims.valid[layer, head, slot]]
            best = sorted(held, key=rank, reverse=True)[: int(counts[layer, head])]
            keep[layer, head, best] = True
    return keep


@given(
    seed=SEEDS,
    shape=SHAPES,
    regime=REGIMES,
    target=st.integers(1, 30),
    upper=st.integers(1, 40),
    floor_share=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_counts_lie_between_the_protected_and_the_cap(
    seed: int, shape: tuple[int, int, int], regime: str, target: int, upper: int, floor_share: float
) -> None:
    claims = draw_claims(seed, shape, regime)
    protected = (claims.protected & claims.valid).sum(-1)
    for name, budget in budgets(target, floor_share).items():
        counts = budget.counts(claims, limits_of(claims, upper))
        assert (counts.dtype, counts.shape) == (torch.int64, shape[:2]), name
        assert (counts >= protected).all(), name
        assert (counts <= claims.resident).all(), name
        assert (counts <= protected.clamp(min=upper)).all(), name
        assert (counts[claims.resident > 0] > 0).all(), name


@given(seed=SEEDS, shape=SHAPES, regime=REGIMES, target=st.integers(1, 50), upper=st.integers(1, 60))
def test_top_k_is_uniform(seed: int, shape: tuple[int, int, int], regime: str, target: int, upper: int) -> None:
    claims = draw_claims(seed, shape, regime)
    counts = TopK(TargetOptions(mean_tokens=target)).counts(claims, limits_of(claims, upper))
    for layer in range(shape[0]):
        for head in range(shape[1]):
            protected, resident = int(claims.protected[layer, head].sum()), int(claims.resident[layer, head])
            assert counts[layer, head] == min(max(min(target, upper), protected), resident)


@given(
    seed=SEEDS,
    shape=SHAPES,
    regime=REGIMES,
    target=st.integers(1, 40),
    upper=st.integers(1, 60),
    floor_share=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
)
def test_a_threshold_meets_its_total_exactly_unless_bounds_forbid(
    seed: int, shape: tuple[int, int, int], regime: str, target: int, upper: int, floor_share: float
) -> None:
    """`threshold` over the whole model, `ada` in every layer: target x heads, or all that floors and caps allow."""
    claims = draw_claims(seed, shape, regime)
    layers, heads, _ = shape
    protected = (claims.protected & claims.valid).sum(-1)
    cap = torch.maximum(claims.resident.clamp(max=upper), protected)
    floor = torch.minimum(protected.clamp(min=max(1, round(floor_share * target))), cap)
    config = FlooredTargetOptions(mean_tokens=target, floor_share=floor_share)
    model = Threshold(config).counts(claims, limits_of(claims, upper))
    assert (model >= floor).all()
    assert (model <= cap).all()
    assert model.sum() == min(max(target * heads * layers, int(floor.sum())), int(cap.sum()))
    layer = Ada(config).counts(claims, limits_of(claims, upper))
    assert (layer >= floor).all()
    assert (layer <= cap).all()
    for index in range(layers):
        expected = min(max(target * heads, int(floor[index].sum())), int(cap[index].sum()))
        assert layer[index].sum() == expected


@given(seed=SEEDS, target=st.integers(20, 120), share=st.floats(0.05, 0.6))
def test_threshold_meets_the_mean_within_two_percent(seed: int, target: int, share: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    value = torch.softmax(torch.randn(4, 3, 400, generator=rng) * 5, -1)
    nobody = torch.zeros_like(value, dtype=torch.bool)
    claims = Claims(value, torch.zeros_like(value, dtype=torch.int32), ~nobody, nobody)
    limits = limits_of(claims, 4 * target, seen_tokens=400)
    counts = Threshold(FlooredTargetOptions(mean_tokens=target)).counts(claims, limits)
    assert float(counts.double().mean()) == pytest.approx(target, rel=0.02)
    assert counts.min() >= round(0.2 * target)
    by_share = Threshold(FlooredTargetOptions(mean_share=share)).counts(claims, limits_of(claims, seen_tokens=400))
    assert float(by_share.double().mean()) == pytest.approx(round(share * 400), rel=0.02)


@given(seed=SEEDS, shape=SHAPES, regime=REGIMES, target=st.integers(1, 40))
def test_one_threshold_separates_kept_from_dropped(
    seed: int, shape: tuple[int, int, int], regime: str, target: int
) -> None:
    """Between floor and cap, no head drops a token worth more than one that another head keeps."""
    claims = draw_claims(seed, shape, regime)
    config = FlooredTargetOptions(mean_tokens=target, floor_share=0.2)
    limits = limits_of(claims, 20)
    counts = Threshold(config).counts(claims, limits)
    keep = keep_best(claims, counts, votes=False)
    protected = claims.protected.sum(-1)
    floor = torch.minimum(protected.clamp(min=max(1, round(0.2 * target))), claims.resident)
    cap = torch.maximum(claims.resident.clamp(max=limits.upper), protected)
    gains = keep & ~claims.protected & (counts > floor)[..., None]
    loses = claims.valid & ~keep & (counts < cap)[..., None]
    if gains.any() and loses.any():
        assert claims.value[gains].min() >= claims.value[loses].max()


def test_ties_are_shared_out_over_heads_and_layers() -> None:
    """One value everywhere: no head may take it all."""
    value = torch.full((3, 2, 30), 0.25)
    nobody = torch.zeros_like(value, dtype=torch.bool)
    claims = Claims(value, torch.zeros_like(value, dtype=torch.int32), ~nobody, nobody)
    config = FlooredTargetOptions(mean_tokens=10, floor_share=0.0)
    assert Threshold(config).counts(claims, limits_of(claims)).tolist() == [[10, 10]] * 3
    assert Ada(config).counts(claims, limits_of(claims)).tolist() == [[10, 10]] * 3
    # 31 of 6 x 30 in one head more than elsewhere: in proportion, to the token.
    longer = torch.ones_like(nobody)
    longer[1:, :, 10:] = False
    uneven = replace(claims, valid=longer, value=value.masked_fill(~longer, float("nan")))
    counts = Threshold(FlooredTargetOptions(mean_tokens=5, floor_share=0.0)).counts(uneven, limits_of(uneven))
    assert counts.tolist() == [[9, 9], [3, 3], [3, 3]]


def test_ties_at_minus_zero_count_as_zero() -> None:
    """The bits of -0.0 are those of the lowest integer: such tokens were never reached, and the target not met."""
    value = torch.full((1, 2, 8), -0.0)
    nobody = torch.zeros_like(value, dtype=torch.bool)
    claims = Claims(value, torch.zeros_like(value, dtype=torch.int32), ~nobody, nobody)
    config = FlooredTargetOptions(mean_tokens=5, floor_share=0.0)
    assert Threshold(config).counts(claims, limits_of(claims)).tolist() == [[5, 5]]


@given(
    seed=SEEDS,
    layers=st.integers(2, 5),
    heads=st.integers(1, 4),
    slots=st.integers(2, 30),
    regime=REGIMES,
    target=st.integers(1, 20),
    upper=st.integers(1, 40),
)
def test_counts_only_fall_as_layers_are_added(
    seed: int, layers: int, heads: int, slots: int, regime: str, target: int, upper: int
) -> None:
    """What prefill relies on: a layer cut to a provisional selection never wants a dropped token back."""
    claims = draw_claims(seed, (layers, heads, slots), regime)
    budget = Threshold(FlooredTargetOptions(mean_tokens=target, floor_share=0.2))
    limits = limits_of(claims, upper)
    before = None
    for known in range(1, layers + 1):
        part = Claims(claims.value[:known], claims.votes[:known], claims.valid[:known], claims.protected[:known])
        counts = budget.counts(part, limits)
        if before is not None:
            assert (counts[:-1] <= before).all()
        before = counts


def test_a_head_gains_no_tie_when_a_layer_joins() -> None:
    """Proportions rounded anew for each call gave the second layer 1 token of three layers, and 2 of four."""
    valid = torch.arange(8) < torch.tensor([3, 2, 8, 3])[:, None, None]
    nobody = torch.zeros_like(valid)
    claims = Claims(torch.full((4, 1, 8), 0.5), nobody.int(), valid, nobody)
    first = Claims(claims.value[:3], claims.votes[:3], valid[:3], nobody[:3])
    budget, limits = Threshold(FlooredTargetOptions(mean_tokens=2, floor_share=0.0)), limits_of(claims)
    earlier, later = budget.counts(first, limits), budget.counts(claims, limits)
    assert earlier.sum() == later.sum() == 8
    assert (later[:3] <= earlier).all()


@given(seed=SEEDS, rows=st.integers(1, 4), slots=st.integers(1, 30), regime=st.sampled_from(["any", "ties"]))
def test_votes_are_the_literal_top_p_sets_of_the_rows(seed: int, rows: int, slots: int, regime: str) -> None:
    """Masses are multiples of 1/1024, so that sums are exact; the newest among equals is taken first."""
    rng = torch.Generator().manual_seed(seed)
    valid = torch.rand(1, 2, slots, generator=rng) < 0.8
    valid[..., 0] = True
    units = torch.zeros(1, 2, rows, slots, dtype=torch.int64)
    for head in range(2):
        held = valid[0, head].nonzero()[:, 0]
        for row in range(rows):
            if regime == "ties":  # every slot the same, the rest to the oldest
                units[0, head, row, held] = 1024 // len(held)
                units[0, head, row, held[0]] += 1024 - int(units[0, head, row].sum())
            else:
                picks = held[torch.randint(len(held), (1024,), generator=rng)]
                units[0, head, row] = torch.bincount(picks, minlength=slots)
    for p in (1 / 1024, 0.25, 0.5, 0.75, 1.0):
        value, votes = TopP(TopPOptions(p=p)).claim(units / 1024, valid)
        expected = torch.zeros(1, 2, slots, dtype=torch.int32)
        for head in range(2):
            for row in range(rows):
                mass = 0
                ranked = sorted(range(slots), key=lambda slot: (int(units[0, head, row, slot]), slot), reverse=True)
                for slot in ranked:
                    if mass >= p * 1024:
                        break
                    mass += int(units[0, head, row, slot])
                    expected[0, head, slot] += 1
        assert torch.equal(votes, expected)
        assert torch.equal(value, (units / 1024).amax(2))


def test_a_flat_row_votes_for_the_newest() -> None:
    """It voted for the oldest: among equals a stable sort keeps the first."""
    _, votes = TopP(TopPOptions(p=0.5)).claim(torch.full((1, 1, 1, 8), 0.125), torch.ones(1, 1, 8, dtype=torch.bool))
    assert votes.tolist() == [[[0, 0, 0, 0, 1, 1, 1, 1]]]


@given(seed=SEEDS, rows=st.integers(1, 4), slots=st.integers(1, 40), regime=REGIMES, first=st.floats(0.01, 1.0))
def test_top_p_is_nested_in_p(seed: int, rows: int, slots: int, regime: str, first: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    valid = torch.rand(1, 3, slots, generator=rng) < 0.9
    raw = draw_values(rng, (1, 3, rows, slots), regime) * valid[:, :, None]
    rows_of_one = raw / raw.sum(-1, keepdim=True).clamp_min(1e-30)
    protected = valid & (torch.arange(slots) < 1)
    before_votes, before_counts = None, None
    for p in (first / 4, first / 2, first):
        budget = TopP(TopPOptions(p=p, floor_tokens=1))
        value, votes = budget.claim(rows_of_one, valid)
        counts = budget.counts(Claims(value, votes, valid, protected), Limits(1, 0, 0, NO_CAP))
        assert (votes <= rows).all()
        assert not votes[~valid].any()
        if before_votes is not None and before_counts is not None:
            assert (votes >= before_votes).all()
            assert (counts >= before_counts).all()
        assert torch.equal(counts, (((votes > 0) | protected).sum(-1)).clamp(min=1).minimum(valid.sum(-1)))
        before_votes, before_counts = votes, counts


def test_no_head_of_top_p_exceeds_upper() -> None:
    """A floor or cap above `cache.upper` won: more pages than admission had reserved."""
    votes = torch.ones(1, 1, 50, dtype=torch.int32)
    claims = Claims(votes.float(), votes, votes > 0, votes < 0)
    for options in (TopPOptions(floor_tokens=40), TopPOptions(floor_tokens=1, cap_tokens=40)):
        assert TopP(options).counts(claims, limits_of(claims, 20)).tolist() == [[20]]
    assert TopP(TopPOptions(floor_tokens=4, cap_tokens=9)).counts(claims, limits_of(claims, 20)).tolist() == [[9]]


@given(seed=SEEDS, shape=SHAPES, regime=REGIMES, votes=st.booleans())
def test_keep_best_is_a_literal_sort(seed: int, shape: tuple[int, int, int], regime: str, votes: bool) -> None:
    claims = draw_claims(seed, shape, regime)
    rng = torch.Generator().manual_seed(seed)
    share = torch.rand(shape[:2], generator=rng)
    counts = torch.maximum((claims.resident * share).long(), claims.protected.sum(-1))
    keep = keep_best(claims, counts, votes)
    assert torch.equal(keep, sort_literally(claims, counts, votes))
    assert torch.equal(keep.sum(-1), counts)
    assert (keep | ~claims.protected).all()
    assert not (keep & ~claims.valid).any()


def test_the_newest_win_at_ties() -> None:
    """At the cap HARDInfer keeps the oldest."""
    valid = torch.ones(1, 1, 8, dtype=torch.bool)
    claims = Claims(
        torch.full((1, 1, 8), 0.5), torch.ones(1, 1, 8, dtype=torch.int32), valid, torch.arange(8) < valid * 2
    )
    for votes in (False, True):
        kept = keep_best(claims, torch.tensor([[5]]), votes)
        assert kept[0, 0].nonzero()[:, 0].tolist() == [0, 1, 5, 6, 7]


def test_protected_tokens_beat_the_largest_score() -> None:
    valid = torch.ones(1, 1, 4, dtype=torch.bool)
    value = torch.tensor([[[-3e38, 3e38, 3e38, -3e38]]])
    protected = torch.tensor([[[True, False, False, True]]])
    claims = Claims(value, torch.tensor([[[0, 9, 9, 0]]], dtype=torch.int32), valid, protected)
    for votes in (False, True):
        assert keep_best(claims, torch.tensor([[2]]), votes).tolist() == [[[True, False, False, True]]]


@given(share=st.floats(1e-9, 1.0, exclude_min=True), seen=st.integers(1, 5000), slots=st.integers(1, 20))
def test_a_budget_never_rounds_to_zero(share: float, seen: int, slots: int) -> None:
    valid = torch.ones(2, 2, slots, dtype=torch.bool)
    claims = Claims(torch.full((2, 2, slots), 0.1), torch.zeros(2, 2, slots, dtype=torch.int32), valid, ~valid)
    floored = FlooredTargetOptions(mean_share=share, floor_share=0.0)
    for budget in (TopK(TargetOptions(mean_share=share)), Threshold(floored), Ada(floored)):
        target = budget.target_tokens(seen)
        assert target == max(1, round(share * seen))
        counts = budget.counts(claims, limits_of(claims, seen_tokens=seen))
        assert counts.tolist() == [[min(target, slots)] * 2] * 2
    assert TopP().target_tokens(seen) is None


def test_targets_are_given_once() -> None:
    with pytest.raises(ValidationError, match="give exactly one of mean_tokens"):
        TargetOptions()
    with pytest.raises(ValidationError, match="give exactly one of mean_tokens"):
        TargetOptions(mean_tokens=4, mean_share=0.5)
    with pytest.raises(ValidationError, match=r"floor_tokens \(9\) must not exceed cap_tokens \(8\)"):
        TopPOptions(floor_tokens=9, cap_tokens=8)


@given(seed=SEEDS, mode=st.sampled_from(["per_layer", "union"]), regime=REGIMES, target=st.integers(4, 20))
def test_heads_that_share_one_set_keep_the_same_slots(seed: int, mode: str, regime: str, target: int) -> None:
    """A pooled value is tied over its heads; shares of ties, rounded in order, gave some heads one token more."""
    rng = torch.Generator().manual_seed(seed)
    shape = (3, 3, 24)
    valid = torch.ones(shape, dtype=torch.bool)
    column = torch.arange(24)
    protected = ((column < 1) | (column >= 22)).expand(shape)
    votes = torch.randint(0, 3, shape, generator=rng, dtype=torch.int32)
    claims = Claims(draw_values(rng, shape, regime), votes, valid, protected)
    for name, budget in budgets(target, 0.2).items():
        regularizer = Rewrite(ModalOptions(mode=mode))  # type: ignore[arg-type]  # drawn from the literals
        parts = Components(Streaming(), Exact(), budget, regularizer, Evict())
        keep = select(parts, claims, limits_of(claims))
        shared = keep[:1, :1] if mode == "union" else keep[:, :1]
        assert torch.equal(keep, shared.expand_as(keep)), name
        assert (keep | ~protected).all(), name
        if name in ("top_k", "threshold", "ada"):
            assert int(keep.sum()) == target * 9, name
