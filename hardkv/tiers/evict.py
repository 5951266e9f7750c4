"""The last tier that keeps nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv.interfaces import CacheTier
from hardkv.types import TierShape, TokenBatch


class Evict(CacheTier):
    """What a rewrite drops is gone."""

    name = "evict"

    def allocate(self, shape: TierShape) -> None:
        return None

    def admit(self, layer: int, tokens: TokenBatch) -> None:
        return None

    def attend(self, layer: int, query: Tensor, scaling: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        lse = torch.full(query.shape[:-1], float("-inf"), device=query.device)
        return torch.zeros(query.shape, dtype=torch.float32, device=query.device), lse

    @property
    def allocated_bytes(self) -> int:
        return 0

    @property
    def holds_tokens(self) -> bool:
        return False

    def reset(self) -> None:
        return None

    def fresh(self) -> Evict:
        return Evict(self.config)
