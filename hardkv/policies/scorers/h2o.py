"""Scorer `h2o`: attention added up over every query of a round."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hardkv.interfaces import OnlineScorer, Options, Space
from hardkv.types import FusedUpdate, ScoreView


class H2O(OnlineScorer):
    """Heavy hitters: the attention a token gathered, mean over the query group, added over queries.

    Each step: `x_j <- x_j + mean_a p[a, j]`; `s_j = x_j`. The paper adds since a token entered; the runtime resets the
    statistic at each round, so here the sum runs over the round alone (and the prompt rows that seed it).
    `age_normalised` divides by the queries that could see the token in this round, `min(U, newest - position_j + 1)`.
    The count U is read off the statistic itself: every query adds attention 1 in all. Where part of the attention goes
    elsewhere (learned sinks, condensed slots) U comes out smaller, by the same factor for every older token.

    Source: H2O (arXiv 2306.14048, section 4); the normalisation is ours.
    """

    name: ClassVar[str] = "h2o"
    space: ClassVar[Space] = "unbounded"

    class Config(Options):
        """Options of `h2o`."""

        age_normalised: bool = Field(
            default=False, description="Divide by the queries that saw the token; the plain sum favours older ones."
        )

    config: Config

    @property
    def fused(self) -> FusedUpdate:
        """The update as a sum."""
        return FusedUpdate("power", decay=1.0)

    def update(self, statistic: Tensor, probabilities: Tensor) -> None:
        """Fold `probabilities [..., G, N]` into `statistic [..., N]`."""
        statistic.add_(probabilities.mean(-2))

    def finish(self, statistic: Tensor, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero at invalid slots."""
        scores = statistic.masked_fill(~view.valid, 0.0)
        if self.config.age_normalised:
            scores = scores / _queries_since_entry(scores, view)
        return scores[:, :, None]


def _queries_since_entry(gathered: Tensor, view: ScoreView) -> Tensor:
    """Queries of this round that could see each token, `[B, H, N]`, at least 1."""
    queries = gathered.sum(-1, keepdim=True).round()  # [B, H, 1]
    newest = view.positions.masked_fill(~view.valid, -1).amax(-1, keepdim=True)
    age = (newest - view.positions + 1).masked_fill(~view.valid, 1).float()
    return torch.minimum(age, queries).clamp_min(1.0)
