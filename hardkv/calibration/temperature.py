"""Calibrator `temperature`: one temperature per head, by bisection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hardkv.calibration.ranking import normalise_reference, rank_match
from hardkv.interfaces import Calibrator, Options

# Bracket of log(T / spread of the scores): from sharper than any float32 gap to flatter than any score can show.
_SHARPEST, _FLATTEST = -25.0, 12.0
# A row is infeasible when ties at the top keep its mass further than this below the target at every temperature.
_MASS_TOLERANCE = 1e-3


class Temperature(Calibrator):
    """Softmax at the temperature where the k best hold as much mass as the k largest of raw attention.

    `k` = tokens that top-p selects from the raw row, `M_k` = mass of the k largest; T solves
    `M_k(softmax(s / T)) = M_k(raw)`. `M_k` falls as T grows, so `steps` bisections of log T find it, for all heads at
    once and without a host sync. One T per head: the one where the masses of all rows add up to the sum of their
    targets. It is solved at the first compression, kept in `state["temperature"]` `[B, H, 1]` and reused.
    Infeasible rows (pooling tied more maxima than k) fall back to rank matching and have no say in T; a head with none
    but such rows stores 0 and stays with rank matching. A row whose reference is all zero comes out all zero.

    Source: HARD-KV (arXiv 2606.28831), which descends a gradient; the condition is the same.
    """

    name: ClassVar[str] = "temperature"

    class Config(Options):
        """Options of `temperature`."""

        p: float = Field(default=0.9, gt=0.0, lt=1.0, description="Share of raw attention that defines k; the paper's.")
        steps: int = Field(default=40, ge=8, le=100, description="Bisections of log T; 40 exhaust float32.")
        per_row: bool = Field(
            default=False, description="Solve each row for itself at every compression, and keep no temperature."
        )

    config: Config

    def calibrate(self, scores: Tensor, reference: Tensor | None, valid: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Give probabilities `[B, H, R, N]`; the first call writes `state["temperature"]`."""
        raw = normalise_reference(reference, valid)
        gaps = _gaps_below_best(scores, valid)
        problem = _pose(gaps, raw, valid, self.config.p)
        if self.config.per_row:
            temperature = _solve(problem, problem.feasible[..., None], self.config.steps)
        else:
            if "temperature" not in state:
                state["temperature"] = _solve(problem, problem.feasible[..., None, :], self.config.steps)
            temperature = state["temperature"]
        solved = problem.feasible & (temperature > 0.0)  # [B, H, R]
        divisor = torch.where(temperature > 0.0, temperature, 1.0)[..., None]
        softened = torch.softmax(gaps / divisor, -1)
        return torch.where(solved[..., None], softened, rank_match(scores, raw, valid))


@dataclass(frozen=True)
class _Problem:
    """What bisection works on; slots sorted from best to worst."""

    gaps: Tensor  # [B, H, R, N], score minus the row's best, -inf in padding
    in_top: Tensor  # [B, H, R, N] bool, the k best
    target: Tensor  # [B, H, R], raw mass of the k largest
    spread: Tensor  # [B, H, R], best minus worst score
    feasible: Tensor  # [B, H, R] bool, written and solvable


def _gaps_below_best(scores: Tensor, valid: Tensor) -> Tensor:
    """Score minus the best of the row, `[B, H, R, N]`: finite and at most 0, -inf off `valid`."""
    masked = scores.float().masked_fill(~valid[:, :, None], float("-inf"))
    gaps = (masked - masked.amax(-1, keepdim=True)).clamp_min(torch.finfo(torch.float32).min)
    return gaps.masked_fill(~valid[:, :, None], float("-inf"))


def _pose(gaps: Tensor, raw: Tensor, valid: Tensor, p: float) -> _Problem:
    mass = raw.sort(dim=-1, descending=True).values.cumsum(-1)
    count = torch.minimum((mass < p).sum(-1) + 1, valid.sum(-1)[:, :, None])  # [B, H, R], k
    target = mass.gather(-1, (count - 1).clamp_min(0)[..., None])[..., 0]
    tied = (gaps == 0.0).sum(-1)
    reachable = count / torch.maximum(tied, count).clamp_min(1)
    rank = torch.arange(gaps.shape[-1], device=gaps.device)
    spread = gaps.masked_fill(~valid[:, :, None], 0.0).amin(-1).neg()
    return _Problem(
        gaps=gaps.sort(dim=-1, descending=True).values,
        in_top=rank < count[..., None],
        target=target,
        spread=spread,
        feasible=(mass[..., -1] > 0.0) & (target <= reachable + _MASS_TOLERANCE),
    )


def _solve(problem: _Problem, voices: Tensor, steps: int) -> Tensor:
    """Temperatures that bring the rows of each unknown to their summed target; 0 where no row is feasible.

    `voices` are the feasible rows: `[B, H, R, 1]` gives each row an unknown of its own, `[B, H, 1, R]` one to the head.
    The result is `[B, H, R]` or `[B, H, 1]`.
    """
    shape = voices.shape[:-1]
    spread = torch.where(voices, problem.spread.view(voices.shape), 0.0).amax(-1)
    spread = torch.where(spread > 0.0, spread, 1.0)
    relative = problem.gaps / spread[..., None]
    low = torch.full(shape, _SHARPEST, device=relative.device)
    high = torch.full(shape, _FLATTEST, device=relative.device)
    for _ in range(steps):
        middle = (low + high) / 2
        weights = torch.exp(relative / torch.exp(middle)[..., None])
        mass = torch.where(problem.in_top, weights, 0.0).sum(-1) / weights.sum(-1)  # [B, H, R]
        excess = torch.where(voices, (mass - problem.target).view(voices.shape), 0.0).sum(-1)
        low, high = torch.where(excess > 0.0, middle, low), torch.where(excess > 0.0, high, middle)
    limits = torch.finfo(torch.float32)
    temperature = (torch.exp((low + high) / 2) * spread).clamp(limits.tiny, limits.max)
    return torch.where(voices.any(-1), temperature, 0.0)
