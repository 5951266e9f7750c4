"""The budget's threshold in plain torch, against one that is searched among the values with exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hardkv_kernels.threshold_budget import threshold_budget
from tests.operators import check_operator


def arguments(
    seed: int, groups: int, heads: int, tokens: int, levels: int, fill: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Values on few levels (ties), some excluded, limits as the budgets make them, a total inside the limits."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randint(0, levels, (groups, heads, tokens), generator=generator) / levels
    scale = 10.0 ** -torch.randint(0, 12, (groups, heads, 1), generator=generator)
    value = torch.where(torch.rand(groups, heads, 1, generator=generator) < 0.5, value * scale, value)
    value = value.masked_fill(torch.rand(value.shape, generator=generator) < 0.2, -1.0)
    resident = (value >= 0).sum(-1)
    protected = torch.randint(0, 4, resident.shape, generator=generator)
    cap = torch.maximum((resident + protected).clamp(max=max(1, int(0.8 * tokens))), protected)
    floor = torch.minimum(torch.maximum(protected, torch.tensor(2)), cap)
    low, high = floor.sum(-1), cap.sum(-1)
    return value, protected, floor, cap, low + ((high - low) * fill).long()


def expected_counts(
    value: list[list[float]], protected: list[int], floor: list[int], cap: list[int], total: int
) -> list[int]:
    """The counts of one group, by trying every value as tau and by ordering each single tie."""

    def counts(reached: list[int]) -> list[int]:
        return [min(max(r + p, low), high) for r, p, low, high in zip(reached, protected, floor, cap, strict=True)]

    more = fewer = counts([0] * len(value))
    for tau in sorted({v for row in value for v in row if v >= 0}, reverse=True):
        more = counts([sum(v >= tau for v in row) for row in value])
        if sum(more) >= total:
            break
        fewer = more
    offers = [m - f for m, f in zip(more, fewer, strict=True)]
    order = sorted((Fraction(2 * r + 1, 2 * t), head) for head, t in enumerate(offers) for r in range(t))
    taken = [head for _, head in order[: total - sum(fewer)]]
    return [f + taken.count(head) for head, f in enumerate(fewer)]


def check(counts: Tensor, value: Tensor, protected: Tensor, floor: Tensor, cap: Tensor, total: Tensor) -> None:
    for group in range(value.shape[0]):
        expected = expected_counts(
            value[group].tolist(),
            protected[group].tolist(),
            floor[group].tolist(),
            cap[group].tolist(),
            int(total[group]),
        )
        assert counts[group].tolist() == expected


@given(
    seed=st.integers(0, 2**31),
    groups=st.integers(1, 3),
    heads=st.integers(1, 7),
    tokens=st.integers(1, 40),
    levels=st.sampled_from([1, 3, 1000]),
    fill=st.floats(0.0, 1.0),
)
def test_counts_are_those_of_a_search_among_the_values(
    seed: int, groups: int, heads: int, tokens: int, levels: int, fill: float
) -> None:
    args = arguments(seed, groups, heads, tokens, levels, fill)
    counts = threshold_budget(*args)
    assert counts.dtype == torch.int64
    assert torch.equal(counts.sum(-1), args[4])
    check(counts, *args)


def test_no_tau_reaches_an_excluded_token() -> None:
    value = torch.tensor([[[0.0, -1.0, -1.0, -1.0], [0.0, 0.0, 0.0, 0.0]]])
    protected = torch.tensor([[1, 0]])
    counts = threshold_budget(value, protected, protected, torch.tensor([[4, 4]]), torch.tensor([6]))
    assert counts.tolist() == [[2, 4]]


def test_ties_are_shared_in_proportion() -> None:
    value = torch.full((1, 3, 8), 0.5)
    value[0, 1, 4:] = -1.0
    none = torch.zeros(1, 3, dtype=torch.int64)
    counts = threshold_budget(value, none, none, none + 8, torch.tensor([10]))
    assert counts.tolist() == [[4, 2, 4]]


@pytest.mark.parametrize("fill", [0.0, 0.5, 1.0])
def test_operator_contract(fill: float) -> None:
    args = arguments(1, 2, 3, 9, 4, fill)
    check_operator(threshold_budget, args)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(tensor) for tensor in args]
        counts = threshold_budget(*fakes)
        assert counts.shape == (2, 3)
        plain = threshold_budget._init_fn(*fakes)
        assert plain.shape == (2, 3)
