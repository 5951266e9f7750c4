"""The contract of importance scorers; online and entry scorers have properties of their own besides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hardkv.interfaces import EntryScorer, ImportanceScorer, OnlineScorer
from hardkv.testing.capture import assert_capture_safe
from hardkv.testing.cases import ScoreCase
from hardkv.testing.contracts import entry, online
from hardkv.testing.contracts.base import Contract, Property, require, require_same
from hardkv.testing.draws import NAN
from hardkv.testing.strategies import entering_tokens, score_views
from hardkv.types import ScoreView

_PER_LAYER = ("keys", "values", "positions", "valid", "queries", "query_positions", "statistic", "hidden_states")
_PER_HEAD = ("keys", "values", "positions", "valid", "queries", "statistic")


def ready_view(component: ImportanceScorer, case: ScoreCase, garbage: float = NAN) -> ScoreView:
    """The case's view; for an online scorer with the statistic that its own `update` gathers."""
    view = case.view(garbage)
    if not isinstance(component, OnlineScorer) or not component.online:
        return view
    statistic = torch.zeros_like(view.valid, dtype=torch.float32)
    for step in case.steps():
        component.update(statistic, step)
    return replace(view, statistic=statistic.masked_fill(~view.valid, garbage))


def valid_scores(component: ImportanceScorer, view: ScoreView) -> Tensor:
    """Scores, with 0 where nothing may look."""
    return component.score(view).masked_fill(~view.valid[:, :, None], 0.0)


def tensors_of(view: ScoreView) -> dict[str, Tensor]:
    """The view's tensors by field."""
    found = {field.name: getattr(view, field.name) for field in fields(view)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def check_shape(component: ImportanceScorer, case: ScoreCase) -> None:
    """Scores are float32 `[B, H, R, N]` with R = 1, or W for a scorer of rows."""
    found = component.score(ready_view(component, case))
    one, many = ((case.layers, case.heads, rows, case.slots) for rows in (1, case.rows))
    allowed = (one, many) if component.needs_queries else (one,)
    require(tuple(found.shape) in allowed, f"scores have shape {tuple(found.shape)}; expected one of {allowed}")
    require(found.dtype == torch.float32, f"scores are {found.dtype}; expected float32: add `.float()`")


def check_finite(component: ImportanceScorer, case: ScoreCase) -> None:
    """Every score at a valid slot is finite."""
    found = valid_scores(component, ready_view(component, case))
    broken = int((~torch.isfinite(found)).sum())
    require(broken == 0, f"{broken} scores at valid slots are not finite: look for x / 0, log(0) and exp of much")


def check_unwritten_rows_are_zero(component: ImportanceScorer, case: ScoreCase) -> None:
    """A query row that was never written scores zero everywhere."""
    view = ready_view(component, case)
    found = component.score(view)
    if found.shape[2] == 1:
        return
    rows = found.masked_fill(view.row_valid[:, None, :, None] | ~view.valid[:, :, None], 0.0)
    require(~rows.isnan().any() & ~rows.any(), "rows with `~view.row_valid` have scores; set them to 0")


def check_blind_to_invalid_slots(component: ImportanceScorer, case: ScoreCase) -> None:
    """What lies in slots that are not valid changes nothing."""
    found = valid_scores(component, ready_view(component, case, garbage=1e4))
    expected = valid_scores(component, ready_view(component, case))
    require_same(found, expected, "other garbage in slots with `~view.valid` gives other scores", 0.0)


def check_layers_are_independent(component: ImportanceScorer, case: ScoreCase) -> None:
    """A row of B scores alone as it does beside others."""
    view = ready_view(component, case)
    together = valid_scores(component, view)
    for row in range(case.layers):
        parts = {name: getattr(view, name)[row : row + 1] for name in (*_PER_LAYER, "frequencies")}
        alone = replace(
            view, **parts, layers=view.layers[row : row + 1], output_weights=view.output_weights[row : row + 1]
        )
        found = valid_scores(component, alone)
        require_same(found, together[row : row + 1], "a row of B has other scores alone: rows of B are mixed")


def check_heads_permute(component: ImportanceScorer, case: ScoreCase) -> None:
    """KV heads in another order give the same scores in that order."""
    view = ready_view(component, case)
    order = torch.randperm(case.heads, generator=torch.Generator().manual_seed(case.seed))
    parts: dict[str, Any] = {name: getattr(view, name)[:, order] for name in _PER_HEAD}
    weights = tuple(
        weight.view(-1, case.heads, case.group, case.head_dim)[:, order].flatten(1) for weight in view.output_weights
    )
    sinks = None if view.sink_logits is None else view.sink_logits[order]
    permuted = replace(view, **parts, output_weights=weights, sink_logits=sinks)
    found, expected = valid_scores(component, permuted), valid_scores(component, view)[:, order]
    require_same(found, expected, "KV heads in another order have other scores: heads are told apart by number")


def check_inputs_unchanged(component: ImportanceScorer, case: ScoreCase) -> None:
    """Scoring leaves the view as it was."""
    view, before = ready_view(component, case), tensors_of(ready_view(component, case))
    component.score(view)
    for name, tensor in tensors_of(view).items():
        require_same(tensor, before[name], f"view.{name} was changed in place; work on a copy", 0.0)


def check_deterministic(component: ImportanceScorer, case: ScoreCase) -> None:
    """The same view gives the same scores, whatever was scored in between."""
    expected = component.score(ready_view(component, case))
    other = replace(case, seed=case.seed + 1)
    component.score(ready_view(component, other))
    found = component.score(ready_view(component, case))
    require_same(found, expected, "a second call gives other scores: keep no state, use a generator of your own", 0.0)


def check_causal(component: ImportanceScorer, case: ScoreCase) -> None:
    """A query row tells nothing of tokens newer than itself, and is told nothing by them.

    Rows that score for themselves: what they can see scores the same whatever the newer tokens hold. One row for all:
    where every query is older than every token, what the queries hold changes no score.
    """
    view = ready_view(component, case)
    found = valid_scores(component, view)
    assert view.queries is not None
    assert view.query_positions is not None
    if found.shape[2] > 1:
        for row in range(case.rows):
            newer = view.valid & (view.positions > view.query_positions[:, row, None, None])
            keys, values = (torch.where(newer[..., None], 1 - 3 * part, part) for part in (view.keys, view.values))
            other = valid_scores(component, replace(view, keys=keys, values=values))
            seen = view.visible[:, :, row]
            same = "a row's scores depend on tokens newer than the row"
            require_same(other[:, :, row] * seen, found[:, :, row] * seen, same)
        return
    moved = replace(view, positions=view.positions + int(view.query_positions.max()) + 1)
    expected = valid_scores(component, moved)
    other = valid_scores(component, replace(moved, queries=1 - 3 * view.queries))
    require_same(other, expected, "queries older than every token change scores: mask by `view.visible`")


def check_capture_safe(component: ImportanceScorer, case: ScoreCase, contract: type[Contract]) -> None:
    """Scoring waits for no device and has no shape that depends on data."""
    view = ready_view(component, case)
    names = list(tensors_of(view))

    def score(*tensors: Tensor) -> Tensor:
        parts: dict[str, Any] = dict(zip(names, tensors, strict=False))
        return component.score(replace(view, **parts, output_weights=tensors[len(names) :]))

    inputs = [*tensors_of(view).values(), *view.output_weights]
    assert_capture_safe(score, *inputs, elsewhere=contract.capture_elsewhere)


def _is_online(contract: type[Contract]) -> bool:
    return isinstance(contract.component, OnlineScorer) and contract.component.online


def _has_fused(contract: type[Contract]) -> bool:
    return _is_online(contract) and contract.component.fused is not None


def _is_entry(contract: type[Contract]) -> bool:
    return isinstance(contract.component, EntryScorer)


def _looks_back(contract: type[Contract]) -> bool:
    return bool(contract.component.needs_queries) and contract.causal  # type: ignore[attr-defined]  # ScorerContract's


def _equivariant(contract: type[Contract]) -> bool:
    return bool(contract.heads_permute)  # type: ignore[attr-defined]  # ScorerContract's


def _on_views(check: Callable[..., None], *rest: Any) -> Property:
    return Property(check, score_views, *rest)


def _on_entry(check: Callable[..., None], *rest: Any) -> Property:
    return Property(check, entering_tokens, _is_entry, *rest)


class ScorerContract(Contract):
    """What every importance scorer promises."""

    interface = ImportanceScorer
    heads_permute: ClassVar[bool] = True
    """False for a scorer that knows heads by their number: a table of heads, a draw of random numbers."""
    causal: ClassVar[bool] = True
    """False for a scorer that looks ahead on purpose, as it predicts queries to come."""
    properties = (
        _on_views(check_shape),
        _on_views(check_finite),
        _on_views(check_unwritten_rows_are_zero, lambda contract: contract.component.needs_queries),
        _on_views(check_blind_to_invalid_slots),
        _on_views(check_layers_are_independent),
        _on_views(check_heads_permute, _equivariant),
        _on_views(check_inputs_unchanged),
        _on_views(check_deterministic),
        _on_views(check_causal, _looks_back),
        _on_views(check_capture_safe, lambda contract: True, 3),
        _on_views(online.check_update_is_elementwise, _is_online),
        _on_views(online.check_update_is_capture_safe, _is_online, 3),
        _on_views(online.check_fused_equals_update, _has_fused),
        _on_views(online.check_prompt_statistic, _is_online),
        _on_entry(entry.check_entry_shape_and_finite),
        _on_entry(entry.check_entering_rows_are_independent),
        _on_entry(entry.check_one_by_one_equals_at_once),
        _on_entry(entry.check_enter_is_capture_safe, 3),
    )
