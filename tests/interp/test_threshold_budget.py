"""The kernel of `threshold_budget` gives the reference's integers."""

from __future__ import annotations

import pytest
import torch

from hardkv_kernels.threshold_budget import launch_threshold_budget, threshold_budget
from tests.test_threshold_budget import arguments, check

pytestmark = pytest.mark.interp


@pytest.mark.parametrize(
    ("groups", "heads", "tokens", "levels", "fill"),
    [
        (1, 1, 1, 1, 0.0),
        (1, 1, 1, 1, 1.0),
        (2, 5, 33, 1, 0.37),
        (2, 5, 33, 5, 0.0),
        (2, 5, 33, 5, 0.8),
        (2, 5, 33, 100_000, 0.37),
        (1, 5, 33, 100_000, 1.0),
        (1, 65, 9, 3, 0.37),
        (1, 65, 9, 3, 0.62),
    ],
)
def test_counts(groups: int, heads: int, tokens: int, levels: int, fill: float) -> None:
    args = arguments(7 * heads + levels, groups, heads, tokens, levels, fill)
    counts = launch_threshold_budget(*args)
    assert torch.equal(counts, threshold_budget(*args))
    check(counts, *args)


def test_a_strided_value() -> None:
    value, *limits = arguments(1, 2, 4, 20, 5, 0.5)
    strided = value.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(launch_threshold_budget(strided, *limits), threshold_budget(value, *limits))
