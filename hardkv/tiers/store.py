"""Slots for a tier that keeps what it makes of tokens, such as `merge`: in the pool, or in tensors of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv.memory import PagePool
from hardkv.tiers.paged import PagedTier
from hardkv.types import TierShape, TokenBatch


class PagedStore(PagedTier):
    """A fixed number of slots in every layer and head, read and written as a whole."""

    name = "store"
    rank = 1

    def __init__(self, pool: PagePool, lane: int, slots: int) -> None:
        super().__init__(pool, lane)
        self.lengths[:] = slots
        self._slots = slots

    def admit(self, layer: int, tokens: TokenBatch) -> None:
        raise NotImplementedError("a store takes in no tokens itself; its owner writes to it")

    def read(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of `keys, values [H, N, D]` and `bias [H, N]` float32 of one layer."""
        slots = self.slots(self._slots)[layer]
        flat_keys, flat_values = (pages.view(-1, self.pool.head_dim) for pages in (self.pool.keys, self.pool.values))
        return flat_keys[slots], flat_values[slots], self.pool.bias.view(-1)[slots]

    def write(self, layer: int, keys: Tensor, values: Tensor, bias: Tensor) -> None:
        """Replace them."""
        slots, head_dim = self.slots(self._slots)[layer].flatten(), self.pool.head_dim
        self.pool.keys.view(-1, head_dim).index_copy_(0, slots, keys.reshape(-1, head_dim))
        self.pool.values.view(-1, head_dim).index_copy_(0, slots, values.reshape(-1, head_dim))
        self.pool.bias.view(-1).index_copy_(0, slots, bias.flatten())


class TensorStore:
    """The same in tensors, for a tier that is used by itself."""

    def __init__(self, shape: TierShape) -> None:
        size = (shape.layers, shape.heads, shape.slots)
        self._keys = torch.zeros(*size, shape.head_dim, dtype=shape.dtype, device=shape.device)
        self._values = torch.zeros_like(self._keys)
        self._bias = torch.full(size, float("-inf"), device=shape.device)

    @property
    def allocated_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._keys, self._values, self._bias))

    def read(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of `keys, values [H, N, D]` and `bias [H, N]` float32 of one layer."""
        return self._keys[layer].clone(), self._values[layer].clone(), self._bias[layer].clone()

    def write(self, layer: int, keys: Tensor, values: Tensor, bias: Tensor) -> None:
        """Replace them."""
        self._keys[layer].copy_(keys)
        self._values[layer].copy_(values)
        self._bias[layer].copy_(bias)
