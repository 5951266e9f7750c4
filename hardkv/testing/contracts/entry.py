"""What entry scorers promise besides: every token is scored for itself, in a prompt as in a decode step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hardkv.interfaces import EntryScorer
from hardkv.testing.capture import assert_capture_safe
from hardkv.testing.cases import EntryCase
from hardkv.testing.contracts.base import Contract, require, require_same
from hardkv.types import EnteringTokens


def check_entry_shape_and_finite(component: EntryScorer, case: EntryCase) -> None:
    """Scores of entering tokens are float32 `[R, H, N]`, and finite."""
    found = component.enter(case.entering())
    expected = (case.rows, case.heads, case.tokens)
    require(tuple(found.shape) == expected, f"`enter` gave shape {tuple(found.shape)}; expected {expected}")
    require(found.dtype == torch.float32, f"`enter` gave {found.dtype}; expected float32: add `.float()`")
    require(torch.isfinite(found).all(), "`enter` gave scores that are not finite")


def check_entering_rows_are_independent(component: EntryScorer, case: EntryCase) -> None:
    """A row scores alone as it does beside others."""
    tokens = case.entering()
    together = component.enter(tokens)
    for row in range(case.rows):
        found = component.enter(tokens.row(row))
        require_same(found, together[row : row + 1], "a row has other scores alone: rows are mixed")


def check_one_by_one_equals_at_once(component: EntryScorer, case: EntryCase) -> None:
    """A token scores in a prompt as it does alone, in a decode step."""
    tokens = case.entering()
    found = torch.cat([component.enter(_token(tokens, index)) for index in range(case.tokens)], -1)
    require_same(found, component.enter(tokens), "a token of a prompt has another score alone, as in a decode step")


def check_enter_is_capture_safe(component: EntryScorer, case: EntryCase, contract: type[Contract]) -> None:
    """`enter` runs inside the captured decode step."""
    tokens = case.entering()
    names = ("keys", "values", "queries", "positions", "hidden_states")

    def enter(*tensors: Tensor) -> Tensor:
        parts: dict[str, Any] = dict(zip(names, tensors, strict=True))
        return component.enter(EnteringTokens(layer=tokens.layer, **parts))

    inputs = [getattr(tokens, name) for name in names]
    assert_capture_safe(enter, *inputs, elsewhere=contract.capture_elsewhere)


def _token(tokens: EnteringTokens, index: int) -> EnteringTokens:
    one = slice(index, index + 1)
    hidden = None if tokens.hidden_states is None else tokens.hidden_states[:, one]
    return EnteringTokens(
        layer=tokens.layer,
        keys=tokens.keys[:, :, one],
        values=tokens.values[:, :, one],
        queries=tokens.queries[:, :, :, one],
        positions=tokens.positions[:, one],
        hidden_states=hidden,
    )
