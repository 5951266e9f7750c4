"""The top-p pivot in plain torch, against its defining property in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hardkv_kernels.topp_threshold import topp_threshold
from tests.operators import check_operator

EPS = torch.finfo(torch.float32).eps


def rows(seed: int, count: int, tokens: int, sharpness: float, levels: int, zeros: float) -> Tensor:
    """Softmax rows, some values 0, some rows all 0, with ties where there are few levels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (count, tokens), generator=generator) * (8.0 / levels)
    x = torch.softmax(sharpness * logits, -1)
    x = x.masked_fill(torch.rand(x.shape, generator=generator) < zeros, 0.0)
    return x.masked_fill(torch.rand(count, 1, generator=generator) < 0.1, 0.0)


def check(x: Tensor, p: float, tau: Tensor, count: Tensor) -> None:
    """The set of the `count` largest covers p, one token fewer does not, and tau is its smallest member."""
    assert tau.dtype == torch.float32
    assert count.dtype == torch.int64
    slack = 4 * EPS * math.sqrt(x.shape[-1]) + EPS
    for row, pivot, chosen in zip(x.double(), tau.double(), count.tolist(), strict=True):
        ranked = torch.sort(row, descending=True).values
        mass = float(ranked.sum())
        if mass == 0.0:
            assert math.isinf(pivot)
            assert chosen == 0
            continue
        assert 1 <= chosen <= int((row > 0).sum())
        assert float(pivot) == float(ranked[chosen - 1])
        assert float(ranked[: chosen - 1].sum()) < (p + slack) * mass
        if chosen < int((row > 0).sum()):
            assert float(ranked[:chosen].sum()) >= (p - slack) * mass


@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 300),
    sharpness=st.sampled_from([0.0, 0.5, 3.0]),
    levels=st.sampled_from([1, 4, 10_000]),
    zeros=st.sampled_from([0.0, 0.5, 0.99]),
    p=st.floats(0.01, 1.0),
)
def test_the_chosen_set_covers_p_and_no_smaller_one_does(
    seed: int, tokens: int, sharpness: float, levels: int, zeros: float, p: float
) -> None:
    x = rows(seed, 5, tokens, sharpness, levels, zeros)
    check(x, p, *topp_threshold(x, p))


def test_small_row() -> None:
    x = torch.tensor([[0.5, 0.125, 0.25, 0.125], [0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    tau, count = topp_threshold(x, 0.8)
    assert tau.tolist() == [0.125, 2.0, math.inf]
    assert count.tolist() == [3, 1, 0]


def test_p_of_one_takes_every_positive_value_however_small() -> None:
    tau, count = topp_threshold(torch.tensor([[1.0, 1e-20, 0.0, 1e-30]]), 1.0)
    assert count.tolist() == [3]
    assert tau.tolist() == torch.tensor([1e-30]).tolist()


@pytest.mark.parametrize("p", [0.9, 1.0])
def test_operator_contract(p: float) -> None:
    x = rows(0, 6, 20, 1.0, 100, 0.1).view(2, 3, 20)
    check_operator(topp_threshold, (x, p))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        for answer in (topp_threshold(fake, p), topp_threshold._init_fn(fake, p)):
            assert [tuple(tensor.shape) for tensor in answer] == [(2, 3), (2, 3)]
            assert [tensor.dtype for tensor in answer] == [torch.float32, torch.int64]
