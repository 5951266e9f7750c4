"""Ragged decoding in plain torch, against a float64 loop over rows and heads."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hardkv_kernels import attend_pages, page_run
from hardkv_kernels.ragged_decode import ragged_decode
from tests.operators import check_operator

FIRST_OWNER = 7
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    """One decode step over a pool of shuffled pages, of which others own some."""

    query: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor
    block_table: Tensor
    page_counts: Tensor
    lanes: Tensor
    page_starts: Tensor
    page_owner: Tensor
    pages: tuple[int, int]
    softcap: float | None
    sink_logits: Tensor | None

    @property
    def scaling(self) -> float:
        return 1.0 / math.sqrt(self.query.shape[-1])

    def arguments(self, logits: Tensor | None, with_probabilities: bool = False) -> tuple[Any, ...]:
        pool = (self.query, self.keys, self.values, self.bias)
        work = (self.block_table, self.lanes, self.page_starts, self.page_owner, FIRST_OWNER, *self.pages)
        return (*pool, *work, self.scaling, self.softcap, self.sink_logits, logits, with_probabilities)

    def owned(self, row: int, head: int) -> Tensor:
        """The pages of a row and head, in order."""
        lane = int(self.lanes[row])
        return self.block_table[lane, head, : int(self.page_counts[lane, head])].long()

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """`out [R, H, G, D]`, `lse [R, H, G]` and `logits [n, G, S]` (NaN where this call has no page), float64."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        lse = torch.full(self.query.shape[:-1], float("-inf"), dtype=torch.float64)
        group, slots = self.query.shape[2], self.bias.shape[1]
        written = torch.full((self.bias.shape[0], group, slots), float("nan"), dtype=torch.float64)
        for row in range(self.query.shape[0]):
            for head in range(self.query.shape[1]):
                pages = self.owned(row, head)
                bias = self.bias[pages].double().flatten()
                shown = bias > float("-inf")
                keys, values = (t[pages].double().flatten(0, 1)[shown] for t in (self.keys, self.values))
                logits = self.query[row, head].double() @ keys.T * self.scaling  # [G, slots shown]
                if self.softcap is not None:
                    logits = torch.tanh(logits / self.softcap) * self.softcap
                logits = logits + bias[shown]
                everything = torch.full((group, bias.shape[0]), float("-inf"), dtype=torch.float64)
                everything[:, shown] = logits
                written[pages] = everything.view(group, -1, slots).transpose(0, 1)
                if self.sink_logits is not None:
                    logits = torch.cat([logits, self.sink_logits[head, :, None].double()], 1)
                if logits.shape[1]:
                    lse[row, head] = torch.logsumexp(logits, 1)
                    out[row, head] = torch.softmax(logits, 1)[:, : int(shown.sum())] @ values
        return out, lse, written


def decode_case(
    seed: int,
    counts: list[list[int]],
    group: int = 4,
    dim: int = 16,
    slots: int = 4,
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    sinks: bool = False,
    dropped: float = 0.3,
    padded_rows: int = 0,
    dirt: float = 7.0,
) -> Case:
    """A case whose row r and head h own `counts[r][h]` pages, followed by rows on the dummy lane.

    A share of the slots is `dropped`, and so are some whole pages; there and in pages of others K and V hold `dirt`.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, heads = len(counts), len(counts[0])
    lanes_total, width, total = rows + 2, max(max(map(max, counts)), 1) + 1, sum(map(sum, counts))
    lanes = torch.randperm(lanes_total - 1, generator=generator)[:rows]
    strangers = 5
    n = total + 2 * strangers
    order = torch.randperm(n - strangers, generator=generator)[: total + 1] + 2  # the last of them is nobody's
    block_table = torch.randint(0, n, (lanes_total, heads, width), generator=generator, dtype=torch.int32)
    page_counts = torch.zeros(lanes_total, heads, dtype=torch.int32)
    page_owner = torch.full((n,), FIRST_OWNER - 1)
    page_owner[::2] = FIRST_OWNER + (rows + padded_rows) * heads
    taken = 0
    for row, of_row in enumerate(counts):
        for head, count in enumerate(of_row):
            pages = order[taken : taken + count]
            block_table[lanes[row], head, :count] = pages.int()
            page_counts[lanes[row], head] = count
            page_owner[pages] = FIRST_OWNER + row * heads + head
            taken += count
    lanes = torch.cat([lanes, lanes.new_full((padded_rows,), lanes_total - 1)])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), page_counts[lanes].flatten().cumsum(0)]).int()
    bias = torch.where(torch.rand(n, slots, generator=generator) < 0.2, 1.5, 0.0)
    bias[torch.rand(n, slots, generator=generator) < dropped] = float("-inf")
    bias[torch.rand(n, generator=generator) < dropped / 3] = float("-inf")
    keys, values = (torch.randn(n, slots, dim, generator=generator) for _ in range(2))
    hidden = (
        torch.isneginf(bias) | ((page_owner < FIRST_OWNER) | (page_owner > FIRST_OWNER + rows * heads - 1))[:, None]
    )
    keys[hidden], values[hidden] = dirt, dirt
    query = torch.randn(rows + padded_rows, heads, group, dim, generator=generator).to(dtype)
    sink_logits = torch.randn(heads, group, generator=generator) if sinks else None
    pool = (keys.to(dtype), values.to(dtype), bias, block_table, page_counts)
    first, last = (int(order.min()), int(order.max()) + 1) if total else (0, n)
    return Case(query, *pool, lanes, starts, page_owner, (first, last), softcap, sink_logits)


def check(case: Case, decode: Any, with_logits: bool, rounding: float) -> tuple[Tensor, Tensor]:
    """`decode`'s answer, compared with the oracle; `rounding` is the relative error of one logit."""
    logits = torch.full((case.bias.shape[0], case.query.shape[2], case.bias.shape[1]), float("nan"))
    out, lse, nothing = decode(*case.arguments(logits if with_logits else None))
    assert not nothing.numel()
    expected_out, expected_lse, expected_logits = case.expected()
    # Logits reach about 5, values about 4. Weights and out are rounded to the query's dtype once more.
    eps = max(torch.finfo(case.query.dtype).eps, 2.0**-20)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0.0, atol=8 * rounding)
    torch.testing.assert_close(out.double(), expected_out, rtol=0.0, atol=4 * eps + 8 * rounding)
    assert out.dtype == case.query.dtype
    if with_logits:
        ours = ~torch.isnan(expected_logits)
        torch.testing.assert_close(logits[ours].double(), expected_logits[ours], rtol=rounding, atol=4 * rounding)
    else:
        assert logits.isnan().all()
    return out, lse


def rounding_of(dtype: torch.dtype) -> float:
    """Of the logits of the plain form, whose products have the query's dtype."""
    return max(torch.finfo(dtype).eps, 2.0**-20)


@given(
    seed=st.integers(0, 1000),
    counts=st.integers(1, 3).flatmap(
        lambda heads: st.lists(st.lists(st.integers(0, 6), min_size=heads, max_size=heads), min_size=1, max_size=3)
    ),
    group=st.integers(1, 5),
    slots=st.sampled_from([1, 3, 4, 16]),
    dtype=st.sampled_from(DTYPES),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    dropped=st.sampled_from([0.0, 0.3, 1.0]),
    padded_rows=st.integers(0, 2),
    with_logits=st.booleans(),
)
def test_equals_a_loop_over_rows_and_heads(
    seed: int,
    counts: list[list[int]],
    group: int,
    slots: int,
    dtype: torch.dtype,
    softcap: float | None,
    sinks: bool,
    dropped: float,
    padded_rows: int,
    with_logits: bool,
) -> None:
    case = decode_case(seed, counts, group, 8, slots, dtype, softcap, sinks, dropped, padded_rows)
    check(case, ragged_decode, with_logits, rounding_of(dtype))
    _, expected_lse, expected_logits = case.expected()
    first, last = case.pages
    probabilities = ragged_decode(*case.arguments(None, True))[2]
    assert probabilities.shape == (last - first, group, slots)
    for page in range(first, last):
        owner = int(case.page_owner[page]) - FIRST_OWNER
        if 0 <= owner < len(counts) * len(counts[0]):
            lse = expected_lse.flatten(0, 1)[owner][:, None]
            expected = torch.exp(expected_logits[page] - lse).nan_to_num(0.0)
            atol = 8 * rounding_of(dtype)
            torch.testing.assert_close(probabilities[page - first].double(), expected, rtol=atol, atol=atol)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_head_without_pages_answers_zeros_and_the_sink(sinks: bool) -> None:
    case = decode_case(1, [[3, 0]], sinks=sinks, padded_rows=1)
    out, lse, _ = ragged_decode(*case.arguments(None))
    assert not out[0, 1].any()
    assert not out[1].any()
    assert torch.isfinite(out).all()
    if case.sink_logits is None:
        assert torch.isneginf(lse[0, 1]).all()
        assert torch.isneginf(lse[1]).all()
    else:
        torch.testing.assert_close(lse[1], case.sink_logits)


def test_logits_far_below_the_top_count_nothing() -> None:
    case = decode_case(2, [[4]], dropped=0.0)
    case = replace(case, query=case.query * 100.0)
    out, lse, _ = ragged_decode(*case.arguments(None))
    expected_out, expected_lse, _ = case.expected()
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)


def test_the_operator_is_well_formed() -> None:
    case = decode_case(3, [[2, 3], [0, 1]], sinks=True, softcap=3.0)
    logits = torch.zeros(case.bias.shape[0], 4, 4)
    check_operator(ragged_decode, case.arguments(logits))
    check_operator(ragged_decode, case.arguments(None))
    check_operator(ragged_decode, case.arguments(None, True))


def test_the_plain_form_needs_no_values_of_tensors() -> None:
    module = importlib.import_module("hardkv_kernels.ragged_decode")
    case = decode_case(4, [[2, 3], [0, 1]], sinks=True, dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in case.arguments(torch.zeros(20, 4, 4))]
        out, lse, _ = module.ragged_decode._init_fn(*fake)
    assert (out.shape, out.dtype) == (case.query.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == (case.query.shape[:-1], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [False, True])
def test_a_run_of_pages_needs_no_operator(dtype: torch.dtype, sinks: bool) -> None:
    case = decode_case(5, [[2, 3], [0, 1]], dtype=dtype, sinks=sinks, softcap=2.0 if sinks else None, padded_rows=1)
    owners, span = case.query.shape[0] * case.query.shape[1], slice(*case.pages)
    run = page_run(case.keys, case.values, case.bias, case.page_owner, FIRST_OWNER, span, owners)
    answer = attend_pages(case.query, run, case.scaling, case.softcap, case.sink_logits, True)
    for got, expected in zip(answer, ragged_decode(*case.arguments(None, True)), strict=True):
        torch.testing.assert_close(got, expected, rtol=0.0, atol=0.0, equal_nan=True)
