"""What budgets share in which a token claims as much as its best row gives it."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv.interfaces import Budget


class BestRowBudget(Budget):
    """Rows don't vote; a token's value is the largest that any of them gives."""

    def claim(self, probabilities: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        value = probabilities.amax(2)
        return value, torch.zeros_like(value, dtype=torch.int32)
