"""The last queries of every sequence, and their hidden states, for scorers that look back."""

from __future__ import annotations

import torch
from torch import Tensor


class QueryRing:
    """A ring of the last `rows` post-RoPE queries per layer and lane, each at its own position.

    A decode step writes it as it appends; there is one lane more, for rows that stand for nobody. With `hidden_size`
    the attention layer's inputs are held as well.
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
        hidden_size: int = 0,
    ) -> None:
        self.rows, self.hidden_size = rows, hidden_size
        self.queries = torch.zeros(layers, lanes + 1, rows, heads, group, head_dim, dtype=dtype, device=device)
        self.hidden = torch.zeros(layers, lanes + 1, rows, hidden_size, dtype=dtype, device=device)
        self.positions = torch.full((lanes + 1, rows), -1, dtype=torch.int64, device=device)

    @property
    def allocated_bytes(self) -> int:
        return self.queries.nbytes + self.hidden.nbytes + self.positions.nbytes

    def fill(self, layer: int, lane: int, queries: Tensor, positions: Tensor, hidden: Tensor | None = None) -> None:
        """Write the last queries of a prompt `[H, G, W, D]`, and hidden states `[W, M]`, at `positions [W]`."""
        place = positions % self.rows
        if hidden is not None and self.hidden_size:
            self.hidden[layer, lane, place] = hidden
        self.queries[layer, lane, place] = queries.permute(2, 0, 1, 3)
        self.positions[lane, place] = positions

    def read(self, layers: slice, lane: int) -> tuple[Tensor, Tensor]:
        """Queries `[L, H, G, W, D]` and positions `[L, W]`, oldest first; rows never written have position -1."""
        order = torch.argsort(self.positions[lane])
        queries = self.queries[layers, lane].index_select(1, order).permute(0, 2, 3, 1, 4)
        return queries, self.positions[lane].index_select(0, order).expand(queries.shape[0], -1)

    def write_hidden(self, layer: int, lanes: Tensor, positions: Tensor, hidden: Tensor) -> None:
        """Write the hidden states `[R, M]` of one decode step's rows, where they are held."""
        if not self.hidden_size:
            return
        self.hidden[layer].index_put_((lanes, positions % self.rows), hidden)

    def read_hidden(self, layers: slice, lane: int) -> Tensor | None:
        """Hidden states `[L, W, M]` in the order of `read`; None where none are held."""
        if not self.hidden_size:
            return None
        return self.hidden[layers, lane].index_select(1, torch.argsort(self.positions[lane]))

    def clear(self, lane: int) -> None:
        self.positions[lane] = -1
