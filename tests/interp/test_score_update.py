"""The kernel of `score_update` against a float64 loop over pages and the plain form."""

from __future__ import annotations

import pytest
import torch

from hardkv_kernels.score_update import launch_score_update, score_update
from tests.test_score_update import check, update_case

pytestmark = pytest.mark.interp


@pytest.mark.parametrize("reduction", ["power", "max"])
@pytest.mark.parametrize("floor", [0.0, 1e-30, 1e-8, 0.01])
@pytest.mark.parametrize(("group", "slots"), [(1, 16), (3, 4), (4, 32), (16, 16), (2, 3)])
def test_shuffled_owners(reduction: str, floor: float, group: int, slots: int) -> None:
    case = update_case(group, 150, 6, group, slots, (3, 141))
    options = (reduction, 4.0, 0.98, floor)
    statistic = check(case, launch_score_update, *options)
    reference = case.statistic.clone()
    score_update(*case.arguments(reference, *options))
    torch.testing.assert_close(statistic, reference, rtol=1e-4, atol=1e-25)


def test_a_range_without_pages() -> None:
    case = update_case(1, 9, 2, 2, 4, (5, 5))
    assert torch.equal(check(case, launch_score_update, "max", 1.0, 1.0, 0.0), case.statistic)


@pytest.mark.parametrize("reduction", ["power", "max"])
def test_what_no_query_sees_stays_exactly_zero(reduction: str) -> None:
    case = update_case(1, 6, 2, 3, 4, (0, 6))
    case.statistic.zero_()
    case.logits.fill_(-80.0)
    assert not check(case, launch_score_update, reduction, 1.0, 0.98, 0.0).any()
