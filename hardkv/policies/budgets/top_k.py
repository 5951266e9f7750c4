"""The same number of tokens for every head."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hardkv.interfaces import Budget
from hardkv.policies.budgets.target import TargetOptions
from hardkv.types import Claims, Limits


class TopK(Budget):
    """Every head keeps its `mean_tokens` best: the uniform budget of SnapKV, R-KV, H2O and most others."""

    name = "top_k"
    needs_probabilities: ClassVar[bool] = False

    class Config(TargetOptions):
        """Options."""

    config: Config

    def claim(self, probabilities: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        value = probabilities.amax(2)
        return value, torch.zeros_like(value, dtype=torch.int32)

    def counts(self, claims: Claims, limits: Limits) -> Tensor:
        target = self.config.target_tokens(limits.seen_tokens)
        protected = (claims.protected & claims.valid).sum(-1)
        wanted = torch.full_like(protected, min(target, limits.upper))
        return torch.minimum(torch.maximum(wanted, protected), claims.resident)

    def target_tokens(self, seen_tokens: int) -> int | None:
        return self.config.target_tokens(seen_tokens)
