"""The contract of budgets."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hardkv.interfaces import Budget
from hardkv.pipeline import keep_best
from hardkv.testing.cases import ClaimCase
from hardkv.testing.contracts.base import Contract, Property, require
from hardkv.testing.strategies import claims as claim_cases
from hardkv.types import Claims


def claimed(component: Budget, case: ClaimCase) -> Claims:
    """The case's tokens as the budget itself values them."""
    value, votes = component.claim(case.probabilities(), case.valid())
    return case.claims(value, votes)


def counted(component: Budget, case: ClaimCase) -> Tensor:
    """Counts of the case."""
    return component.counts(claimed(component, case), case.limits())


def check_claim_shapes(component: Budget, case: ClaimCase) -> None:
    """A claim is a float32 value and int32 votes `[L, H, N]`."""
    shape = (case.layers, case.heads, case.slots)
    found = component.claim(case.probabilities(), case.valid())
    for what, tensor, dtype in zip(("value", "votes"), found, (torch.float32, torch.int32), strict=True):
        came = (tuple(tensor.shape), tensor.dtype)
        require(came == (shape, dtype), f"`claim` gave {what} {came}; expected {(shape, dtype)}")


def check_count_shape(component: Budget, case: ClaimCase) -> None:
    """Counts are int64 `[L, H]`."""
    found = counted(component, case)
    came, expected = (tuple(found.shape), found.dtype), ((case.layers, case.heads), torch.int64)
    require(came == expected, f"`counts` gave {came}; expected {expected}")


def check_not_below_protected(component: Budget, case: ClaimCase) -> None:
    """No head keeps fewer than its protected tokens."""
    found, floor = counted(component, case), case.protected().sum(-1)
    require((found >= floor).all(), f"counts {found.tolist()} are below the protected ones {floor.tolist()}")


def check_not_above_cap(component: Budget, case: ClaimCase) -> None:
    """No head keeps more than it holds, nor more than `limits.upper` unless its protected tokens are more."""
    found, held = counted(component, case), case.valid().sum(-1)
    cap = torch.minimum(held, case.protected().sum(-1).clamp(min=case.upper))
    require((found <= cap).all(), f"counts {found.tolist()} exceed {cap.tolist()} (held {held.tolist()})")


def check_never_empty(component: Budget, case: ClaimCase) -> None:
    """A head that holds a token keeps one, protected or not."""
    claims = claimed(component, case)
    unprotected = Claims(claims.value, claims.votes, claims.valid, torch.zeros_like(claims.protected))
    found = component.counts(unprotected, case.limits())
    require((found[claims.resident > 0] > 0).all(), f"a head keeps nothing: {found.tolist()}; clamp to at least 1")


def check_protected_kept(component: Budget, case: ClaimCase) -> None:
    """Sinks and local window are among the tokens that are kept in the end."""
    claims = claimed(component, case)
    keep = keep_best(claims, component.counts(claims, case.limits()), component.votes)
    require(keep[claims.protected].all(), "protected tokens are dropped: give every head at least their number")


def check_nested(component: Budget, case: ClaimCase, contract: type[BudgetContract]) -> None:
    """A looser budget keeps at least as many tokens in every head."""
    assert contract.looser is not None
    found, looser = counted(component, case), counted(contract.looser, case)
    require((looser >= found).all(), f"the looser budget keeps fewer: {looser.tolist()} against {found.tolist()}")


class BudgetContract(Contract):
    """What every budget promises."""

    interface = Budget
    looser: ClassVar[Budget | None] = None
    """The same budget with a higher target or p: if given, it must keep at least as much everywhere."""
    properties = (
        Property(check_claim_shapes, claim_cases),
        Property(check_count_shape, claim_cases),
        Property(check_not_below_protected, claim_cases),
        Property(check_not_above_cap, claim_cases),
        Property(check_never_empty, claim_cases),
        Property(check_protected_kept, claim_cases),
        Property(check_nested, claim_cases, lambda contract: contract.looser is not None),  # type: ignore[attr-defined]
    )
