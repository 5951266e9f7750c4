"""What the dense and the sparse tier share: slots in pages of the pool."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hardkv.interfaces import CacheTier
from hardkv.memory import PagePool, Pages, upload
from hardkv.types import TierShape, TokenBatch
from hardkv_kernels import attend_slots


class PagedTier(CacheTier):
    """Tokens of one sequence in pages of a pool; each head holds its first `lengths[layer, head]` slots.

    A slot's bias says whether attention sees it: 0 for kept, -inf for masked or empty.
    """

    rank: ClassVar[int]
    """Where this tier's pages stand in a lane's block table; only the last may be ragged."""

    def __init__(self, pool: PagePool, lane: int) -> None:
        super().__init__()
        self.pool = pool
        self.table = pool.new_table(lane, self.rank)
        self.lengths = np.zeros((pool.layers, pool.heads), dtype=np.int64)

    @property
    def allocated_bytes(self) -> int:
        return int(self.table.counts.sum()) * self.pool.page_bytes

    @property
    def holds_tokens(self) -> bool:
        return True

    @property
    def longest(self) -> int:
        """Slots of the longest head."""
        return int(self.lengths.max(initial=0))

    def allocate(self, shape: TierShape) -> None:
        """Hold pages for `shape.slots` slots in every head.

        Raises:
            CapacityError: the pool is too small; nothing changes.
        """
        if self.table not in self.pool.tables:  # after a reset
            self.table = self.pool.new_table(self.table.lane, self.rank)
        self.pool.resize(self.table, self.pages_of(np.full_like(self.table.counts, shape.slots)))

    def pages_of(self, slots: Pages) -> Pages:
        """Pages that hold so many slots, elementwise."""
        return -(-slots // self.pool.page_slots)

    def slots(self, width: int | None = None) -> Tensor:
        """Flat slot ids of the first `width` slots (default: of the longest head), `[L, H, width]` int64."""
        return self.pool.slots(self.table, self.longest if width is None else width)

    def present(self, width: int | None = None) -> Tensor:
        """Which of `slots(width)` hold a token, `[L, H, width]` bool."""
        lengths = upload(self.lengths, self.pool.bias.device)
        columns = torch.arange(self.longest if width is None else width, device=lengths.device)
        return columns < lengths[..., None]

    def attend(self, layer: int, query: Tensor, scaling: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        slots, present = self.slots()[layer], self.present()[layer]
        head_dim = self.pool.head_dim
        bias = self.pool.bias.view(-1)[slots].masked_fill(~present, float("-inf"))
        keys, values = (tensor.view(-1, head_dim)[slots] for tensor in (self.pool.keys, self.pool.values))
        answer: tuple[Tensor, Tensor] = attend_slots(query, keys, values, bias, scaling, softcap)
        return answer

    def place(self, layer: int, start: np.ndarray[tuple[int], np.dtype[np.int64]], tokens: TokenBatch) -> None:
        """Write the masked tokens of every head from its slot `start [H]` on, and show them to attention."""
        mask = tokens.mask
        rank = torch.cumsum(mask, -1) - 1 + upload(start, mask.device)[:, None]
        width = int(rank.max()) + 1 if mask.numel() else 0
        target = self.slots(max(width, 1))[layer].gather(-1, rank.clamp_min(0))[mask]
        head_dim = self.pool.head_dim
        self.pool.keys.view(-1, head_dim)[target] = tokens.keys[mask]
        self.pool.values.view(-1, head_dim)[target] = tokens.values[mask]
        self.pool.positions.view(-1)[target] = tokens.positions[mask].to(torch.int32)
        self.pool.bias.view(-1)[target] = 0.0
        if tokens.scores is not None:
            self.pool.statistic.view(-1)[target] = tokens.scores[mask]
        self.lengths[layer] = start + mask.sum(-1).cpu().numpy()

    def clear_bias(self) -> None:
        """Hide every slot of this tier from attention."""
        pages = self.table.pages[self.table.pages >= 0]
        self.pool.bias.index_fill_(0, upload(pages, self.pool.bias.device), float("-inf"))

    def reset(self) -> None:
        if self.table in self.pool.tables:
            self.pool.drop_table(self.table)
        self.lengths[:] = 0

    def fresh(self) -> CacheTier:
        return type(self)(self.pool, self.table.lane)
