"""The kernels of `open_slots` and `append` against a loop over rows and heads, and the plain forms."""

from __future__ import annotations

import pytest
import torch

from hardkv_kernels.append import append, launch_append, launch_open_slots, open_slots
from tests.test_append import DTYPES, check_opening, check_writing, opening, writing

pytestmark = pytest.mark.interp


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("rows", "layers", "heads", "slots", "width"),
    [(1, 1, 1, 1, 1), (7, 3, 2, 16, 4), (4, 36, 8, 16, 3), (3, 5, 3, 6, 5)],
)
def test_slots_open(rows: int, layers: int, heads: int, slots: int, width: int, ring: bool) -> None:
    case = opening(rows, rows, layers, heads, slots, width, ring)
    check_opening(case, launch_open_slots)
    ours, reference = case.arguments(), case.arguments()
    found, wanted = launch_open_slots(*ours), open_slots(*reference)
    for one, other in zip((*found, *ours), (*wanted, *reference), strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "group", "slots", "head_dim"),
    [(1, 1, 1, 1, 16), (7, 3, 3, 16, 64), (5, 2, 7, 4, 80), (3, 8, 4, 16, 128), (4, 2, 16, 3, 256)],
)
def test_new_tokens_are_written(
    dtype: torch.dtype, rows: int, heads: int, group: int, slots: int, head_dim: int, ring: bool
) -> None:
    case = writing(rows, rows, heads, group, slots, head_dim, dtype, ring)
    check_writing(case, launch_append)
    ours, reference = case.arguments(), case.arguments()
    launch_append(*ours)
    append(*reference)
    for one, other in zip(ours, reference, strict=True):
        assert one is other is None or torch.equal(one.nan_to_num(99.0), other.nan_to_num(99.0))
