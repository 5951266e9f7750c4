"""Window scores in plain torch, against a float64 loop over rows and query heads."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hardkv_kernels.window_scores import window_scores
from tests.operators import check_operator

REDUCTIONS = ("max", "mean", "power", "votes")


@dataclass(frozen=True)
class Case:
    """A window over ragged, shuffled, dirty slots."""

    queries: Tensor
    row_positions: Tensor
    keys: Tensor
    positions: Tensor
    valid: Tensor
    scaling: float
    softcap: float | None
    sink_logits: Tensor | None

    def arguments(
        self, reduction: str, power: float, decay: float, floor: float, thresholds: Tensor | None
    ) -> tuple[Any, ...]:
        window = (self.queries, self.row_positions, self.keys, self.positions, self.valid)
        return (*window, self.scaling, self.softcap, self.sink_logits, reduction, power, decay, floor, thresholds)

    def probabilities(self) -> Tensor:
        """`[B, H, G, W, N]` float64, a literal softmax over what each row sees."""
        logits = self.scaling * torch.einsum("bhgwd,bhnd->bhgwn", self.queries.double(), self.keys.double())
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        logits = logits.masked_fill(~self.visible()[:, :, None], float("-inf"))
        if self.sink_logits is not None:
            sinks = self.sink_logits.double()[None, :, :, None, None].expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, sinks], -1)
        return torch.softmax(logits, -1).nan_to_num(0.0)[..., : self.keys.shape[2]]

    def visible(self) -> Tensor:
        """`[B, H, W, N]`."""
        return self.valid[:, :, None] & (self.positions[:, :, None] <= self.row_positions[:, None, :, None])

    def expected(self, reduction: str, power: float, decay: float, floor: float, thresholds: Tensor | None) -> Tensor:
        """`[B, H, N]` float64, row by row."""
        p, written = self.probabilities(), self.row_positions >= 0
        scores = torch.zeros(self.keys.shape[:3], dtype=torch.float64)
        rows = p.shape[3]
        for b in range(p.shape[0]):
            for w in range(rows):
                if not written[b, w]:
                    continue
                if reduction == "max":
                    scores[b] = torch.maximum(scores[b], p[b, :, :, w].amax(1))
                elif reduction == "mean":
                    scores[b] += p[b, :, :, w].mean(1) / written[b].sum()
                elif reduction == "power":
                    scores[b] += decay ** (rows - 1 - w) * (p[b, :, :, w].clamp_min(floor) ** power).mean(1)
                else:
                    assert thresholds is not None
                    reached = p[b, :, :, w].mean(1) >= thresholds[b, :, w, None].double()
                    scores[b] += reached & self.visible()[b, :, w]
        return scores.masked_fill(~self.valid, 0.0)

    def thresholds_between(self) -> Tensor:
        """Thresholds `[B, H, W]` that no group mean comes near, at the widest gap of each row."""
        ranked = torch.sort(self.probabilities().mean(2), -1).values
        gap, index = (ranked[..., 1:] - ranked[..., :-1]).max(-1)
        return (ranked.gather(-1, index[..., None])[..., 0] + gap / 2).float()


def window_case(
    seed: int,
    shape: tuple[int, int, int, int, int, int],
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    sinks: bool = False,
    dirty: bool = False,
) -> Case:
    """Positions in any order, a third of the slots and of the rows empty, one head without a slot."""
    batch, heads, group, rows, tokens, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, heads, group, rows, head_dim, generator=generator).to(dtype)
    keys = torch.randn(batch, heads, tokens, head_dim, generator=generator).to(dtype)
    positions = torch.rand(batch, heads, 2 * tokens, generator=generator).argsort(-1)[..., :tokens].contiguous()
    valid = torch.rand(batch, heads, tokens, generator=generator) < 0.7
    valid[-1, -1] = heads == 1
    row_positions = torch.sort(torch.randint(0, 2 * tokens, (batch, rows), generator=generator), -1).values
    row_positions[:, : rows // 3] = -1
    if dirty:
        keys[~valid] = float("nan")
        positions[~valid] = -1
        queries[:, :, :, : rows // 3] = float("nan")
    sink_logits = torch.randn(heads, group, generator=generator) if sinks else None
    return Case(queries, row_positions, keys, positions, valid, 2.0 * head_dim**-0.5, softcap, sink_logits)


def clean(case: Case) -> Case:
    """The same case with nothing at invalid slots and in rows never written."""
    keys = case.keys.masked_fill(~case.valid[..., None], 0.0)
    window = (case.queries.nan_to_num(0.0), case.row_positions, keys, case.positions, case.valid)
    return Case(*window, case.scaling, case.softcap, case.sink_logits)


@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(*(st.integers(1, high) for high in (2, 3, 3, 7, 40, 12))),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    reduction=st.sampled_from(REDUCTIONS),
    power=st.sampled_from([1.0, 2.5, 4.0]),
    floor=st.sampled_from([0.0, 1e-3]),
)
def test_scores_are_those_of_a_loop_over_rows(
    seed: int,
    shape: tuple[int, int, int, int, int, int],
    softcap: float | None,
    sinks: bool,
    reduction: str,
    power: float,
    floor: float,
) -> None:
    case = window_case(seed, shape, softcap=softcap, sinks=sinks)
    thresholds = (
        case.thresholds_between() if reduction == "votes" and shape[4] > 1 else torch.full(shape[:2] + shape[3:4], 0.3)
    )
    options = (reduction, power, 0.9, floor, thresholds)
    scores = window_scores(*case.arguments(*options))
    torch.testing.assert_close(scores.double(), case.expected(*options), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_lies_at_invalid_slots_does_not_matter(reduction: str, dtype: torch.dtype) -> None:
    case = window_case(3, (2, 2, 2, 6, 50, 16), dtype, dirty=True)
    options = (reduction, 4.0, 0.98, 1e-8, clean(case).thresholds_between())
    scores = window_scores(*case.arguments(*options))
    assert torch.equal(scores, window_scores(*clean(case).arguments(*options)))
    torch.testing.assert_close(scores.double(), clean(case).expected(*options), rtol=1e-4, atol=1e-7)
    assert not scores[~case.valid].any()


def test_blocks_of_rows_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("hardkv_kernels.window_scores")
    case = window_case(4, (1, 2, 2, 9, 30, 8), sinks=True)
    for reduction in REDUCTIONS:
        arguments = case.arguments(reduction, 4.0, 0.9, 1e-8, case.thresholds_between())
        whole = window_scores(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_BLOCK_ELEMENTS", 2 * 4 * 30)  # two rows
            torch.testing.assert_close(window_scores(*arguments), whole, rtol=1e-5, atol=0.0)


def test_a_window_never_written_scores_nothing() -> None:
    case = window_case(5, (1, 1, 2, 3, 10, 8))
    case.row_positions.fill_(-1)
    case.queries.fill_(float("nan"))
    for reduction in REDUCTIONS:
        scores = window_scores(*case.arguments(reduction, 4.0, 0.9, 1e-2, torch.zeros(1, 1, 3)))
        assert torch.equal(scores, torch.zeros(1, 1, 10))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_operator_contract(reduction: str) -> None:
    case = window_case(6, (2, 2, 2, 4, 12, 8), softcap=3.0, sinks=True)
    arguments = case.arguments(reduction, 4.0, 0.9, 1e-8, torch.full((2, 2, 4), 0.2))
    check_operator(window_scores, arguments)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in arguments]
        for scores in (window_scores(*fakes), window_scores._init_fn(*fakes)):
            assert tuple(scores.shape) == (2, 2, 12)
            assert scores.dtype == torch.float32
