"""The kernels of `window_scores` against the reference and a float64 loop over rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardkv_kernels.window_scores import launch_window_scores, window_scores
from tests.test_window_scores import REDUCTIONS, Case, clean, window_case

pytestmark = pytest.mark.interp

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(case: Case, reduction: str, power: float = 4.0, decay: float = 0.98, floor: float = 1e-8) -> None:
    options: tuple[Any, ...] = (reduction, power, decay, floor, clean(case).thresholds_between())
    scores = launch_window_scores(*case.arguments(*options))
    reference = window_scores(*case.arguments(*options))
    # Logits up to about 20 that are off by a few eps give probabilities off by some 20 * power times that.
    torch.testing.assert_close(scores, reference, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(scores.double(), clean(case).expected(*options), rtol=1e-4, atol=1e-7)
    assert not scores[~case.valid].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ragged_shuffled_dirty_slots(dtype: torch.dtype, reduction: str) -> None:
    check(window_case(1, (2, 2, 2, 19, 150, 40), dtype, dirty=True), reduction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_softcap_and_sinks(dtype: torch.dtype, reduction: str) -> None:
    check(window_case(2, (1, 2, 3, 5, 70, 16), dtype, softcap=2.0, sinks=True, dirty=True), reduction)


def test_more_rows_than_a_block() -> None:
    for reduction in REDUCTIONS:
        check(window_case(3, (1, 1, 2, 70, 40, 16), torch.float16, dirty=True), reduction)


@pytest.mark.parametrize(
    ("power", "decay", "floor"), [(1.0, 1.0, 0.0), (2.5, 0.5, 1e-2), (16.0, 0.98, 0.0), (4.0, 0.98, 0.5)]
)
def test_power_options(power: float, decay: float, floor: float) -> None:
    check(window_case(4, (1, 2, 2, 6, 40, 16)), "power", power, decay, floor)


def test_keys_of_a_wider_tensor() -> None:
    case = window_case(5, (2, 2, 2, 6, 40, 16))
    wide = torch.full((2, 50, 2, 16), float("nan"))
    wide[:, :40] = case.keys.transpose(1, 2)
    window = (case.queries, case.row_positions, wide[:, :40].transpose(1, 2), case.positions, case.valid)
    check(Case(*window, case.scaling, None, None), "mean")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_window_never_written_scores_nothing(reduction: str) -> None:
    case = window_case(6, (1, 1, 2, 3, 10, 16))
    case.row_positions.fill_(-1)
    case.queries.fill_(float("nan"))
    scores = launch_window_scores(*case.arguments(reduction, 4.0, 0.9, 1e-2, torch.zeros(1, 1, 3)))
    assert torch.equal(scores, torch.zeros(1, 1, 10))
