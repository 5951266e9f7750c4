"""One compression pass, as stages: score, calibrate, budget, regularize."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hardkv.config import Components
from hardkv.errors import HardKVError, PluginError
from hardkv.faults import named, repair, shown
from hardkv.interfaces import CacheTier, Component, EntryScorer, OnlineScorer
from hardkv.types import Claims, CostModel, EnteringTokens, Layout, Limits, ScoreView, Selection, TokenBatch

_COUNTS = (torch.int64, torch.int32)


def claim(
    parts: Components, view: ScoreView, protected: Tensor, states: Sequence[dict[str, Tensor]]
) -> tuple[Claims, Tensor]:
    """Score and calibrate some layers of one sequence; `protected [L, H, N]` marks sinks and local window.

    `states`: the calibrator's, one per layer. Gives the claims, and how many values of scorer, calibrator and budget at
    valid slots are not finite, `[3, L]` int64, for `check_finite`: a look at them here would wait for the device.

    Raises:
        PluginError: a component raised, or gave a wrong shape.
    """
    with blaming("scorer", parts.scorer):
        scores = parts.scorer.score(view)
    _check_scores(parts.scorer, scores, view)
    scores, no_scores = _finite(scores, view.valid[:, :, None, :])
    no_probabilities = torch.zeros_like(no_scores)
    if parts.calibrates:
        reference = _reference_rows(view, scores.shape[2]) if parts.calibrator.needs_reference else None
        with blaming("calibrator", parts.calibrator), _joined(states) as state:
            calibrated = parts.calibrator.calibrate(scores, reference, view.valid, state)
        _check_shape("calibrator", parts.calibrator, "probabilities [B, H, R, N]", calibrated, scores.shape)
        scores, no_probabilities = _finite(calibrated, view.valid[:, :, None, :])
        if view.queries is not None and scores.shape[2] > 1:  # a row that was never written has no say
            scores = scores * view.row_valid[:, None, :, None]
    with blaming("budget", parts.budget):
        answer = parts.budget.claim(scores, view.valid)
    value, votes = _pair("budget", parts.budget, "(value, votes)", answer)
    for what, found in (("value", value), ("votes", votes)):
        _check_shape("budget", parts.budget, f"{what} [B, H, N]", found, view.valid.shape)
    value, no_value = _finite(value, view.valid)
    claims = Claims(value=value, votes=votes, valid=view.valid, protected=protected & view.valid)
    return claims, torch.stack([no_scores, no_probabilities, no_value])


def _finite(values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Zero in place of what is invalid or not finite, so that no later stage sees it, and how many were not, `[B]`."""
    finite = torch.isfinite(values)
    return values.masked_fill(~(finite & valid), 0.0), (~finite & valid).flatten(1).sum(1)


def check_finite(parts: Components, broken: Sequence[Sequence[int]], layers: Sequence[int]) -> None:
    """Refuse values that were not finite; `broken [3, L]`: how many there were in each of the model's `layers`.

    Raises:
        PluginError: naming the component and the first such layer.
    """
    makers = (("scorer", parts.scorer), ("calibrator", parts.calibrator), ("budget", parts.budget))
    for (kind, component), counts in zip(makers, broken, strict=True):
        for count, layer in zip(counts, layers, strict=True):
            if count:
                raise PluginError(
                    f"{named(kind, component)} gave {count} values that are not finite at valid slots of layer "
                    f"{layer}; check it for divisions by zero and logarithms of zero"
                )


def enter(scorer: EntryScorer, tokens: EnteringTokens) -> Tensor:
    """Score tokens as they enter the cache, `[R, H, N]` float32.

    Raises:
        PluginError: the scorer raised, or gave a wrong shape.
    """
    with blaming("scorer", scorer):
        scores = scorer.enter(tokens)
    _check_shape("scorer", scorer, "scores on entry [R, H, N]", scores, tokens.keys.shape[:3])
    return scores.float()


def prompt_rows(scorer: OnlineScorer) -> int | None:
    """How many of a prompt's newest queries a scorer asks for; None where it takes `cache.query_rows`.

    Raises:
        PluginError: the scorer raised, or gave something else.
    """
    with blaming("scorer", scorer):
        rows = scorer.prompt_rows
    if rows is not None and (type(rows) is not int or rows < 1):
        raise PluginError(f"{named('scorer', scorer)} gave {shown(rows)} as prompt_rows; expected 1 or more, or None")
    return rows


def seeded_statistic(scorer: OnlineScorer, view: ScoreView) -> Tensor:
    """The statistic `[B, H, N]` that a prompt's queries leave: what the scorer reads in them, or as decode steps.

    Raises:
        PluginError: the scorer raised, or gave a wrong shape.
    """
    with blaming("scorer", scorer):
        statistic = scorer.read_prompt(view)
        if statistic is None and scorer.fused is not None:
            statistic = view.folded(scorer.fused)
        elif statistic is None:
            statistic = torch.zeros(view.valid.shape, device=view.keys.device)
            scorer.seed(statistic, view.attention)
    _check_shape("scorer", scorer, "a prompt's statistic [B, H, N]", statistic, view.valid.shape)
    return statistic


def by_row(
    score: Callable[[EnteringTokens], Tensor], tokens: EnteringTokens
) -> tuple[Tensor | None, dict[int, HardKVError]]:
    """Scores `[R, H, N]` of a step's rows; where that fails, row by row, with zeros for those that `failures` names."""
    try:
        return score(tokens), {}
    except HardKVError as error:
        if len(tokens.keys) == 1:
            return None, {0: error}
    failures: dict[int, HardKVError] = {}
    scores = torch.zeros(tokens.keys.shape[:3], device=tokens.keys.device)
    for row in range(len(scores)):
        try:
            scores[row] = score(tokens.row(row))[0]
        except HardKVError as error:
            failures[row] = error
    return scores, failures


def select(parts: Components, claims: Claims, limits: Limits) -> Tensor:
    """Choose the slots to keep, `[L, H, N]` bool, for the layers scored so far."""
    pooled, counts = count(parts, claims, limits)
    return keep_best(pooled, counts, parts.budget.votes)


def count(parts: Components, claims: Claims, limits: Limits) -> tuple[Claims, Tensor]:
    """Decide how many slots each head keeps; gives the claims as pooled for the mode, and counts `[L, H]`."""
    pooled = _pool(parts.regularizer.mode, claims)
    with blaming("budget", parts.budget):
        counts = parts.budget.counts(pooled, limits)
    _check_shape("budget", parts.budget, "counts [L, H]", counts, claims.value.shape[:2], _COUNTS)
    # What was reserved for the sequence is held to, and what is protected is kept, whatever the budget says.
    protected = (claims.protected & claims.valid).sum(-1)
    return pooled, torch.maximum(torch.minimum(counts, protected.clamp(min=limits.upper)), protected)


def lay_out(parts: Components, keep: Tensor, valid: Tensor, cost: CostModel, limits: Limits) -> Layout:
    """Let the regularizer decide between compacting and masking; `valid [L, H, N]` marks every slot held."""
    selection = Selection(keep=keep, valid=valid, held_slots=valid.sum(-1))
    with blaming("regularizer", parts.regularizer):
        layout = parts.regularizer.layout(selection, cost, limits)
    if not isinstance(layout, Layout):
        raise PluginError(f"{named('regularizer', parts.regularizer)} gave {shown(layout)}; expected a hardkv.Layout")
    heads = keep.shape[:2]
    _check_shape("regularizer", parts.regularizer, "keep [L, H, N]", layout.keep, keep.shape, (torch.bool,))
    _check_shape("regularizer", parts.regularizer, "rewrite [L, H]", layout.rewrite, heads, (torch.bool,))
    _check_shape("regularizer", parts.regularizer, "reserve_slots [L, H]", layout.reserve_slots, heads, _COUNTS)
    return layout


def let_go(condenser: CacheTier, layer: int, tokens: TokenBatch) -> Tensor | None:
    """Offer tokens that are dropped to the last tier; gives new values `[H, N, D]` for those that stay, if it folds."""
    with blaming("condenser", condenser):
        if condenser.holds_tokens:
            condenser.admit(layer, tokens)
        folded = condenser.fold(layer, tokens) if condenser.folds else None
    if folded is not None:
        _check_shape("condenser", condenser, "values [H, N, D]", folded, tokens.values.shape)
        assert tokens.survivors is not None
        if not (torch.isfinite(folded).all(-1) | ~tokens.survivors).all():
            raise PluginError(f"{named('condenser', condenser)} folded values that are not finite; check its weights")
    return folded


def ask(
    condenser: CacheTier, layer: int, query: Tensor, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Let a last tier that lies outside the pages attend `query [H, G, D]`: `out [H, G, D]`, `lse [H, G]`.

    Raises:
        PluginError: it raised, or gave a wrong shape or numbers that are not finite (`lse` may be -inf).
    """
    with blaming("condenser", condenser):
        answer = condenser.attend(layer, query, scaling, softcap)
    out, lse = _pair("condenser", condenser, "(out, lse)", answer)
    _check_shape("condenser", condenser, "out [H, G, D]", out, query.shape)
    _check_shape("condenser", condenser, "lse [H, G]", lse, query.shape[:-1])
    if not (torch.isfinite(out).all() & (lse < float("inf")).all()):
        raise PluginError(
            f"{named('condenser', condenser)} gave attention that is not finite; check what it holds in empty slots"
        )
    return out, lse


def keep_best(claims: Claims, counts: Tensor, votes: bool) -> Tensor:
    """Mark the `counts [L, H]` best slots of each head by (protected, votes, value, recency), `[L, H, N]` bool."""
    value = claims.value.masked_fill(claims.protected, float("inf")).masked_fill(~claims.valid, float("-inf"))
    order = torch.sort(value.flip(-1), dim=-1, descending=True, stable=True).indices
    if votes:
        ballots = claims.votes.masked_fill(claims.protected, torch.iinfo(torch.int32).max)
        ballots = ballots.masked_fill(~claims.valid, -1).flip(-1).gather(-1, order)
        order = order.gather(-1, torch.sort(ballots, dim=-1, descending=True, stable=True).indices)
    chosen = torch.arange(order.shape[-1], device=order.device) < counts[..., None]
    return torch.zeros_like(chosen).scatter_(-1, order, chosen).flip(-1) & claims.valid


@contextmanager
def blaming(kind: str, component: Component) -> Iterator[None]:
    """Turn whatever a component raises into a `PluginError` with its name, and a plugin's file and line."""
    try:
        yield
    except HardKVError:
        raise
    except Exception as error:
        message = f"{kind} '{component.name}' raised {type(error).__name__}: {error}{repair(component, error)}"
        raise PluginError(message) from error


@contextmanager
def _joined(states: Sequence[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """One state for several layers, whose tensors have them along the first axis; written back at the end."""
    if len(states) == 1:
        yield states[0]
        return
    state = {key: torch.cat([one[key] for one in states]) for key in states[0]}
    yield state
    for index, one in enumerate(states):
        for key, tensor in state.items():
            part = tensor[index : index + 1]
            # In place: a tensor that another stream made must not be let go while this one may still read it.
            if key in one and one[key].shape == part.shape:
                one[key].copy_(part)
            else:
                one[key] = part.clone()


def _pool(mode: str, claims: Claims) -> Claims:
    """Share the best claim over the heads that must keep one set."""
    if mode == "per_head":
        return claims
    dims = (1,) if mode == "per_layer" else (0, 1)
    value = claims.value.masked_fill(~claims.valid, float("-inf")).amax(dims, keepdim=True)
    votes = claims.votes.masked_fill(~claims.valid, 0).amax(dims, keepdim=True)
    return Claims(
        value=value.expand_as(claims.value).masked_fill(~claims.valid, 0.0),
        votes=votes.expand_as(claims.votes),
        valid=claims.valid,
        protected=claims.protected,
    )


def _reference_rows(view: ScoreView, rows: int) -> Tensor:
    """Raw attention of the scored rows, group mean, `[B, H, R, N]`; the mean row for a scorer without rows."""
    attention = view.attention.mean(2)
    if rows == attention.shape[2]:
        return attention
    written = view.row_valid.sum(-1).clamp_min(1)
    return attention.sum(2, keepdim=True) / written[:, None, None, None]


def _pair(kind: str, component: Component, what: str, answer: object) -> tuple[Tensor, Tensor]:
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise PluginError(f"{named(kind, component)} gave {shown(answer)}; expected a pair {what}")
    return answer


def _check_shape(
    kind: str,
    component: Component,
    what: str,
    found: object,
    expected: Sequence[int],
    types: Sequence[torch.dtype] = (),
) -> None:
    if not isinstance(found, Tensor):
        raise PluginError(f"{named(kind, component)} gave {shown(found)} as {what}; expected a tensor")
    if tuple(found.shape) != tuple(expected):
        raise PluginError(
            f"{named(kind, component)} gave {what} of shape {tuple(found.shape)}; expected {tuple(expected)}"
        )
    if types and found.dtype not in types:
        names = " or ".join(str(one).removeprefix("torch.") for one in types)
        raise PluginError(f"{named(kind, component)} gave {what} as {found.dtype}; expected {names}")


def _check_scores(scorer: Component, scores: object, view: ScoreView) -> None:
    if not isinstance(scores, Tensor):
        raise PluginError(f"{named('scorer', scorer)} gave {shown(scores)}; expected scores [B, H, R, N]")
    batch, heads, slots = view.valid.shape
    rows = view.queries.shape[3] if view.queries is not None else 1
    shape = tuple(scores.shape)
    if len(shape) != 4 or shape[:2] != (batch, heads) or shape[3] != slots or shape[2] not in (1, rows):
        raise PluginError(
            f"{named('scorer', scorer)} gave scores of shape {shape}; expected [B, H, R, N] = "
            f"[{batch}, {heads}, 1 or {rows}, {slots}]"
        )
