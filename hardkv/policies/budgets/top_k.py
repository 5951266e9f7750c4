"""The same number of tokens for every head."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hardkv.policies.budgets.best_row import BestRowBudget
from hardkv.policies.budgets.target import TargetOptions
from hardkv.types import Claims, Limits


class TopK(BestRowBudget):
    """Every head keeps its `mean_tokens` best: the uniform budget of SnapKV, R-KV, H2O and most others."""

    name = "top_k"
    needs_probabilities: ClassVar[bool] = False

    class Config(TargetOptions):
        """Options."""

    config: Config

    def counts(self, claims: Claims, limits: Limits) -> Tensor:
        target = self.config.target_tokens(limits.seen_tokens)
        protected = (claims.protected & claims.valid).sum(-1)
        wanted = torch.full_like(protected, min(target, limits.upper))
        return torch.minimum(torch.maximum(wanted, protected), claims.resident)

    def target_tokens(self, seen_tokens: int) -> int | None:
        return self.config.target_tokens(seen_tokens)
