"""Budgets pooled within a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv.interfaces import Budget
from hardkv.policies.budgets.target import FlooredTargetOptions, threshold_counts
from hardkv.types import Claims, Limits


class Ada(Budget):
    """Heads of a layer compete for its tokens, each with a guaranteed share (Ada-KV, arXiv 2407.11550, algorithm 1)."""

    name = "ada"

    class Config(FlooredTargetOptions):
        """Options."""

    config: Config

    def claim(self, probabilities: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        value = probabilities.amax(2)
        return value, torch.zeros_like(value, dtype=torch.int32)

    def counts(self, claims: Claims, limits: Limits) -> Tensor:
        target = self.config.target_tokens(limits.seen_tokens)
        return threshold_counts(claims, target, self.config.floor_share, limits, per_layer=True)

    def target_tokens(self, seen_tokens: int) -> int | None:
        return self.config.target_tokens(seen_tokens)
