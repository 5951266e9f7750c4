"""Layers whose model attends a sliding window: rings of the last tokens, never compressed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hardkv.types import AttentionCall
from hardkv_kernels import append, plan_decode, ragged_decode

_MOST_PAGE_SLOTS = 64


class RingTables:
    """Where the rings of one window size lie: pages end to end, lane by lane and head by head."""

    def __init__(self, lanes: int, heads: int, window: int, rows: int, device: torch.device) -> None:
        self.window, self.heads = window, heads
        self.page_slots = min(window & -window, _MOST_PAGE_SLOTS)  # the largest power of two that divides the window
        pages = window // self.page_slots
        self.pages = lanes * heads * pages
        size = (1, lanes, heads)
        self.block_table = torch.arange(self.pages, dtype=torch.int32, device=device).view(*size, pages)
        self.counts = torch.full(size, pages, dtype=torch.int32, device=device)
        self.counts[:, -1] = 0  # the last lane stands for nobody
        self._all_starts = torch.zeros(rows * heads + 1, dtype=torch.int32, device=device)
        self.owner = torch.zeros(self.pages, dtype=torch.int64, device=device)
        self._first = torch.arange(lanes * heads, device=device).view(lanes, heads) * window

    @property
    def allocated_bytes(self) -> int:
        buffers = (self.block_table, self.counts, self._all_starts, self.owner, self._first)
        return sum(buffer.nbytes for buffer in buffers)

    def bind(self, lanes: Tensor) -> None:
        """Plan for rows that stand for `lanes [R]`."""
        self.starts = self._all_starts[: lanes.shape[0] * self.heads + 1]
        plan_decode(self.block_table, self.counts, lanes, self.starts[None], self.owner)

    def open(self, lanes: Tensor, positions: Tensor) -> None:
        """Find the slots of the rows' new tokens at `positions [R]`."""
        self.slots = (self._first.index_select(0, lanes) + (positions % self.window)[:, None]).flatten()


class SlidingRing:
    """K and V of the last `window` tokens of one sliding-window layer, for every lane."""

    def __init__(self, tables: RingTables, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tables = tables
        shape = (tables.pages, tables.page_slots)
        self.keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.bias = torch.full(shape, float("-inf"), device=device)

    @property
    def allocated_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.keys, self.values, self.bias))

    def fill(self, lane: int, keys: Tensor, values: Tensor) -> None:
        """Take the last tokens of a prompt `keys, values [H, N, D]` whose first token has position 0."""
        tokens, window = keys.shape[1], self.tables.window
        kept = min(tokens, window)
        place = torch.arange(tokens - kept, tokens, device=keys.device) % window
        self.clear(lane)
        for ring, fresh in ((self.keys, keys), (self.values, values)):
            self._of(lane, ring).index_copy_(1, place, fresh[:, tokens - kept :])
        self._of(lane, self.bias).index_fill_(1, place, 0.0)

    def clear(self, lane: int) -> None:
        """Forget a lane's tokens."""
        self._of(lane, self.keys).zero_()
        self._of(lane, self.values).zero_()
        self._of(lane, self.bias).fill_(float("-inf"))

    def attend(self, call: AttentionCall, query: Tensor, lanes: Tensor, sinks: Tensor | None) -> Tensor:
        """Write one token per row and attend `query [R, H, G, D]`; out of the same shape."""
        rows, heads, _, head_dim = query.shape
        tables = self.tables
        fresh = (tensor.reshape(rows, heads, head_dim) for tensor in (call.keys, call.values))
        append(*fresh, tables.slots, self.keys, self.values, None, None, lanes, lanes)
        self.bias.view(-1).index_fill_(0, tables.slots, 0.0)
        answer: tuple[Tensor, Tensor, Tensor] = ragged_decode(
            query,
            self.keys,
            self.values,
            self.bias,
            tables.block_table[0],
            lanes,
            tables.starts,
            tables.owner,
            0,
            0,
            tables.pages,
            call.scaling,
            call.softcap,
            sinks,
            None,
            False,
        )
        return answer[0]

    def _of(self, lane: int, ring: Tensor) -> Tensor:
        """One lane's part of a ring, `[H, window, ...]`."""
        lanes = self.tables.block_table.shape[1]
        return ring.view(lanes, self.tables.heads, self.tables.window, *ring.shape[2:])[lane]


class SlidingRings:
    """The rings of all sliding-window layers; layers of one window size share their tables."""

    def __init__(
        self,
        windows: Mapping[int, int],
        lanes: int,
        rows: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._tables = {
            window: RingTables(lanes + 1, heads, window, rows, device) for window in sorted(set(windows.values()))
        }
        self._rings = {
            layer: SlidingRing(self._tables[window], head_dim, dtype, device) for layer, window in windows.items()
        }

    @property
    def allocated_bytes(self) -> int:
        tables = sum(tables.allocated_bytes for tables in self._tables.values())
        return tables + sum(ring.allocated_bytes for ring in self._rings.values())

    def fill(self, layer: int, lane: int, keys: Tensor, values: Tensor) -> None:
        """Take the last tokens of a prompt `keys, values [H, N, D]`."""
        self._rings[layer].fill(lane, keys, values)

    def clear(self, lane: int) -> None:
        """Forget a lane's tokens in every layer."""
        for ring in self._rings.values():
            ring.clear(lane)

    def bind(self, lanes: Tensor) -> None:
        """Let the rows of the next steps stand for `lanes [R]`."""
        for tables in self._tables.values():
            tables.bind(lanes)

    def open(self, lanes: Tensor, positions: Tensor) -> None:
        """Give the rows' new tokens at `positions [R]` their slots."""
        for tables in self._tables.values():
            tables.open(lanes, positions)

    def attend(self, layer: int, call: AttentionCall, query: Tensor, lanes: Tensor, sinks: Tensor | None) -> Tensor:
        """Write one token per row and attend `query [R, H, G, D]`."""
        return self._rings[layer].attend(call, query, lanes, sinks)
