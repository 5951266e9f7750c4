"""The kernels of `merge_states` against a float64 loop over parts and the plain form."""

from __future__ import annotations

import pytest
import torch

from hardkv_kernels.merge_states import launch_combine, launch_merge_states, merge_states
from tests.test_merge_states import DTYPES, expected, parts_case

pytestmark = pytest.mark.interp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 3, 4, 9])
@pytest.mark.parametrize("dim", [16, 80])
def test_parts_some_of_which_saw_nothing(dtype: torch.dtype, parts: int, dim: int) -> None:
    outs, lses = parts_case(parts, parts, 6, dim, dtype)
    out, lse = launch_merge_states(outs, lses)
    for expected_out, expected_lse in (expected(outs, lses), merge_states(outs, lses)):
        torch.testing.assert_close(out, expected_out.float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-6, atol=1e-6)


def test_every_part_saw_nothing() -> None:
    outs, lses = parts_case(1, 5, 3, 16, unseen=1.0)
    out, lse = launch_merge_states(outs, lses)
    assert not out.any()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize(("parts", "rows"), [(0, 3), (3, 0)])
def test_no_parts_or_no_rows(parts: int, rows: int) -> None:
    out, lse = launch_merge_states(torch.ones(parts, rows, 8), torch.ones(parts, rows))
    torch.testing.assert_close(out, torch.zeros(rows, 8))
    torch.testing.assert_close(lse, torch.full((rows,), float("-inf")))


def test_parts_with_gaps_in_memory() -> None:
    outs, lses = parts_case(2, 3, 4, 16)
    out, lse = launch_merge_states(outs.transpose(0, 2).contiguous().transpose(0, 2), lses.T.contiguous().T)
    torch.testing.assert_close((out, lse), merge_states(outs, lses), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("programs", "min_pages"), [(1, 1), (5, 1), (40, 1), (5, 4)])
def test_shares_of_programs(dtype: torch.dtype, sinks: bool, programs: int, min_pages: int) -> None:
    """Two rows of three heads over 45 pages; one owner has none, one is alone on most of the programs."""
    counts = torch.tensor([2, 0, 38, 1, 0, 4])
    page_starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    query = torch.empty(2, 3, 2, 16, dtype=dtype)
    # Page i is dealt to program i // each; the result of program p for owner o lies at p + o.
    each = max(-(-45 // programs), min_pages)
    outs, lses = parts_case(3, programs + 6, 2, 16)
    sink_logits = torch.randn(3, 2) * 10.0 if sinks else None
    out, lse = launch_combine(outs, lses, page_starts, sink_logits, query, programs, min_pages)
    assert out.dtype == dtype
    for owner in range(6):
        shares = sorted({page // each + owner for page in range(int(page_starts[owner]), int(page_starts[owner + 1]))})
        of_owner, lse_of_owner = outs[shares], lses[shares]
        if sink_logits is not None:
            of_owner = torch.cat([of_owner, torch.zeros(1, 2, 16)])
            lse_of_owner = torch.cat([lse_of_owner, sink_logits[owner % 3][None]])
        expected_out, expected_lse = expected(of_owner, lse_of_owner)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out.view(6, 2, 16)[owner].double(), expected_out, rtol=eps, atol=1e-5)
        torch.testing.assert_close(lse.view(6, 2)[owner].double(), expected_lse, rtol=1e-6, atol=1e-6)
