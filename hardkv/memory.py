"""The page pool shared by all layers, heads and sequences, and its head-wise page manager.

Pages are the unit of allocation. Each layer's pages lie together in one region of the pool, so that a decode step reads
a layer as one contiguous slice; regions are resized by moving pages when a layer needs more than its region holds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hardkv.errors import CapacityError

Pages = npt.NDArray[np.int64]
FREE = -1


class PageManager:
    """Who owns which page, on the host: allocation never syncs with the device."""

    def __init__(self, pages: int, layers: int) -> None:
        self.owner: Pages = np.full(pages, FREE, dtype=np.int64)
        self.layers = layers
        self.bounds: Pages = np.linspace(0, pages, layers + 1).astype(np.int64)

    @property
    def pages(self) -> int:
        return len(self.owner)

    @property
    def used_pages(self) -> int:
        return int((self.owner != FREE).sum())

    def region(self, layer: int) -> slice:
        return slice(int(self.bounds[layer]), int(self.bounds[layer + 1]))

    def free_pages(self) -> Pages:
        """Free pages in each layer's region, `[L]`."""
        running = np.concatenate([[0], np.cumsum(self.owner == FREE)])
        return np.asarray(running[self.bounds[1:]] - running[self.bounds[:-1]], dtype=np.int64)

    def span(self, layer: int) -> slice:
        """The smallest slice of the pool that holds every page of the layer."""
        region = self.region(layer)
        held = np.flatnonzero(self.owner[region] != FREE)
        if not len(held):
            return slice(region.start, region.start)
        return slice(region.start + int(held[0]), region.start + int(held[-1]) + 1)

    def allocate(self, layer: int, owners: Pages) -> Pages:
        """Give the lowest free pages of the layer's region, one for each entry of `owners`.

        Raises:
            CapacityError: the region has too few free pages; nothing changes.
        """
        region = self.region(layer)
        free = np.flatnonzero(self.owner[region] == FREE)[: len(owners)] + region.start
        if len(free) < len(owners):
            raise CapacityError(f"layer {layer} needs {len(owners)} pages, its region has {len(free)} free")
        self.owner[free] = owners
        return np.asarray(free, dtype=np.int64)

    def release(self, pages: Pages) -> None:
        """Give pages back.

        Raises:
            ValueError: a page that nobody owns, or one named twice; nothing changes.
        """
        if len(np.unique(pages)) != len(pages) or (self.owner[pages] == FREE).any():
            raise ValueError("a page was released that is not allocated")
        self.owner[pages] = FREE

    def plan_regions(self, extra: Pages) -> Pages:
        """New region bounds in which layer l holds `extra[l]` more pages (or fewer); spare ones are shared by size.

        Raises:
            CapacityError: the pool is too small; nothing changes.
        """
        wanted = np.array([int((self.owner[self.region(layer)] != FREE).sum()) for layer in range(self.layers)]) + extra
        spare = self.pages - int(wanted.sum())
        if spare < 0:
            free = self.pages - self.used_pages
            raise CapacityError(f"{int(extra.sum())} more pages are needed, the pool has {free} free")
        share = (wanted + 1) / (wanted + 1).sum()
        sizes = wanted + np.floor(share * spare).astype(np.int64)
        sizes[-1] += self.pages - int(sizes.sum())
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


class PageTable:
    """Pages of one tier of one sequence: a ragged list for every layer and head, made by `PagePool.new_table`."""

    def __init__(self, layers: int, heads: int, lane: int) -> None:
        self.pages: Pages = np.full((layers, heads, 0), FREE, dtype=np.int64)
        self.counts: Pages = np.zeros((layers, heads), dtype=np.int64)
        self.lane = lane

    def _widen(self, width: int) -> None:
        missing = width - self.pages.shape[2]
        if missing > 0:
            self.pages = np.pad(self.pages, ((0, 0), (0, 0), (0, missing)), constant_values=FREE)


class PagePool:
    """K, V and per-slot metadata of every page, and the tables that say whose they are."""

    def __init__(
        self,
        pages: int,
        page_slots: int,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        with_statistic: bool,
    ) -> None:
        self.manager = PageManager(pages, layers)
        self.page_slots, self.layers, self.heads, self.head_dim = page_slots, layers, heads, head_dim
        shape = (pages, page_slots)
        # Zeroed: a slot that was never written is masked, and 0 * NaN would still poison its page.
        self.keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.bias = torch.full(shape, float("-inf"), dtype=torch.float32, device=device)
        self.positions = torch.zeros(shape, dtype=torch.int32, device=device)
        self.statistic = torch.zeros(shape if with_statistic else (0, page_slots), dtype=torch.float32, device=device)
        self.tables: list[PageTable] = []
        self.peak_pages = 0
        self.version = 0

    @staticmethod
    def slot_bytes(head_dim: int, dtype: torch.dtype, with_statistic: bool) -> int:
        """Bytes of one slot with everything kept for it: K, V, bias, position, statistic."""
        return 2 * head_dim * dtype.itemsize + 8 + (4 if with_statistic else 0)

    @property
    def page_bytes(self) -> int:
        return self.page_slots * self.slot_bytes(self.head_dim, self.keys.dtype, self.statistic.shape[0] > 0)

    @property
    def used_bytes(self) -> int:
        return self.manager.used_pages * self.page_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.manager.pages * self.page_bytes

    def new_table(self, lane: int) -> PageTable:
        table = PageTable(self.layers, self.heads, lane)
        self.tables.append(table)
        return table

    def drop_table(self, table: PageTable) -> None:
        """Release every page of a table and forget it."""
        self.resize(table, np.zeros_like(table.counts))
        self.tables.remove(table)

    def resize(self, table: PageTable, counts: Pages) -> None:
        """Give every layer and head of `table` exactly `counts [L, H]` pages, keeping its first ones in place.

        Raises:
            CapacityError: the pool is too small; nothing changes.
            ValueError: the table was dropped; nothing changes.
        """
        if table not in self.tables:
            raise ValueError("this page table was dropped: it can hold no pages")
        grow = np.maximum(counts - table.counts, 0)
        change = (counts - table.counts).sum(1)
        lacking = change > self.manager.free_pages()
        # Planned before anything is given back, so that a pool that is too small is left as it was.
        bounds = self.manager.plan_regions(change) if lacking.any() else None
        table._widen(int(counts.max(initial=0)))
        column = np.arange(table.pages.shape[2])
        surplus = (column >= counts[..., None]) & (column < table.counts[..., None])
        freed = table.pages[surplus]
        if len(freed):
            self.manager.release(freed)
            self._blank(freed)
            table.pages[surplus] = FREE
        if bounds is not None:
            self._move_regions(bounds)
        fresh = (column < counts[..., None]) & (column >= table.counts[..., None])
        owners = table.lane * self.heads + np.arange(self.heads)
        taken = []
        for layer in np.flatnonzero(grow.sum(1)):
            pages = self.manager.allocate(int(layer), np.repeat(owners, grow[layer]))
            table.pages[layer][fresh[layer]] = pages
            taken.append(pages)
        if taken and self.statistic.shape[0]:
            self.statistic[torch.from_numpy(np.concatenate(taken)).to(self.bias.device)] = 0.0
        table.counts = counts.copy()
        self.peak_pages = max(self.peak_pages, self.manager.used_pages)
        self.version += 1

    def slots(self, table: PageTable, width: int) -> Tensor:
        """Flat slot ids `[L, H, width]` int64 of a table's first slots; those of page 0 where no page is held."""
        pages = -(-width // self.page_slots)
        held = np.zeros((*table.counts.shape, pages), dtype=np.int64)
        known = min(pages, table.pages.shape[2])
        held[..., :known] = np.maximum(table.pages[..., :known], 0)
        flat = held[..., None] * self.page_slots + np.arange(self.page_slots)
        return torch.from_numpy(flat.reshape(*table.counts.shape, -1)[..., :width]).to(self.bias.device)

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.keys, self.values, self.bias, self.positions, self.statistic) if len(tensor)]

    def _blank(self, pages: Pages) -> None:
        """Hide free pages from attention, and forget what they held: a NaN would poison their next owner."""
        index = torch.from_numpy(pages).to(self.bias.device)
        self.bias[index] = float("-inf")
        self.keys[index] = 0.0
        self.values[index] = 0.0

    def _move_regions(self, bounds: Pages) -> None:
        """Give the layers' regions new bounds, moving pages; every table is rewritten."""
        manager = self.manager
        old = [np.flatnonzero(manager.owner[manager.region(i)] != FREE) + manager.bounds[i] for i in range(self.layers)]
        packed = [manager.bounds[i] + np.arange(len(pages)) for i, pages in enumerate(old)]
        target = [bounds[i] + np.arange(len(pages)) for i, pages in enumerate(old)]
        remap = np.arange(manager.pages)
        owner = np.full_like(manager.owner, FREE)
        for i in range(self.layers):
            remap[old[i]] = target[i]
            owner[target[i]] = manager.owner[old[i]]
            self._copy_pages(old[i], packed[i])
        # A region that moves right is copied after those to its right, one that moves left after those to its left.
        rightwards = [i for i in reversed(range(self.layers)) if bounds[i] > manager.bounds[i]]
        leftwards = [i for i in range(self.layers) if bounds[i] < manager.bounds[i]]
        for i in rightwards + leftwards:
            self._copy_pages(packed[i], target[i])
        manager.bounds, manager.owner = bounds, owner
        self._blank(np.flatnonzero(owner == FREE))
        for table in self.tables:
            table.pages = np.where(table.pages == FREE, FREE, remap[np.maximum(table.pages, 0)])

    def _copy_pages(self, source: Pages, target: Pages) -> None:
        if len(source) and not np.array_equal(source, target):
            take, put = (torch.from_numpy(pages).to(self.bias.device) for pages in (source, target))
            for tensor in self._tensors():
                tensor[put] = tensor[take]
