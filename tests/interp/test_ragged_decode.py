"""The kernels of `ragged_decode` against a float64 loop and the plain form."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from hardkv_kernels.ragged_decode import launch_ragged_decode, ragged_decode
from tests.test_ragged_decode import DTYPES, Case, check, decode_case, rounding_of

pytestmark = pytest.mark.interp

NAN = float("nan")


def check_kernel(case: Case, with_logits: bool = False) -> None:
    out, lse = check(case, launch_ragged_decode, with_logits, 2.0**-20)
    # The plain form multiplies what nobody reads by zero, so it gets a pool without NaN.
    clean = replace(case, keys=case.keys.nan_to_num(3.0), values=case.values.nan_to_num(3.0))
    expected_out, expected_lse, _ = ragged_decode(*clean.arguments(None))
    rounding = rounding_of(case.query.dtype)
    torch.testing.assert_close(out.float(), expected_out.float(), rtol=0.0, atol=12 * rounding)
    torch.testing.assert_close(lse, expected_lse, rtol=0.0, atol=8 * rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [4, 16, 32])
def test_ragged_shuffled_dirty_pages(dtype: torch.dtype, slots: int) -> None:
    pages = 64 // slots
    counts = [[1, 5 * pages, 0], [pages, 0, 2 * pages + 1]]
    check_kernel(decode_case(1, counts, 4, 16, slots, dtype, padded_rows=1, dirt=NAN), with_logits=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_dims(dtype: torch.dtype, dim: int) -> None:
    check_kernel(decode_case(2, [[2, 5], [4, 1]], 4, dim, 16, dtype, dirt=NAN))


@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_with_softcap_and_sinks(dtype: torch.dtype, group: int) -> None:
    case = decode_case(3, [[7, 0], [2, 9]], group, 32, 16, dtype, 2.0, True, padded_rows=1, dirt=NAN)
    check_kernel(case, with_logits=True)


@pytest.mark.parametrize("slots", [1, 3, 24])
def test_pages_of_any_size(slots: int) -> None:
    check_kernel(decode_case(4, [[9, 17]], 2, 16, slots, dirt=NAN), with_logits=True)


def test_fewer_pages_than_programs() -> None:
    check_kernel(decode_case(5, [[1, 0, 1]], 2, 16, 16, dirt=NAN))


def test_no_pages_at_all() -> None:
    check_kernel(decode_case(6, [[0, 0]], 2, 16, 16, sinks=True, padded_rows=1))
    check_kernel(decode_case(6, [[0]], 2, 16, 16))


def test_many_owners_in_one_share() -> None:
    counts = [[0, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 2], [0, 0, 0]]
    check_kernel(decode_case(7, counts, 2, 16, 4, dirt=NAN), with_logits=True)


def test_one_owner_for_all_programs() -> None:
    check_kernel(decode_case(8, [[40]], 2, 16, 16, dirt=NAN))


def test_everything_dropped() -> None:
    check_kernel(decode_case(9, [[3, 2]], 2, 16, 16, dropped=1.0, dirt=NAN), with_logits=True)
    check_kernel(decode_case(9, [[3, 2]], 2, 16, 16, dropped=1.0, sinks=True, dirt=NAN))


def test_huge_logits() -> None:
    case = decode_case(10, [[9, 2]], 2, 16, 16, dirt=NAN)
    case = replace(case, query=case.query * 300.0)
    out, lse, _ = launch_ragged_decode(*case.arguments(None))
    expected_out, expected_lse, _ = case.expected()
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-3)


def test_the_grid_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module("hardkv_kernels.ragged_decode")
    case = decode_case(11, [[9, 2, 13]], 2, 16, 16, dirt=NAN)
    for programs in (1, 2, 40):
        monkeypatch.setattr(module, "programs_for", lambda device, each, programs=programs: programs)
        check_kernel(case, with_logits=True)


def test_probabilities_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="give `logits` and call `score_update`"):
        launch_ragged_decode(*decode_case(12, [[1]], 2, 16, 16).arguments(None, True))
