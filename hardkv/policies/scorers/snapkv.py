"""Scorer `snapkv`: attention of the newest queries, pooled along the sequence."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from hardkv.interfaces import ImportanceScorer, Options, Space
from hardkv.policies.scorers.window_rows import newest_rows
from hardkv.types import ScoreView

# Attention below this counts as this where a logarithm is taken, so that every score is finite.
SMALLEST_PROBABILITY = 1e-30


class SnapKV(ImportanceScorer):
    """Attention of the newest queries, max-pooled along position-ordered slots so that neighbours stay together.

    `probability` (the original): `s_j = max_{|j' - j| <= kernel // 2} mean_{a, i} A[a, i, j']` over the newest `rows`
    written rows; R = 1. `logit` (HARD-KV's): each row pools its own logits,
    `s[i, j] = max_{|j' - j| <= kernel // 2} log mean_a A[a, i, j']`, which for one query head are the logits up to a
    constant of the row; R = W. A row's slots that it can't see neither lend nor borrow: they keep the lowest score.
    Pooling copies spikes, so neither form is a probability: calibrate before a budget that adds up mass.

    Source: SnapKV (arXiv 2404.14469, listing 1); HARD-KV (arXiv 2606.28831) for `logit`.
    """

    name: ClassVar[str] = "snapkv"
    space: ClassVar[Space] = "unbounded"

    class Config(Options):
        """Options of `snapkv`."""

        kernel: int = Field(default=7, ge=1, description="Slots pooled around each slot, odd; 7 as in the paper.")
        pool: Literal["probability", "logit"] = Field(
            default="probability", description="Average over rows, then pool; or pool the logits of each row."
        )
        rows: int | None = Field(
            default=32,
            ge=1,
            description="Newest query rows averaged by `probability`, 32 as in the paper; null takes all.",
        )

        @field_validator("kernel")
        @classmethod
        def _odd(cls, kernel: int) -> int:
            return require_odd(kernel)

    config: Config

    @property
    def needs_queries(self) -> bool:
        """Always true: this scorer looks back at the query window."""
        return True

    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]` (`probability`) or `[B, H, W, N]` (`logit`)."""
        if self.config.pool == "probability":
            return pool_slots(mean_attention(view, self.config.rows), view.valid[:, :, None], self.config.kernel)
        rows = view.attention.mean(2).clamp_(min=SMALLEST_PROBABILITY).log_()  # [B, H, W, N]
        rows = pool_slots(rows, view.valid[:, :, None], self.config.kernel)
        rows.masked_fill_(~view.visible & view.valid[:, :, None], math.log(SMALLEST_PROBABILITY))
        return rows.masked_fill_(~view.row_valid[:, None, :, None], 0.0)


def require_odd(kernel: int) -> int:
    """Give `kernel` back if odd; an even one would shift every score by half a slot."""
    if kernel % 2 == 0:
        raise ValueError(f"must be odd, so that pooling is centred on a slot (got {kernel}; use {kernel + 1})")
    return kernel


def mean_attention(view: ScoreView, rows: int | None) -> Tensor:
    """Mean of the attention `[B, H, 1, N]` over the group and the newest `rows` written rows (None: all written)."""
    weight = newest_rows(view, rows).float()  # [B, W]
    batch, heads, group, window, slots = view.attention.shape
    weight = weight / (weight.sum(-1, keepdim=True).clamp_min(1.0) * group)
    weight = weight[:, None, None, :].expand(batch, heads, group, window).reshape(batch, heads, 1, group * window)
    return torch.matmul(weight, view.attention.reshape(batch, heads, group * window, slots))


def pool_slots(scores: Tensor, valid: Tensor, kernel: int) -> Tensor:
    """Max-pool `scores [B, H, R, N]` along slots; those not `valid [B, H, 1, N]` lend nothing and come out as 0."""
    filled = scores.masked_fill(~valid, float("-inf")).flatten(0, 1)  # [B * H, R, N]
    pooled = torch.nn.functional.max_pool1d(filled, kernel, stride=1, padding=kernel // 2)
    return pooled.view_as(scores).masked_fill(~valid, 0.0)
