"""The kernel of `topp_threshold` has the property that defines the pivot; the reference differs by rounding alone."""

from __future__ import annotations

import math

import pytest
import torch

from hardkv_kernels.topp_threshold import launch_topp_threshold, topp_threshold
from tests.test_topp_threshold import check, rows

pytestmark = pytest.mark.interp


@pytest.mark.parametrize(
    ("tokens", "zeros", "sharpness", "levels", "p"),
    [
        (1, 0.0, 1.0, 6, 0.05),
        (37, 0.3, 0.0, 1, 0.5),
        (37, 0.3, 1.0, 6, 0.95),
        (37, 0.3, 3.0, 10_000, 0.999),
        (600, 0.0, 1.0, 6, 0.05),
        (600, 0.5, 0.5, 10_000, 0.95),
        (600, 0.0, 0.0, 10_000, 0.999),
        (4200, 0.5, 0.5, 6, 0.95),  # more than a tile
    ],
)
def test_pivot(tokens: int, zeros: float, sharpness: float, levels: int, p: float) -> None:
    x = rows(tokens + levels, 3, tokens, sharpness, levels, zeros)
    tau, count = launch_topp_threshold(x, p)
    check(x, p, tau, count)
    if p < 0.99:  # in the far tail many values fit into a rounding of the sum
        assert (count - topp_threshold(x, p)[1]).abs().max() <= 1


def test_p_of_one_takes_every_positive_value() -> None:
    x = rows(1, 5, 50, 3.0, 100, 0.3)
    for got, expected in zip(launch_topp_threshold(x, 1.0), topp_threshold(x, 1.0), strict=True):
        assert torch.equal(got, expected)


def test_leading_axes_and_empty_rows() -> None:
    x = torch.tensor([[[0.5, 0.125, 0.25, 0.125], [0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    tau, count = launch_topp_threshold(x.transpose(0, 1), 0.8)
    assert tau.tolist() == [[0.125], [2.0], [math.inf]]
    assert count.tolist() == [[3], [1], [0]]
