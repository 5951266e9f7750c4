"""Block tables on the device: the pages of every lane, kept in step with the tiers' own tables."""

from __future__ import annotations

import numpy as np
import torch

from hardkv.errors import CapacityError
from hardkv.memory import PagePool, PageTable, upload


class BlockTables:
    """`pages [L, A, H, P]` int32 and `counts [L, A, H]` int32 of every lane; the last lane stands for nobody.

    A lane's row is its tiers' pages end to end, in the order of their ranks; all but the last tier hold the same number
    of pages in every head. Addresses are constant; a lane's entries change only in `refresh`.
    """

    def __init__(self, pool: PagePool, lanes: int, width: int) -> None:
        self.pool, self.width = pool, width
        size = (pool.layers, lanes + 1, pool.heads)
        device = pool.bias.device
        self.pages = torch.full((*size, width), pool.nobody_page, dtype=torch.int32, device=device)
        self.counts = torch.zeros(size, dtype=torch.int32, device=device)
        self.version = 0
        self._seen: dict[int, list[tuple[PageTable, int]]] = {}

    @property
    def allocated_bytes(self) -> int:
        return self.pages.nbytes + self.counts.nbytes

    def refresh(self) -> None:
        """Write the rows of lanes whose tables have changed.

        Raises:
            CapacityError: a head holds more pages than a row has room for.
        """
        tables: dict[int, list[PageTable]] = {}
        for table in self.pool.tables:
            tables.setdefault(table.lane, []).append(table)
        for lane in {*tables, *self._seen}:
            held = sorted(tables.get(lane, []), key=lambda table: table.rank)
            state = [(table, table.version) for table in held]
            if state != self._seen.get(lane, []):
                self._write(lane, held)
                self._seen[lane] = state
                self.version += 1

    def _write(self, lane: int, tables: list[PageTable]) -> None:
        layers, heads = self.pool.layers, self.pool.heads
        row = np.full((layers, heads, self.width), self.pool.nobody_page, dtype=np.int32)
        counts = np.zeros((layers, heads), dtype=np.int64)
        for table in tables:
            first = int(counts.max(initial=0))
            assert (counts == first).all(), "only the last tier of a lane may be ragged"
            most = int(table.counts.max(initial=0))
            if first + most > self.width:
                raise CapacityError(f"a head holds {first + most} pages, its block table has room for {self.width}")
            held = table.pages[..., :most]
            row[..., first : first + most] = np.where(held >= 0, held, self.pool.nobody_page)
            counts += table.counts
        device = self.pages.device
        self.pages[:, lane].copy_(upload(row, device))
        self.counts[:, lane].copy_(upload(counts.astype(np.int32), device))
