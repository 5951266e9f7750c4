"""Scorer `attention`: what each recent query paid to each token."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from hardkv.interfaces import ImportanceScorer, Options, Space
from hardkv.types import ScoreView


class Attention(ImportanceScorer):
    """Raw attention of every window row, reduced over the query group.

    `s[i, j] = mean_a A[a, i, j]` or `max_a A[a, i, j]`, with `A[a, i, j] = softmax_j(q[a, i] . k[j] / sqrt D)`, causal.
    R = W: every row keeps its own scores, so that a budget can let each row vote. Slots newer than a row score 0 in it.

    Source: HARD-KV (arXiv 2606.28831), raw attention as the reference of calibration.
    """

    name: ClassVar[str] = "attention"
    space: ClassVar[Space] = "probability"

    class Config(Options):
        """Options of `attention`."""

        reduce: Literal["mean", "max"] = Field(
            default="mean",
            description="How the query heads of one KV head are combined; the mean of a row still sums to 1.",
        )

    config: Config

    @property
    def needs_queries(self) -> bool:
        """Always true: this scorer looks back at the query window."""
        return True

    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, W, N]`; zero at invalid slots and in rows never written."""
        if self.config.reduce == "max":
            return view.attention.amax(2)
        return view.attention.mean(2)
