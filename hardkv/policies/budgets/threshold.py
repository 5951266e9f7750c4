"""One threshold for the whole model, solved to meet a mean budget."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from hardkv.interfaces import Budget
from hardkv.policies.budgets.target import FlooredTargetOptions, threshold_counts
from hardkv.types import Claims, Limits


class Threshold(Budget):
    """Keep what any row gives a probability of at least tau; one tau meets the mean over all layers and heads. Ours."""

    name = "threshold"
    scope: ClassVar[Literal["layer", "model"]] = "model"

    class Config(FlooredTargetOptions):
        """Options."""

    config: Config

    def claim(self, probabilities: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        value = probabilities.amax(2)
        return value, torch.zeros_like(value, dtype=torch.int32)

    def counts(self, claims: Claims, limits: Limits) -> Tensor:
        target = self.config.target_tokens(limits.seen_tokens)
        return threshold_counts(claims, target, self.config.floor_share, limits, per_layer=False)

    def target_tokens(self, seen_tokens: int) -> int | None:
        return self.config.target_tokens(seen_tokens)
