"""Merging of partial results in plain torch, against one softmax in float64."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hardkv_kernels.merge_states import merge_states
from tests.operators import check_operator

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def parts_case(
    seed: int, parts: int, rows: int, dim: int, dtype: torch.dtype = torch.float32, unseen: float = 0.3
) -> tuple[Tensor, Tensor]:
    """`outs, lses` of which a share of the parts, and the whole of row 0, has seen nothing and holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(parts, rows, dim, generator=generator).to(dtype)
    lses = torch.randn(parts, rows, generator=generator) * 10.0
    nothing = torch.rand(parts, rows, generator=generator) < unseen
    nothing[:, :1] = unseen > 0.0
    lses[nothing], outs[nothing] = float("-inf"), float("nan")
    return outs, lses


def expected(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Part by part, in float64."""
    rows, dim = outs.shape[1:]
    out, total = torch.zeros(rows, dim, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    for part in range(outs.shape[0]):
        for row in range(rows):
            if lses[part, row] > float("-inf"):
                weight = torch.exp(lses[part, row].double())
                out[row] += weight * outs[part, row].double()
                total[row] += weight
    return out / total.clamp_min(1e-300)[:, None], torch.log(total)


@given(
    seed=st.integers(0, 1000),
    parts=st.integers(0, 5),
    rows=st.integers(0, 4),
    dtype=st.sampled_from(DTYPES),
    unseen=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_equals_one_softmax_over_all_parts(seed: int, parts: int, rows: int, dtype: torch.dtype, unseen: float) -> None:
    outs, lses = parts_case(seed, parts, rows, 6, dtype, unseen)
    out, lse = merge_states(outs, lses)
    expected_out, expected_lse = expected(outs, lses)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


def test_parts_of_a_softmax_give_the_softmax() -> None:
    logits, values = torch.randn(3, 4, 10), torch.randn(10, 5)
    halves = [slice(0, 3), slice(3, 10)]
    outs = torch.stack([torch.softmax(logits[..., half], -1) @ values[half] for half in halves])
    lses = torch.stack([torch.logsumexp(logits[..., half], -1) for half in halves])
    out, lse = merge_states(outs.flatten(1, 2), lses.flatten(1))
    torch.testing.assert_close(out.view(3, 4, 5), torch.softmax(logits, -1) @ values)
    torch.testing.assert_close(lse.view(3, 4), torch.logsumexp(logits, -1))


def test_a_row_that_saw_nothing_answers_zeros() -> None:
    out, lse = merge_states(torch.full((2, 3, 4), float("nan")), torch.full((2, 3), float("-inf")))
    assert not out.any()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operator_is_well_formed(dtype: torch.dtype) -> None:
    check_operator(merge_states, parts_case(1, 3, 4, 8, dtype, unseen=0.0))


def test_the_plain_form_needs_no_values_of_tensors() -> None:
    module = importlib.import_module("hardkv_kernels.merge_states")
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        out, lse = module.merge_states._init_fn(*(mode.from_tensor(t) for t in parts_case(2, 3, 4, 8)))
    assert (out.shape, lse.shape) == ((4, 8), (4,))
