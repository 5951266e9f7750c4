"""Compaction in plain torch, against a loop over entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hardkv_kernels.rewrite import rewrite
from tests.no_sync import NoSync
from tests.operators import check_operator

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ANYWHERE = 2**62  # what nobody may read is no slot of any pool


@dataclass(frozen=True)
class Case:
    """Rows of entries over one pool: `(source, stays, shown, target)` and `(keys, values, stamps, bias)`."""

    rows: tuple[Tensor, Tensor, Tensor, Tensor]
    pools: tuple[Tensor, Tensor, Tensor, Tensor]

    def copied(self) -> tuple[Tensor, ...]:
        return tuple(pool.clone() for pool in self.pools)

    def expected(self) -> tuple[Tensor, ...]:
        """Every kept entry goes to its target, read from the pool as it was."""
        after = self.copied()
        source, stays, shown, target = (each.tolist() for each in self.rows)
        for row in range(len(source)):
            rank = 0
            for entry in range(len(source[row])):
                if stays[row][entry]:
                    old, new = source[row][entry], target[row][rank]
                    for before, pool in zip(self.pools[:3], after, strict=False):
                        pool.flatten(0, 1)[new] = before.flatten(0, 1)[old]
                    after[3].view(-1)[new] = 0.0 if shown[row][entry] else float("-inf")
                    rank += 1
        return after


def rewrite_case(
    seed: int, rows: int, entries: int, slots: int, head_dim: int, dtype: torch.dtype, share: float
) -> Case:
    """Shuffled slots; each kept entry moves to an earlier source of its row, or to a slot of no row."""
    made = torch.Generator().manual_seed(seed)
    pages = -(-rows * entries * 2 // slots) + 1
    shuffled = torch.randperm(pages * slots, generator=made)
    source = shuffled[: rows * entries].view(rows, entries).clone()
    free = iter(shuffled[rows * entries :].tolist())
    stays = torch.rand(rows, entries, generator=made) < torch.tensor([share, 0.0, 1.0])[torch.arange(rows) % 3][:, None]
    shown = torch.rand(rows, entries, generator=made) < 0.7
    target = torch.full((rows, entries), ANYWHERE)
    for row in range(rows):
        unused: list[int] = []
        for rank, entry in enumerate(stays[row].nonzero().flatten().tolist()):
            start = 0 if rank == 0 else int(stays[row].nonzero()[rank - 1]) + 1
            unused += source[row, start : entry + 1].tolist()
            choice = int(torch.randint(len(unused) + 1, (), generator=made))
            target[row, rank] = next(free) if choice == len(unused) else unused.pop(choice)
        dropped = ~torch.isin(source[row], target[row]) & ~stays[row]
        source[row, dropped & (torch.arange(entries) % 2 == 0)] = ANYWHERE
    keys, values = (torch.randn(pages, slots, head_dim, generator=made).to(dtype) for _ in range(2))
    keys[torch.rand(keys.shape, generator=made) < 0.05] = float("nan")
    stamps = torch.randint(10_000, (pages, slots), generator=made, dtype=torch.int32)
    bias = torch.where(torch.rand(pages, slots, generator=made) < 0.5, 0.3, float("-inf"))
    return Case((source, stays, shown, target), (keys, values, stamps, bias))


def check(case: Case, function: Callable[..., None]) -> None:
    """Bit for bit: what moved is the same, and nothing else changed."""
    after = case.copied()
    function(*case.rows, *after)
    for found, wanted in zip(after, case.expected(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@given(
    st.integers(0, 2**31),
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 4]),
    st.sampled_from(DTYPES),
    st.floats(0, 1),
)
def test_kept_entries_move(
    seed: int, rows: int, entries: int, slots: int, head_dim: int, dtype: torch.dtype, share: float
) -> None:
    check(rewrite_case(seed, rows, entries, slots, head_dim, dtype, share), rewrite)


def test_long_rows_move() -> None:
    check(rewrite_case(3, 3, 700, 16, 2, torch.float32, 0.6), rewrite)


@pytest.mark.parametrize("entries", [0, 5])
def test_nothing_stays(entries: int) -> None:
    case = rewrite_case(0, 2, 5, 4, 2, torch.float32, 0.0)
    source, stays, shown, target = (each[:, :entries] for each in case.rows)
    still = Case((torch.full_like(source, ANYWHERE), torch.zeros_like(stays), shown, target), case.pools)
    check(still, rewrite)
    for wanted, found in zip(case.pools, still.expected(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_the_operator_is_registered_rightly() -> None:
    case = rewrite_case(1, 3, 9, 4, 2, torch.float32, 0.5)
    check_operator(rewrite, (*case.rows, *case.copied()))


def test_a_caller_never_waits_for_the_device() -> None:
    case = rewrite_case(1, 3, 9, 4, 2, torch.float32, 0.5)
    after = case.copied()
    with NoSync():  # type: ignore[no-untyped-call]  # torch does not annotate it
        rewrite(*case.rows, *after)
    assert torch.equal(after[2], case.expected()[2])
