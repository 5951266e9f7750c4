"""The kernel of `rewrite` against a loop over entries and the plain form."""

from __future__ import annotations

import pytest
import torch

from hardkv_kernels.rewrite import launch_rewrite, rewrite
from tests.test_rewrite import DTYPES, Case, check, rewrite_case

pytestmark = pytest.mark.interp


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "entries", "slots", "head_dim", "share"),
    [(1, 1, 1, 64, 1.0), (4, 37, 3, 80, 0.5), (3, 128, 16, 128, 0.7), (4, 70, 16, 256, 0.9), (2, 9, 4, 24, 0.0)],
)
def test_kept_entries_move(
    dtype: torch.dtype, rows: int, entries: int, slots: int, head_dim: int, share: float
) -> None:
    case = rewrite_case(rows * entries, rows, entries, slots, head_dim, dtype, share)
    check(case, launch_rewrite)
    ours, reference = case.copied(), case.copied()
    launch_rewrite(*case.rows, *ours)
    rewrite(*case.rows, *reference)
    for found, wanted in zip(ours, reference, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_rows_longer_than_one_tile() -> None:
    """A tile of head dim 128 in float32 has 32 entries."""
    check(rewrite_case(5, 3, 300, 16, 128, torch.float32, 0.6), launch_rewrite)


def test_strided_rows() -> None:
    case = rewrite_case(6, 3, 20, 4, 16, torch.bfloat16, 0.5)
    source, stays, shown, target = (each.t().contiguous().t() for each in case.rows)
    check(Case((source, stays, shown, target), case.pools), launch_rewrite)


def test_no_entries() -> None:
    case = rewrite_case(7, 2, 4, 4, 16, torch.float32, 0.5)
    source, stays, shown, target = (each[:, :0] for each in case.rows)
    check(Case((source, stays, shown, target), case.pools), launch_rewrite)
