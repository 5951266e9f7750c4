"""The dense tier: the newest tokens, the same count for every layer and head."""

from __future__ import annotations

import numpy as np

from hardkv.errors import CapacityError
from hardkv.memory import PagePool
from hardkv.tiers.paged import PagedTier
from hardkv.types import TokenBatch


class DenseTier(PagedTier):
    """The only tier that a decode step writes: one slot per head and step, at `length`."""

    name = "dense"
    rank = 0

    def __init__(self, pool: PagePool, lane: int, capacity: int) -> None:
        super().__init__(pool, lane)
        self.capacity = capacity

    @property
    def length(self) -> int:
        """Tokens held, the same in every head once all layers have been admitted."""
        return int(self.lengths[-1, -1])

    @property
    def full(self) -> bool:
        return self.length >= self.capacity

    def admit(self, layer: int, tokens: TokenBatch) -> None:
        arriving = tokens.mask.sum(-1).cpu().numpy()
        room = np.minimum(self.table.counts[layer] * self.pool.page_slots, self.capacity)
        if (self.lengths[layer] + arriving > room).any():
            raise CapacityError(
                f"the dense tier holds {self.lengths[layer].max()} of {room.min()} tokens, {arriving.max()} more came"
            )
        self.place(layer, self.lengths[layer].copy(), tokens)

    def advance(self) -> None:
        """Count one more token in every head, after its slot was given out."""
        self.lengths += np.int64(1)

    def fresh(self) -> DenseTier:
        return DenseTier(self.pool, self.table.lane, self.capacity)
