"""Scorer `scissorhands`: how many recent queries found a token worth at least the average."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hardkv.interfaces import ImportanceScorer, Options, Space
from hardkv.policies.scorers.window_rows import newest_rows
from hardkv.types import ScoreView

# Of a row whose logits are all equal, rounding leaves some below the average; they are not meant.
_ROUNDING = 1e-5


class Scissorhands(ImportanceScorer):
    """Count of query rows that did not pass a token over.

    Row i passes token j over if it sees j and `A[a, i, j] < 1 / n_i`, `n_i` the tokens that it sees.
    `s_j = mean_a (rows in the history - rows that passed j over)`: 0 to the number of rows, ties by recency. A token
    newer than a row can't be passed over by it. Learned sinks take part of A, not of `1 / n_i`. R = 1.

    Source: Scissorhands (arXiv 2305.17118, algorithm 2). The paper counts the rows that passed a token over and drops
    those with the most, which is the same order; it keeps the newest tokens by a window of its own, here
    `cache.local_window`.
    """

    name: ClassVar[str] = "scissorhands"
    space: ClassVar[Space] = "unbounded"

    class Config(Options):
        """Options of `scissorhands`."""

        history: int | None = Field(
            default=None,
            ge=1,
            description="Newest query rows that count; null takes the whole window: more rows, fewer ties.",
        )

    config: Config

    @property
    def needs_queries(self) -> bool:
        """Always true: this scorer looks back at the query window."""
        return True

    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero at invalid slots."""
        history = newest_rows(view, self.config.history)  # [B, W]
        seen = view.visible & history[:, None, :, None]  # [B, H, W, N]
        tokens = view.visible.sum(-1, keepdim=True)  # [B, H, W, 1]
        attention = view.attention
        passed = torch.zeros(view.valid.shape, device=view.valid.device)
        for head in range(attention.shape[2]):
            below = attention[:, :, head] * tokens < 1.0 - _ROUNDING
            passed += (below & seen).sum(-2)
        scores = history.sum(-1)[:, None, None] - passed / attention.shape[2]
        return scores.masked_fill(~view.valid, 0.0)[:, :, None]
