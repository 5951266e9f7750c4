"""The online statistic in plain torch, against a float64 loop over pages."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hardkv_kernels.score_update import score_update
from tests.operators import check_operator

FIRST_OWNER = 5
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """The logits of one decode step over a pool of pages, of which others own some."""

    statistic: Tensor
    logits: Tensor
    page_owner: Tensor
    lse: Tensor
    pages: tuple[int, int]

    def arguments(self, statistic: Tensor, *options: Any) -> tuple[Any, ...]:
        return (statistic, self.logits, self.page_owner, self.lse, FIRST_OWNER, *self.pages, *options)

    def expected(self, reduction: str, power: float, decay: float, floor: float) -> Tensor:
        """`[n, S]` float64, page by page."""
        statistic = self.statistic.double()
        for page in range(*self.pages):
            owner = int(self.page_owner[page]) - FIRST_OWNER
            if not 0 <= owner < self.lse.shape[0]:
                continue
            lse = self.lse[owner].double()[:, None]
            p = torch.exp(self.logits[page].double() - lse)
            p = p.masked_fill(torch.isneginf(lse), 0.0).clamp_min(floor)
            if reduction == "power":
                statistic[page] = decay * statistic[page] + (p**power).mean(0)
            else:
                statistic[page] = torch.maximum(statistic[page], p.amax(0))
        return statistic


def update_case(seed: int, n: int, owners: int, group: int, slots: int, pages: tuple[int, int]) -> Case:
    """Shuffled owners, dropped slots, one owner that saw nothing, and NaN in the logits of others."""
    generator = torch.Generator().manual_seed(seed)
    page_owner = FIRST_OWNER + torch.randint(-2, owners + 2, (n,), generator=generator)
    logits = 6.0 * torch.randn(n, group, slots, generator=generator)
    logits.masked_fill_((torch.rand(n, slots, generator=generator) < 0.3)[:, None], float("-inf"))
    lse = 10.0 + torch.rand(owners, group, generator=generator)
    lse[-1] = float("-inf")
    logits[(page_owner < FIRST_OWNER) | (page_owner >= FIRST_OWNER + owners)] = NAN
    statistic = torch.rand(n, slots, generator=generator)
    return Case(statistic, logits, page_owner, lse, pages)


def check(case: Case, update: Any, *options: Any) -> Tensor:
    """Update once and compare; what others own stays as it was, bit for bit."""
    statistic = case.statistic.clone()
    update(*case.arguments(statistic, *options))
    # The exponent reaches 4 * 40, each term of it off by an eps.
    torch.testing.assert_close(statistic.double(), case.expected(*options), rtol=1e-4, atol=1e-25)
    owner = case.page_owner - FIRST_OWNER
    index = torch.arange(len(owner))
    others = (owner < 0) | (owner >= case.lse.shape[0]) | (index < case.pages[0]) | (index >= case.pages[1])
    assert torch.equal(statistic[others], case.statistic[others])
    return statistic


@given(
    seed=st.integers(0, 1000),
    owners=st.integers(1, 4),
    group=st.integers(1, 5),
    slots=st.sampled_from([1, 4, 16]),
    pages=st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda pair: (min(pair), max(pair))),
    reduction=st.sampled_from(["power", "max"]),
    power=st.sampled_from([1.0, 2.5, 4.0]),
    floor=st.sampled_from([0.0, 1e-30, 1e-8, 0.01]),
)
def test_equals_a_loop_over_pages(
    seed: int,
    owners: int,
    group: int,
    slots: int,
    pages: tuple[int, int],
    reduction: str,
    power: float,
    floor: float,
) -> None:
    check(update_case(seed, 12, owners, group, slots, pages), score_update, reduction, power, 0.98, floor)


@pytest.mark.parametrize("reduction", ["power", "max"])
def test_what_no_query_sees_stays_exactly_zero(reduction: str) -> None:
    case = update_case(1, 6, 2, 3, 4, (0, 6))
    case.statistic.zero_()
    case.logits.fill_(-80.0)
    assert not check(case, score_update, reduction, 1.0, 0.98, 0.0).any()


def test_steps_add_up_with_decay() -> None:
    case = update_case(2, 1, 1, 2, 4, (0, 1))
    case.page_owner.fill_(FIRST_OWNER)
    case.lse.zero_()
    case.logits.fill_(math.log(0.5))
    case.statistic.zero_()
    for _ in range(3):
        score_update(*case.arguments(case.statistic, "power", 2.0, 0.5, 0.0))
    torch.testing.assert_close(case.statistic, torch.full((1, 4), 0.25 * (1.0 + 0.5 + 0.25)))


@pytest.mark.parametrize("reduction", ["power", "max"])
def test_the_operator_is_well_formed(reduction: str) -> None:
    case = update_case(3, 9, 3, 2, 4, (1, 8))
    case.logits.nan_to_num_(1.0)
    check_operator(score_update, case.arguments(case.statistic, reduction, 4.0, 0.98, 1e-8))


@pytest.mark.parametrize("reduction", ["power", "max"])
def test_the_plain_form_needs_no_values_of_tensors(reduction: str) -> None:
    module = importlib.import_module("hardkv_kernels.score_update")
    case = update_case(4, 9, 3, 2, 4, (1, 8))
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        arguments = case.arguments(case.statistic, reduction, 4.0, 0.98, 1e-8)
        fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        assert module.score_update._init_fn(*fake) is None
