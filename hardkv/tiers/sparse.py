"""The sparse tier: what each head keeps of the older tokens, in pages, ragged."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from hardkv.memory import Pages
from hardkv.tiers.paged import PagedTier
from hardkv.types import TokenBatch


class SparseTier(PagedTier):
    """A subset of the older tokens per layer and head, in position order, with a keep bit in each slot's bias."""

    name = "sparse"
    rank = 2

    def admit(self, layer: int, tokens: TokenBatch) -> None:
        lengths = self.lengths[layer] + tokens.mask.sum(-1).cpu().numpy()
        self.hold(layer, lengths)
        self.place(layer, self.lengths[layer].copy(), tokens)

    def hold(self, layer: int, slots: Pages) -> None:
        """Hold pages for `slots [H]` in one layer.

        Raises:
            CapacityError: the pool is short; nothing changes.
        """
        counts = self.table.counts.copy()
        counts[layer] = self.pages_of(slots)
        self.pool.resize(self.table, counts)

    def kept(self) -> Tensor:
        """Slots per head that attention sees, `[L, H]` int64."""
        seen = self.pool.bias.view(-1)[self.slots()] > float("-inf")
        return (seen & self.present()).sum(-1)

    def set_lengths(self, lengths: Pages, reserve: Pages) -> None:
        """Become `lengths [L, H]` slots long, holding pages for `reserve`; give back the rest."""
        self.pool.resize(self.table, self.pages_of(np.maximum(lengths, reserve)))
        self.lengths = lengths.copy()
