"""The last queries of every sequence, for scorers that look back."""

from __future__ import annotations

import torch
from torch import Tensor


class QueryRing:
    """A ring of the last `rows` post-RoPE queries per layer and lane, each at its own position.

    A decode step writes it as it appends; there is one lane more, for rows that stand for nobody.
    """

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
        self.queries = torch.zeros(layers, lanes + 1, rows, heads, group, head_dim, dtype=dtype, device=device)
        self.positions = torch.full((lanes + 1, rows), -1, dtype=torch.int64, device=device)

    @property
    def allocated_bytes(self) -> int:
        return self.queries.nbytes + self.positions.nbytes

    def fill(self, layer: int, lane: int, queries: Tensor, positions: Tensor) -> None:
        """Write the last queries of a prompt `[H, G, W, D]` at `positions [W]`."""
        place = positions % self.rows
        self.queries[layer, lane, place] = queries.permute(2, 0, 1, 3)
        self.positions[lane, place] = positions

    def read(self, layers: slice, lane: int) -> tuple[Tensor, Tensor]:
        """Queries `[L, H, G, W, D]` and positions `[L, W]`, oldest first; rows never written have position -1."""
        order = torch.argsort(self.positions[lane])
        queries = self.queries[layers, lane].index_select(1, order).permute(0, 2, 3, 1, 4)
        return queries, self.positions[lane].index_select(0, order).expand(queries.shape[0], -1)

    def clear(self, lane: int) -> None:
        self.positions[lane] = -1
