"""The contract of calibrators."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hardkv.interfaces import Calibrator
from hardkv.testing.capture import assert_capture_safe
from hardkv.testing.cases import RowCase
from hardkv.testing.contracts.base import Contract, Property, require, require_same
from hardkv.testing.strategies import score_rows


def calibrated(component: Calibrator, scores: Tensor, reference: Tensor, valid: Tensor) -> Tensor:
    """Probabilities of a sequence that has none yet."""
    return component.calibrate(scores, reference if component.needs_reference else None, valid, {})


def _of(component: Calibrator, case: RowCase) -> tuple[Tensor, Tensor]:
    """Probabilities of the case, and where they count, of the same shape."""
    scores, reference, valid = case.build()
    found = calibrated(component, scores, reference, valid)
    expected = (case.layers, case.heads, case.rows, case.slots)
    require(tuple(found.shape) == expected, f"probabilities have shape {tuple(found.shape)}; expected {expected}")
    return found, valid[:, :, None].expand_as(found)


def check_not_negative(component: Calibrator, case: RowCase) -> None:
    """No probability is negative."""
    found, valid = _of(component, case)
    require((found[valid] >= 0.0).all(), f"the least probability is {float(found[valid].min())}; expected 0 or more")


def check_zero_off_mask(component: Calibrator, case: RowCase) -> None:
    """Slots that are not valid get exactly 0."""
    found, valid = _of(component, case)
    require((found[~valid] == 0.0).all(), "slots off `valid` have probabilities: end with `masked_fill(~valid, 0)`")


def check_sums_to_one(component: Calibrator, case: RowCase) -> None:
    """Each row sums to 1."""
    found, valid = _of(component, case)
    total = found.masked_fill(~valid, 0.0).sum(-1)
    require_same(total, torch.ones_like(total), "rows do not sum to 1")


def check_order_kept(component: Calibrator, case: RowCase) -> None:
    """A token that scores higher never gets a smaller probability."""
    scores, _, _ = case.build()
    found, _ = _of(component, case)
    better = scores[..., :, None] > scores[..., None, :]
    wrong = int((better & (found[..., :, None] < found[..., None, :])).sum())
    require(wrong == 0, f"{wrong} pairs of slots have probabilities in another order than their scores")


def check_slots_permute(component: Calibrator, case: RowCase) -> None:
    """Slots in another order get the same probabilities, as long as no two score the same."""
    _, reference, valid = case.build()
    scores = case.distinct()
    order = torch.randperm(case.slots, generator=torch.Generator().manual_seed(case.seed))
    found = calibrated(component, scores[..., order], reference[..., order], valid[..., order])
    expected = calibrated(component, scores, reference, valid)[..., order]
    require_same(found, expected, "slots in another order get other probabilities: places are told apart")


def check_scale_free(component: Calibrator, case: RowCase) -> None:
    """Scores times a positive number give the same probabilities."""
    _, reference, valid = case.build()
    scores = case.distinct()
    expected = calibrated(component, scores, reference, valid)
    for scale in (2.0**-40, 2.0**40):
        found = calibrated(component, scores * scale, reference, valid)
        require_same(found, expected, f"scores times {scale:.3g} give other probabilities; set `scale_free = False`?")


def check_extreme_scores(component: Calibrator, case: RowCase) -> None:
    """Constant, tied and huge scores and a single slot give finite rows that sum to 1."""
    scores, reference, valid = case.build()
    rng = torch.Generator().manual_seed(case.seed)
    noise = torch.randn(scores.shape, generator=rng)
    alone = torch.zeros_like(valid).scatter_(-1, valid.int().argmax(-1, keepdim=True), True)
    whole = torch.ones_like(reference[..., :1]).expand_as(reference).masked_fill(~alone[:, :, None], 0.0)
    for what, extreme, weight, mask in (
        ("constant scores", torch.full_like(scores, 3.0), reference, valid),
        ("tied scores", noise.round(), reference, valid),
        ("huge scores", noise * 5e37, reference, valid),
        ("a single slot", noise, whole, alone),
    ):
        found = calibrated(component, extreme.masked_fill(~mask[:, :, None], float("nan")), weight, mask)
        require(torch.isfinite(found).all(), f"{what}: probabilities are not finite")
        total = found.sum(-1)
        require_same(total, torch.ones_like(total), f"{what}: rows do not sum to 1")


def check_capture_safe(component: Calibrator, case: RowCase, contract: type[Contract]) -> None:
    """Calibrating waits for no device and has no shape that depends on data."""

    def calibrate(scores: Tensor, reference: Tensor, valid: Tensor) -> Tensor:
        return calibrated(component, scores, reference, valid)

    assert_capture_safe(calibrate, *case.build(), elsewhere=contract.capture_elsewhere)


def _is_scale_free(contract: type[Contract]) -> bool:
    return bool(contract.scale_free)  # type: ignore[attr-defined]  # CalibratorContract's


class CalibratorContract(Contract):
    """What every calibrator promises."""

    interface = Calibrator
    scale_free: ClassVar[bool] = True
    """False for a calibrator whose result depends on the scale of the scores."""
    properties = (
        Property(check_not_negative, score_rows),
        Property(check_zero_off_mask, score_rows),
        Property(check_sums_to_one, score_rows),
        Property(check_order_kept, score_rows),
        Property(check_slots_permute, score_rows),
        Property(check_scale_free, score_rows, _is_scale_free),
        Property(check_extreme_scores, score_rows),
        Property(check_capture_safe, score_rows, most_examples=3),
    )
