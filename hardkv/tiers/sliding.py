"""Layers whose model attends a sliding window: a ring of the last tokens, never compressed."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv_kernels import paged_attention


class SlidingRing:
    """K and V of the last `window` tokens of one sliding-window layer, for every lane."""

    def __init__(self, lanes: int, heads: int, window: int, head_dim: int, like: Tensor) -> None:
        self.window = window
        self.keys = torch.zeros(lanes, heads, window, head_dim, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)
        self.bias = torch.full((lanes, heads, window), float("-inf"), device=like.device)
        self._shown = torch.zeros((), device=like.device)  # a Python number would be copied to the device each step

    @property
    def allocated_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.keys, self.values, self.bias))

    def fill(self, lane: int, keys: Tensor, values: Tensor) -> None:
        """Take the last tokens of a prompt `keys, values [H, N, D]` whose first token has position 0."""
        tokens = keys.shape[1]
        kept = min(tokens, self.window)
        place = torch.arange(tokens - kept, tokens, device=keys.device) % self.window
        self.clear(lane)
        self.keys[lane][:, place] = keys[:, tokens - kept :]
        self.values[lane][:, place] = values[:, tokens - kept :]
        self.bias[lane][:, place] = 0.0

    def clear(self, lane: int) -> None:
        """Forget a lane's tokens."""
        self.keys[lane] = 0.0
        self.values[lane] = 0.0
        self.bias[lane] = float("-inf")

    def step(
        self,
        lanes: Tensor,
        positions: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        softcap: float | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        """Write one token `keys, values [B, H, D]` per lane at `positions [B]` and attend `query [B, H, G, D]`."""
        batch, heads, group, head_dim = query.shape
        place = positions % self.window
        self.keys[lanes, :, place] = keys
        self.values[lanes, :, place] = values
        self.bias[lanes, :, place] = self._shown
        owner = torch.arange(batch * heads, device=query.device)
        answer: tuple[Tensor, Tensor, Tensor] = paged_attention(
            query.reshape(batch * heads, group, head_dim),
            self.keys.index_select(0, lanes).flatten(0, 1),
            self.values.index_select(0, lanes).flatten(0, 1),
            self.bias.index_select(0, lanes).flatten(0, 1),
            owner,
            scaling,
            softcap,
            sink_logits,
            False,
        )
        return answer[0].view(batch, heads, group, head_dim)
