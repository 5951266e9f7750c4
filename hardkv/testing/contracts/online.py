"""What online scorers promise besides: `update` is elementwise, capture-safe, and what `fused` says."""

from __future__ import annotations

import torch

from hardkv.interfaces import OnlineScorer
from hardkv.testing.capture import assert_capture_safe
from hardkv.testing.cases import ScoreCase
from hardkv.testing.contracts.base import Contract, require, require_same
from hardkv_kernels import score_update


def check_update_is_elementwise(component: OnlineScorer, case: ScoreCase) -> None:
    """Each slot's statistic follows from its own probabilities alone, whatever the leading axes mean."""
    steps = case.steps()
    whole = torch.zeros(steps.shape[1:3] + steps.shape[4:])
    for step in steps:
        component.update(whole, step.clone())
    require(whole.dtype == torch.float32 and not whole.isnan().any(), "update gives NaN for probabilities")
    # The slots in another order, one layer's heads as if they were pages.
    flipped = torch.zeros_like(whole).flatten(0, 1)
    for step in steps:
        component.update(flipped, step.flip(-1).flatten(0, 1))
    found = flipped.flip(-1).view_as(whole)
    require_same(found, whole, "slots in another order, or other leading axes, give another statistic")
    halves = torch.zeros_like(whole)
    for step in steps:
        for half in (slice(0, 1), slice(1, None)):
            component.update(halves[..., half], step[..., half].clone())
    require_same(halves, whole, "a slot's statistic depends on other slots")


def check_update_is_capture_safe(component: OnlineScorer, case: ScoreCase, contract: type[Contract]) -> None:
    """`update` runs inside the captured decode step."""
    step = case.steps()[0]
    assert_capture_safe(component.update, torch.zeros_like(step[:, :, 0]), step, elsewhere=contract.capture_elsewhere)


def check_fused_equals_update(component: OnlineScorer, case: ScoreCase) -> None:
    """The kernel does from logits and log-sum-exps what `update` does from probabilities."""
    fused = component.fused
    assert fused is not None
    rng = torch.Generator().manual_seed(case.seed)
    logits = torch.randn(case.layers, case.group, case.slots, generator=rng) * 4
    lse = 8 + torch.rand(case.layers, case.group, generator=rng)
    statistic = torch.rand(case.layers, case.slots, generator=rng)
    expected, owner = statistic.clone(), torch.arange(case.layers)
    component.update(expected, torch.exp(logits - lse[..., None]))
    options = (fused.reduction, fused.power, fused.decay, fused.floor)
    score_update(statistic, logits, owner, lse, 0, 0, case.layers, *options)
    require_same(statistic, expected, f"`fused` ({fused}) and `update` give another statistic")


def check_prompt_statistic(component: OnlineScorer, case: ScoreCase) -> None:
    """What `read_prompt` gives is a statistic: float32 `[B, H, N]`, finite and blind to invalid slots."""
    view = case.view()
    found, other = component.read_prompt(view), component.read_prompt(case.view(garbage=1e4))
    require((found is None) == (other is None), "read_prompt gives a statistic for one view and None for another")
    if found is None or other is None:
        return
    expected = tuple(view.valid.shape)
    require(tuple(found.shape) == expected, f"read_prompt gives shape {tuple(found.shape)}; expected {expected}")
    require(found.dtype == torch.float32, f"read_prompt gives {found.dtype}; expected float32: add `.float()`")
    seen, other = found.masked_fill(~view.valid, 0.0), other.masked_fill(~view.valid, 0.0)
    require(bool(torch.isfinite(seen).all()), "read_prompt gives values at valid slots that are not finite")
    require_same(other, seen, "other garbage in slots with `~view.valid` gives another statistic", 0.0)
