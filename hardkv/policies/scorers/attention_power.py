"""Scorer `attention_power`: what a token's attention over a round says of attention to come, times what it adds."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hardkv.interfaces import OnlineScorer, Options, Space
from hardkv.policies.scorers.values import value_distance
from hardkv.types import FusedUpdate, ScoreView

# p ** power stays above this, well clear of float32 denormals (below 1.2e-38), which are slow on CPUs.
_SMALLEST_POWER = 1e-36
_UNREAD = 1e-4
"""Added to attention before its logarithm: what a token that nobody reads counts as, and one that was let go."""


class AttentionPower(OnlineScorer):
    """Forecast from the attention of a round, weighted by how far a value stands from the mean value.

    Each step: `x_j <- decay * x_j + mean_a p[a, j] ** power`. At the round, with `y_j = x_j ** (1 / power)`:
    `z_j = max_d y_{j - d} w_d`, where `j - d` is the slot `d` positions before, `w_0 = 1` and
    `w_d = lend * (1 - (d - 1) / reach)` for d from 1 to `reach`;
    `f_j = (z_j + e) ** own_weight * exp(head_weight * m) * exp(-key_weight * |k_j| / mean |k|)`, with e = 1e-4 and m
    the mean of `log(z + e)` over all tokens the head has seen, those let go counting as `log e`;
    `s_j = f_j * |v_j - mean v| / r_l ** layer_weight`. Norms are over D, means over the head's valid slots.
    A high power comes close to the maximum over queries, but lets repeated use count.
    A token lends to those that follow it because heads that copy read it first and them next: queries to come.
    A head that reads widely will read tokens that it has not read yet, so its tokens count more than their own
    attention says; a long key is a reason for attention that has little to do with what queries ask for.
    A prompt's queries are all at hand, so they are read as two groups, the newest `recent_rows` and those before up to
    `prompt_rows`, without decay: `log(x_j + e)` is the weighted mean of the two groups' `log(z_j + e)`. What is read in
    both is worth more than what one group reads twice as much.
    `r_l` is the layer's place, from 1 for the lowest layer: what higher layers add falls into a larger residual stream.
    `p` is clamped from below (1e-8 at power 4).

    Ours. The weights are rounded from a least-squares fit of log f to the attention that later queries paid
    (SmolLM2-135M, docs/benchmarks.md); 1, 0, 0 takes the attention of the round as it is.
    """

    name: ClassVar[str] = "attention_power"
    space: ClassVar[Space] = "probability"

    class Config(Options):
        """Options of `attention_power`."""

        power: float = Field(
            default=4.0,
            ge=1.0,
            le=16.0,
            description="Exponent of each probability: 1 adds them up, large values approach the maximum.",
        )
        decay: float = Field(
            default=0.98,
            gt=0.0,
            le=1.0,
            description="Weight of the past per decode step; 0.98 lets the newest 50 queries dominate.",
        )
        value_weight: bool = Field(
            default=True,
            description="Multiply by |v - mean v|: a token whose value is the mean changes no output.",
        )
        reach: int = Field(
            default=8,
            ge=0,
            le=64,
            description="Positions after a token that it lends its attention to: words and numbers are read in order;"
            " 0 lends to none.",
        )
        lend: float = Field(
            default=0.2, ge=0.0, le=1.0, description="Share of its attention that a token lends to the next one."
        )
        own_weight: float = Field(
            default=0.8,
            gt=0.0,
            le=4.0,
            description="Power of a token's own attention in the forecast; below 1 it says less than it seems to.",
        )
        head_weight: float = Field(
            default=1.0,
            ge=0.0,
            le=4.0,
            description="Weight of the head's mean logarithm of attention: more gives heads that read widely more.",
        )
        key_weight: float = Field(
            default=1.2,
            ge=0.0,
            le=8.0,
            description="Weight of a key's length, as a share of the head's mean, against a token.",
        )
        prompt_rows: int = Field(
            default=256, ge=1, le=4096, description="Newest queries of a prompt that say what its tokens are worth."
        )
        recent_rows: int = Field(
            default=64, ge=1, le=4096, description="The newest of them, which are read apart from those before."
        )
        past_weight: float = Field(
            default=0.33,
            ge=0.0,
            lt=1.0,
            description="Weight of those before; 0 reads the last cache.query_rows queries as decode steps instead.",
        )
        layer_weight: float = Field(
            default=0.5,
            ge=0.0,
            le=2.0,
            description="Power of the layer's place that divides its scores; 0 treats all layers alike.",
        )

    config: Config

    @property
    def fused(self) -> FusedUpdate:
        """The update as a decayed power sum."""
        return FusedUpdate("power", self.config.power, self.config.decay, self._floor)

    def update(self, statistic: Tensor, probabilities: Tensor) -> None:
        """Fold `probabilities [..., G, N]` (overwritten) into `statistic [..., N]`."""
        powers = self._power(probabilities.clamp_(min=self._floor))
        # The sum goes over G slice by slice: a reduction over a middle axis is several times slower on a CPU.
        summed = reduce(torch.add, powers.unbind(-2))
        statistic.mul_(self.config.decay).add_(summed, alpha=1.0 / powers.shape[-2])

    @property
    def prompt_rows(self) -> int | None:
        """Follows the option."""
        return self.config.prompt_rows if self.config.past_weight else None

    def read_prompt(self, view: ScoreView) -> Tensor | None:
        """Give the statistic `[B, H, N]`: a weighted mean, in logarithms, of what newer and older queries read."""
        past = self.config.past_weight
        if not past:
            return None
        assert view.queries is not None
        rows, recent = view.queries.shape[3], self.config.recent_rows
        logs = self._log_read(view, slice(max(rows - recent, 0), rows))
        if rows > recent:
            logs = (1.0 - past) * logs + past * self._log_read(view, slice(0, rows - recent))
        return (logs.exp() - _UNREAD).clamp_min_(0.0).pow_(self.config.power)

    def _log_read(self, view: ScoreView, rows: slice) -> Tensor:
        """Logarithm of the attention, own or lent, that some rows of a view pay, `[B, H, N]`."""
        assert view.queries is not None
        assert view.query_positions is not None
        part = replace(view, queries=view.queries[:, :, :, rows], query_positions=view.query_positions[:, rows])
        gathered = part.folded(replace(self.fused, decay=1.0))
        return (self._lent(gathered.pow_(1.0 / self.config.power), view) + _UNREAD).log_()

    def finish(self, statistic: Tensor, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero at invalid slots."""
        scores = self._forecast(
            self._lent(statistic.masked_fill(~view.valid, 0.0).pow(1.0 / self.config.power), view), view
        )
        if self.config.value_weight:
            scores = scores * value_distance(view)
        if len(view.layers) == 1:  # it stands for all rows
            return (scores / self._divisor(view.layers[0]))[:, :, None]
        return torch.stack([row / self._divisor(layer) for row, layer in zip(scores, view.layers, strict=True)])[
            :, :, None
        ]

    def _divisor(self, layer: int) -> float:
        return float((layer + 1) ** self.config.layer_weight)

    def _lent(self, scores: Tensor, view: ScoreView) -> Tensor:
        """The larger of a token's own score and what those before it lend, `[B, H, N]`; `scores` is 0 where invalid."""
        reach, lend = self.config.reach, self.config.lend
        found = scores.clone()
        if not (reach and lend):
            return found
        step = lend / reach
        for slots in range(1, min(reach, scores.shape[-1] - 1) + 1):
            # Valid slots are in position order, with gaps: it is the positions that count. Beyond reach the share is
            # negative, and changes nothing.
            share = (view.positions[..., :-slots] - view.positions[..., slots:]).float().mul_(step).add_(lend + step)
            torch.maximum(found[..., slots:], share.mul_(scores[..., :-slots]), out=found[..., slots:])
        return found.masked_fill_(~view.valid, 0.0)

    def _forecast(self, scores: Tensor, view: ScoreView) -> Tensor:
        """What the attention `scores [B, H, N]` of the round lets expect, zero at invalid slots."""
        config, valid = self.config, view.valid
        logs = (scores + _UNREAD).log_()
        count = valid.sum(-1, keepdim=True).clamp_min(1)
        forecast = config.own_weight * logs
        if config.head_weight:
            seen = view.positions.masked_fill(~valid, 0).amax(-1, keepdim=True) + 1
            total = (logs - math.log(_UNREAD)).masked_fill_(~valid, 0.0).sum(-1, keepdim=True)
            forecast += config.head_weight * (total / torch.maximum(seen, count) + math.log(_UNREAD))
        if config.key_weight:
            lengths = torch.linalg.vector_norm(view.keys, dim=-1, dtype=torch.float32).masked_fill_(~valid, 0.0)
            mean = lengths.sum(-1, keepdim=True) / count
            forecast -= config.key_weight * lengths / mean.clamp_min(torch.finfo(torch.float32).tiny)
        return forecast.exp_().masked_fill_(~valid, 0.0)

    @property
    def _floor(self) -> float:
        return float(max(1e-8, _SMALLEST_POWER ** (1.0 / self.config.power)))

    def _power(self, probabilities: Tensor) -> Tensor:
        # Two squarings are far cheaper than a general power on a CPU.
        if self.config.power == 4.0:
            return probabilities.square_().square_()
        return probabilities.pow_(self.config.power)
