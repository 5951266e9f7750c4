"""The last queries of every sequence, for scorers that look back."""

from __future__ import annotations

import torch
from torch import Tensor


class QueryRing:
    """A ring of the last `rows` post-RoPE queries per layer and lane, each at its own position."""

    def __init__(
        self,
        layers: int,
        lanes: int,
        heads: int,
        group: int,
        rows: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows = rows
        self.queries = torch.zeros(layers, lanes, rows, heads, group, head_dim, dtype=dtype, device=device)
        self.positions = torch.full((lanes, rows), -1, dtype=torch.int64, device=device)

    @property
    def allocated_bytes(self) -> int:
        return self.queries.nbytes + self.positions.nbytes

    def advance(self, lanes: Tensor, positions: Tensor) -> None:
        """Open the row of each lane's token at `positions [B]`."""
        self.positions[lanes, positions % self.rows] = positions

    def write(self, layer: int, lanes: Tensor, positions: Tensor, queries: Tensor) -> None:
        """Write `queries [B, H, G, D]` into the rows opened for `positions [B]`."""
        self.queries[layer][lanes, positions % self.rows] = queries

    def fill(self, layer: int, lane: int, queries: Tensor, positions: Tensor) -> None:
        """Write the last queries of a prompt `[H, G, W, D]` at `positions [W]`."""
        place = positions % self.rows
        self.queries[layer, lane, place] = queries.permute(2, 0, 1, 3)
        self.positions[lane, place] = positions

    def read(self, layer: int, lane: int) -> tuple[Tensor, Tensor]:
        """Queries `[1, H, G, W, D]` and positions `[1, W]`, oldest first; rows never written have position -1."""
        order = torch.argsort(self.positions[lane])
        queries = self.queries[layer, lane, order].permute(1, 2, 0, 3)
        return queries[None], self.positions[lane, order][None]

    def clear(self, lane: int) -> None:
        self.positions[lane] = -1
