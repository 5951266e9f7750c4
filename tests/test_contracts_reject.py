"""The contracts themselves: for every property a component that breaks it, and is caught by that property's check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

from hardkv.calibration.exact import Exact
from hardkv.errors import CapacityError
from hardkv.interfaces import Budget, CacheTier, Component, EntryScorer, ImportanceScorer
from hardkv.policies.budgets.target import TargetOptions
from hardkv.policies.budgets.top_k import TopK
from hardkv.policies.scorers.attention import Attention
from hardkv.policies.scorers.attention_power import AttentionPower
from hardkv.policies.scorers.h2o import H2O
from hardkv.policies.scorers.key_norm import KeyNorm
from hardkv.policies.scorers.window_max import WindowMax
from hardkv.regularize.rewrite import Rewrite
from hardkv.testing import BudgetContract, CalibratorContract, RegularizerContract, ScorerContract, TierContract
from hardkv.testing.contracts import Contract, Property
from hardkv.types import (
    Claims,
    CostModel,
    EnteringTokens,
    FusedUpdate,
    Layout,
    Limits,
    ScoreView,
    Selection,
    TierShape,
    TokenBatch,
)
from hardkv_kernels import attend_slots

QUICK = settings(
    deadline=None,
    max_examples=60,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Backwards(EntryScorer):
    """A correct entry scorer: prefers what looks away from its query."""

    name = "backwards"

    def enter(self, tokens: EnteringTokens) -> Tensor:
        return -(tokens.queries.mean(2) * tokens.keys).sum(-1).float().tanh()


class ListTier(CacheTier):
    """A correct tier: keeps every token in slots of its own."""

    name = "list"
    folds = True

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.store: dict[str, Tensor] = {}
        self.used: np.ndarray[Any, Any] = np.zeros((0, 0), dtype=np.int64)

    def fresh(self) -> CacheTier:
        return type(self)(self.config)

    def allocate(self, shape: TierShape) -> None:
        size = (shape.layers, shape.heads, shape.slots)
        self.store = {
            "keys": torch.zeros(*size, shape.head_dim),
            "values": torch.zeros(*size, shape.head_dim),
            "bias": torch.full(size, float("-inf")),
        }
        self.used = np.zeros(size[:2], dtype=np.int64)

    def room(self, layer: int, arriving: Any) -> None:
        if (self.used[layer] + arriving > self.store["bias"].shape[-1]).any():
            raise CapacityError("no slot is left")

    def admit(self, layer: int, tokens: TokenBatch) -> None:
        arriving = tokens.mask.sum(-1).numpy()
        self.room(layer, arriving)
        for head, count in enumerate(arriving):
            place = slice(self.used[layer, head], self.used[layer, head] + count)
            self.store["keys"][layer, head, place] = tokens.keys[head][tokens.mask[head]]
            self.store["values"][layer, head, place] = tokens.values[head][tokens.mask[head]]
            self.store["bias"][layer, head, place] = 0.0
        self.used[layer] += arriving

    def attend(self, layer: int, query: Tensor, scaling: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        parts = [self.store[name][layer] for name in ("keys", "values", "bias")]
        answer: tuple[Tensor, Tensor] = attend_slots(query, *parts, scaling, softcap)
        return answer

    def fold(self, layer: int, tokens: TokenBatch) -> Tensor:
        dropped = tokens.values.masked_fill(~tokens.mask[..., None], 0.0).mean(1, keepdim=True)
        return tokens.values + dropped

    @property
    def allocated_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.store.values())

    @property
    def holds_tokens(self) -> bool:
        return True

    def reset(self) -> None:
        self.store = {}
        self.used = np.zeros((0, 0), dtype=np.int64)


@dataclass(frozen=True)
class Broken:
    """A correct component with one method replaced; the replacement is given the original's method."""

    property: str
    original: Component
    method: str
    fault: Callable[..., Any]
    attributes: tuple[tuple[str, Any], ...] = ()

    def build(self) -> Component:
        kind = type(self.original)
        kept, fault = getattr(kind, self.method), self.fault

        def replaced(this: Any, *arguments: Any, **named: Any) -> Any:
            if isinstance(kept, property):
                return fault(this)
            return fault(this, lambda *given: kept(this, *given), *arguments, **named)

        new: Any = property(replaced) if isinstance(kept, property) else replaced
        broken = type(f"Broken{kind.__name__}", (kind,), {self.method: new, **dict(self.attributes)})
        made: Component = broken(self.original.config)
        return made


CALLS = [0.0]


def counted_up(this: Any, score: Callable[[ScoreView], Tensor], view: ScoreView) -> Tensor:
    CALLS[0] += 1.0
    return score(view) + CALLS[0]


def acausal(this: Any, score: Callable[[ScoreView], Tensor], view: ScoreView) -> Tensor:
    """Rows attend tokens newer than themselves."""
    assert view.query_positions is not None
    newest = torch.where(view.query_positions >= 0, 2**40, -1)
    return score(replace(view, query_positions=newest))


def by_number(this: Any, score: Callable[[ScoreView], Tensor], view: ScoreView) -> Tensor:
    return score(view) * torch.arange(1.0, 1.0 + view.valid.shape[1])[:, None, None]


def in_place(this: Any, score: Callable[[ScoreView], Tensor], view: ScoreView) -> Tensor:
    view.keys.mul_(2.0)
    return score(view)


def half_pooled(this: Any, update: Any, statistic: Tensor, probabilities: Tensor) -> None:
    update(statistic, probabilities / probabilities.sum(-1, keepdim=True))


def synced(this: Any, update: Any, statistic: Tensor, probabilities: Tensor) -> None:
    if float(probabilities.sum()) > 0.0:
        update(statistic, probabilities)


def scorer(name: str, fault: Callable[..., Any], original: ImportanceScorer, method: str = "score") -> Broken:
    return Broken(name, original, method, fault)


SCORERS = [
    scorer("shape", lambda this, score, view: score(view)[:, :, 0], KeyNorm()),
    scorer("finite", lambda this, score, view: (-score(view)).log(), KeyNorm()),
    scorer("unwritten_rows_are_zero", lambda this, score, view: score(view) + 1.0, Attention()),
    scorer("blind_to_invalid_slots", lambda this, score, view: score(view) + view.keys.sum(), KeyNorm()),
    scorer("layers_are_independent", lambda this, score, view: score(view) - score(view).amax(0), KeyNorm()),
    scorer("heads_permute", by_number, KeyNorm()),
    scorer("inputs_unchanged", in_place, KeyNorm()),
    scorer("deterministic", counted_up, KeyNorm()),
    scorer("causal", acausal, Attention()),
    scorer("causal", acausal, WindowMax(WindowMax.Config(online=False))),
    scorer("capture_safe", lambda this, score, view: score(view) / max(1, int(view.valid.sum())), KeyNorm()),
    scorer("update_is_elementwise", half_pooled, H2O(), "update"),
    scorer("update_is_capture_safe", synced, H2O(), "update"),
    scorer("fused_equals_update", lambda this: FusedUpdate("power", decay=0.5), H2O(), "fused"),
    scorer("prompt_statistic", lambda this, read, view: read(view) / 0.0, AttentionPower(), "read_prompt"),
    scorer("prompt_statistic", lambda this, read, view: read(view) + view.keys.sum(), AttentionPower(), "read_prompt"),
    scorer("entry_shape_and_finite", lambda this, enter, tokens: enter(tokens).log(), Backwards(), "enter"),
    scorer("entering_rows_are_independent", lambda this, enter, tokens: enter(tokens).cumsum(0), Backwards(), "enter"),
    scorer("one_by_one_equals_at_once", lambda this, enter, tokens: enter(tokens).cumsum(-1), Backwards(), "enter"),
    scorer(
        "enter_is_capture_safe",
        lambda this, enter, tokens: enter(tokens) * int(tokens.positions.max() >= 0),
        Backwards(),
        "enter",
    ),
]


def calibrator(name: str, fault: Callable[..., Any]) -> Broken:
    """`fault(probabilities, scores, valid)`, with `valid` of the scores' shape."""

    def replaced(this: Any, calibrate: Any, scores: Tensor, reference: Tensor, valid: Tensor, state: Any) -> Tensor:
        found: Tensor = fault(calibrate(scores, reference, valid, state), scores, valid[:, :, None].expand_as(scores))
        return found

    return Broken(name, Exact(), "calibrate", replaced)


def by_place(found: Tensor, scores: Tensor, valid: Tensor) -> Tensor:
    skewed = found * torch.linspace(1.0, 2.0, found.shape[-1])
    return skewed / skewed.sum(-1, keepdim=True)


def by_scale(found: Tensor, scores: Tensor, valid: Tensor) -> Tensor:
    return torch.softmax(scores.masked_fill(~valid, float("-inf")), -1)


def by_spread(found: Tensor, scores: Tensor, valid: Tensor) -> Tensor:
    """A division by the spread of the scores, which is zero where all are the same."""
    top = scores.masked_fill(~valid, float("-inf")).amax(-1, keepdim=True)
    low = scores.masked_fill(~valid, float("inf")).amin(-1, keepdim=True)
    return found + (top - low) / (top - low) - 1.0


CALIBRATORS = [
    calibrator("not_negative", lambda found, scores, valid: found - 0.5),
    calibrator("zero_off_mask", lambda found, scores, valid: found.masked_fill(~valid, 0.5)),
    calibrator("sums_to_one", lambda found, scores, valid: found * 0.9),
    calibrator("order_kept", lambda found, scores, valid: found.flip(-1)),
    calibrator("slots_permute", by_place),
    calibrator("scale_free", by_scale),
    calibrator("extreme_scores", by_spread),
    calibrator("capture_safe", lambda found, scores, valid: found / max(1.0, float(found.max()))),
]

TOP_K = TopK(TargetOptions(mean_tokens=6))


def budget(name: str, fault: Callable[..., Any], method: str = "counts") -> Broken:
    return Broken(name, TOP_K, method, fault)


def stingy(this: Any, counts: Any, claims: Claims, limits: Limits) -> Tensor:
    return torch.minimum(torch.full_like(claims.resident, 1), claims.resident)


def only_protected(this: Any, counts: Any, claims: Claims, limits: Limits) -> Tensor:
    return (claims.protected & claims.valid).sum(-1)


def spendthrift(this: Any, counts: Any, claims: Claims, limits: Limits) -> Tensor:
    return claims.resident


BUDGETS = [
    budget("claim_shapes", lambda this, claim, *given: tuple(part.double() for part in claim(*given)), "claim"),
    budget("count_shape", lambda this, counts, *given: counts(*given).float()),
    budget("not_below_protected", stingy),
    budget("not_above_cap", spendthrift),
    budget("never_empty", only_protected),
    budget("protected_kept", stingy),
    budget("nested", lambda this, counts, *given: counts(*given) + 3),  # keeps more than the looser one
]


def regularizer(name: str, fault: Callable[..., Any]) -> Broken:
    return Broken(name, Rewrite(), "layout", fault)


def changed(**parts: Callable[[Layout], Tensor]) -> Callable[..., Layout]:
    def replaced(
        this: Any, layout: Callable[..., Layout], selection: Selection, cost: CostModel, limits: Limits
    ) -> Layout:
        found = layout(selection, cost, limits)
        return replace(found, **{name: make(found) for name, make in parts.items()})

    return replaced


def claims_padding(this: Any, layout: Any, selection: Selection, cost: CostModel, limits: Limits) -> Layout:
    """Writes to the selection: padding then passes for tokens."""
    selection.keep.logical_or_(~selection.valid)
    selection.valid.fill_(True)
    found: Layout = layout(selection, cost, limits)
    return found


REGULARIZERS = [
    regularizer("layout_shapes", changed(rewrite=lambda layout: layout.rewrite.long())),
    regularizer("no_slot_lost", changed(keep=lambda layout: layout.keep & (layout.keep.cumsum(-1) != 1))),
    regularizer("no_slot_doubled", claims_padding),
    regularizer("positions_ascend", claims_padding),
    regularizer("attention", changed(keep=lambda layout: layout.keep & (layout.keep.cumsum(-1) != 1))),
    regularizer("bytes_as_claimed", changed(reserve_slots=lambda layout: layout.reserve_slots + 9)),
]


def tier(name: str, fault: Callable[..., Any], method: str = "admit") -> Broken:
    return Broken(name, ListTier(), method, fault)


def moves_buffers(this: Any, admit: Any, layer: int, tokens: TokenBatch) -> None:
    this.store = {name: tensor.clone() for name, tensor in this.store.items()}
    admit(layer, tokens)


def writes_before_it_looks(this: Any, admit: Any, layer: int, tokens: TokenBatch) -> None:
    this.store["values"][layer].add_(1.0)
    admit(layer, tokens)


def shares(this: Any, fresh: Any) -> CacheTier:
    return this  # type: ignore[no-any-return]  # itself


def forgets(this: Any, reset: Any) -> None:
    this.used[:] = 0


def wrong_sum(this: Any, attend: Any, *given: Any) -> tuple[Tensor, Tensor]:
    out, lse = attend(*given)
    return out, lse + 0.1


def zero_for_nothing(this: Any, attend: Any, *given: Any) -> tuple[Tensor, Tensor]:
    out, lse = attend(*given)
    return out, lse.clamp_min(-50.0)


def takes_all(this: Any, admit: Any, layer: int, tokens: TokenBatch) -> None:
    admit(layer, replace(tokens, mask=torch.ones_like(tokens.mask)))


def ages(this: Any, admit: Any, layer: int, tokens: TokenBatch) -> None:
    this.store["values"].mul_(0.5)
    admit(layer, tokens)


TIERS = [
    tier("attend", wrong_sum, "attend"),
    tier("empty_answers", zero_for_nothing, "attend"),
    tier("constant_addresses", moves_buffers),
    tier("overflow", writes_before_it_looks),
    tier("reset", forgets, "reset"),
    tier("fresh_is_independent", shares, "fresh"),
    tier("allocated_bytes", lambda this: 64 if this.store else 0, "allocated_bytes"),
    tier("empty_mask", ages),
    tier("blind_outside_mask", takes_all),
    tier("fold", lambda this, fold, layer, tokens: fold(layer, tokens) + tokens.keys.sum(), "fold"),
]

ALL: dict[type[Contract], list[Broken]] = {
    ScorerContract: SCORERS,
    CalibratorContract: CALIBRATORS,
    BudgetContract: BUDGETS,
    RegularizerContract: REGULARIZERS,
    TierContract: TIERS,
}
CASES = [
    pytest.param(contract, broken, id=f"{contract.__name__}-{broken.property}-{type(broken.original).__name__}")
    for contract, many in ALL.items()
    for broken in many
]
LOOSER: dict[type[Contract], Budget] = {BudgetContract: TopK(TargetOptions(mean_tokens=8))}


def named(contract: type[Contract], name: str) -> Property:
    return next(prop for prop in contract.properties if prop.name == name)


def attempt(contract: type[Contract], name: str, component: Component) -> None:
    """Check one property of a component on many cases."""
    body: dict[str, Any] = {"component": component}
    if contract in LOOSER:
        body["looser"] = LOOSER[contract]
    mine, prop = type("Mine", (contract,), body), named(contract, name)
    assert prop.applies(mine), f"{name} does not apply to {component!r}"

    @QUICK
    @given(case=prop.cases())
    def run(case: Any) -> None:
        prop.run(mine, case)

    run()


@pytest.mark.parametrize(("contract", "broken"), CASES)
def test_a_broken_component_is_caught_by_the_check_it_is_aimed_at(contract: type[Contract], broken: Broken) -> None:
    with pytest.raises(AssertionError):
        attempt(contract, broken.property, broken.build())


@pytest.mark.parametrize(
    ("contract", "original"),
    list({(kind, type(one.original)): (kind, one.original) for kind, many in ALL.items() for one in many}.values()),
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_the_original_passes_every_check(contract: type[Contract], original: Component) -> None:
    body: dict[str, Any] = {"component": original, "max_examples": 10}
    if contract in LOOSER:
        body["looser"] = LOOSER[contract]
    mine: Any = type("Mine", (contract,), body)
    tests = [f"test_{prop.name}" for prop in mine.properties if prop.applies(mine)]
    for test in tests:
        getattr(mine(), test)()
    assert len(tests) >= 6


@pytest.mark.parametrize("contract", list(ALL))
def test_every_property_has_a_component_that_breaks_it(contract: type[Contract]) -> None:
    assert {prop.name for prop in contract.properties} == {broken.property for broken in ALL[contract]}
