"""The page pool shared by all layers, heads and sequences, and its head-wise page manager.

Pages are the unit of allocation. On a CPU each layer's pages lie together in one region of the pool, so that a decode
step reads a layer as one contiguous slice; regions are resized by moving pages when a layer needs more than its region
holds. Elsewhere the pool is one region and a page never moves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hardkv.errors import CapacityError

Pages = npt.NDArray[np.int64]
FREE = -1


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy a host array to the device without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class PageManager:
    """Who owns which page, on the host: allocation never syncs with the device."""

    def __init__(self, pages: int, regions: int) -> None:
        self.owner: Pages = np.full(pages, FREE, dtype=np.int64)
        self.regions = regions
        self.bounds: Pages = np.linspace(0, pages, regions + 1).astype(np.int64)
        self.used_pages = 0
        # One region is a stack of free pages; several are searched from the front, to keep spans short.
        self._stack: Pages = np.arange(pages)[::-1].copy() if regions == 1 else np.empty(0, dtype=np.int64)

    @property
    def pages(self) -> int:
        return len(self.owner)

    def region(self, index: int) -> slice:
        return slice(int(self.bounds[index]), int(self.bounds[index + 1]))

    def free_pages(self) -> Pages:
        """Free pages in each region."""
        if self.regions == 1:
            return np.array([self.pages - self.used_pages], dtype=np.int64)
        running = np.concatenate([[0], np.cumsum(self.owner == FREE)])
        return np.asarray(running[self.bounds[1:]] - running[self.bounds[:-1]], dtype=np.int64)

    def span(self, index: int) -> slice:
        """The smallest slice of the pool that holds every allocated page of a region."""
        region = self.region(index)
        held = np.flatnonzero(self.owner[region] != FREE)
        if not len(held):
            return slice(region.start, region.start)
        return slice(region.start + int(held[0]), region.start + int(held[-1]) + 1)

    def allocate(self, index: int, owners: Pages) -> Pages:
        """Give free pages of a region, one for each entry of `owners`; of several regions' the lowest.

        Raises:
            CapacityError: the region has too few free pages; nothing changes.
        """
        free = self._find(index, len(owners))
        if len(free) < len(owners):
            raise CapacityError(f"region {index} needs {len(owners)} pages, it has {len(free)} free")
        self.owner[free] = owners
        self.used_pages += len(free)
        return np.asarray(free, dtype=np.int64)

    def _find(self, index: int, count: int) -> Pages:
        if self.regions == 1:
            free = self.pages - self.used_pages
            return np.array(self._stack[max(free - count, 0) : free][::-1], dtype=np.int64)
        region = self.region(index)
        return np.asarray(np.flatnonzero(self.owner[region] == FREE)[:count] + region.start, dtype=np.int64)

    def release(self, pages: Pages) -> None:
        """Give pages back.

        Raises:
            ValueError: a page that nobody owns, or one named twice; nothing changes.
        """
        if len(np.unique(pages)) != len(pages) or (self.owner[pages] == FREE).any():
            raise ValueError("a page was released that is not allocated")
        self.owner[pages] = FREE
        if self.regions == 1:
            free = self.pages - self.used_pages
            self._stack[free : free + len(pages)] = pages
        self.used_pages -= len(pages)

    def plan_regions(self, extra: Pages) -> Pages:
        """New bounds in which region i holds `extra[i]` more pages (or fewer); spare ones are shared by size.

        Raises:
            CapacityError: the pool is too small; nothing changes.
        """
        held = [int((self.owner[self.region(index)] != FREE).sum()) for index in range(self.regions)]
        wanted = np.array(held) + extra
        spare = self.pages - int(wanted.sum())
        if spare < 0:
            free = self.pages - self.used_pages
            raise CapacityError(f"{int(extra.sum())} more pages are needed, the pool has {free} free")
        share = (wanted + 1) / (wanted + 1).sum()
        sizes = wanted + np.floor(share * spare).astype(np.int64)
        sizes[-1] += self.pages - int(sizes.sum())
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


class PageTable:
    """Pages of one tier of one sequence: a ragged list for every layer and head, made by `PagePool.new_table`.

    `lane` is the sequence's place in the batch, `rank` the order of its tables in the lane's block table.
    """

    def __init__(self, layers: int, heads: int, lane: int, rank: int) -> None:
        self.pages: Pages = np.full((layers, heads, 0), FREE, dtype=np.int64)
        self.counts: Pages = np.zeros((layers, heads), dtype=np.int64)
        self.lane, self.rank = lane, rank
        self.version = 0

    def _widen(self, width: int) -> None:
        missing = width - self.pages.shape[2]
        if missing > 0:
            self.pages = np.pad(self.pages, ((0, 0), (0, 0), (0, missing)), constant_values=FREE)


class PagePool:
    """K, V and per-slot metadata of every page, and the tables that say whose they are.

    One page more than the manager gives out is allocated, `nobody_page`: rows of a batch that stand for no sequence
    write there. `statistic_stays`: whether a slot's number belongs to its token and moves with it, or to the round.
    """

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
        layer_regions: bool | None = None,
        statistic_stays: bool = False,
    ) -> None:
        self.statistic_stays = statistic_stays
        self.layer_regions = device.type == "cpu" if layer_regions is None else layer_regions
        self.manager = PageManager(pages, layers if self.layer_regions else 1)
        self.page_slots, self.layers, self.heads, self.head_dim = page_slots, layers, heads, head_dim
        self.nobody_page = pages
        shape = (pages + 1, page_slots)
        # Zeroed: a slot that was never written is masked, and 0 * NaN would still poison its page.
        self.keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.bias = torch.full(shape, float("-inf"), dtype=torch.float32, device=device)
        self.positions = torch.zeros(shape, dtype=torch.int32, device=device)
        scored = pages + 1 if with_statistic else 0
        self.statistic = torch.zeros(scored, page_slots, dtype=torch.float32, device=device)
        self.tables: list[PageTable] = []
        self.peak_pages = 0

    @staticmethod
    def slot_bytes(head_dim: int, dtype: torch.dtype, with_statistic: bool) -> int:
        """Bytes of one slot with everything kept for it: K, V, bias, position, statistic."""
        return 2 * head_dim * dtype.itemsize + 8 + (4 if with_statistic else 0)

    @property
    def page_bytes(self) -> int:
        return self.page_slots * self.slot_bytes(self.head_dim, self.keys.dtype, len(self.statistic) > 0)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use, nobody's page included."""
        return (self.manager.used_pages + 1) * self.page_bytes

    @property
    def reserved_bytes(self) -> int:
        return (self.manager.pages + 1) * self.page_bytes

    def new_table(self, lane: int, rank: int = 0) -> PageTable:
        table = PageTable(self.layers, self.heads, lane, rank)
        self.tables.append(table)
        return table

    def span(self, layer: int) -> slice:
        """A slice of the pool that holds every page of a layer."""
        return self.manager.span(layer) if self.layer_regions else slice(0, self.manager.pages)

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
        change = (counts - table.counts).sum(1)
        if not self.layer_regions:
            change = change.sum(keepdims=True)
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
        self._take(table, fresh)
        table.counts = counts.copy()
        table.version += 1
        self.peak_pages = max(self.peak_pages, self.manager.used_pages)

    def slots(self, table: PageTable, width: int) -> Tensor:
        """Flat slot ids `[L, H, width]` int64 of a table's first slots; those of page 0 where no page is held."""
        pages = -(-width // self.page_slots)
        held = np.zeros((*table.counts.shape, pages), dtype=np.int64)
        known = min(pages, table.pages.shape[2])
        held[..., :known] = np.maximum(table.pages[..., :known], 0)
        first = upload(held, self.bias.device) * self.page_slots
        flat = first[..., None] + torch.arange(self.page_slots, device=first.device)
        return flat.flatten(-2)[..., :width]

    def _take(self, table: PageTable, fresh: npt.NDArray[np.bool_]) -> None:
        """Allocate a page for every entry of the table that `fresh` marks."""
        owners = np.broadcast_to(table.lane * self.heads + np.arange(self.heads)[:, None], fresh.shape)
        regions = [slice(i, i + 1) for i in range(self.layers)] if self.layer_regions else [slice(None)]
        for index, layers in enumerate(regions):
            wanted = fresh[layers]
            if wanted.any():
                table.pages[layers][wanted] = self.manager.allocate(index, owners[layers][wanted])
        if self.statistic.shape[0] and fresh.any():
            self.statistic.index_fill_(0, upload(table.pages[fresh], self.bias.device), 0.0)

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.keys, self.values, self.bias, self.positions, self.statistic) if len(tensor)]

    def _blank(self, pages: Pages) -> None:
        """Hide free pages from attention, and forget what they held: a NaN would poison their next owner."""
        index = upload(pages, self.bias.device)
        self.bias.index_fill_(0, index, float("-inf"))
        self.keys.index_fill_(0, index, 0.0)
        self.values.index_fill_(0, index, 0.0)

    def _move_regions(self, bounds: Pages) -> None:
        """Give the layers' regions new bounds, moving pages; every table is rewritten."""
        manager, regions = self.manager, self.manager.regions
        old = [np.flatnonzero(manager.owner[manager.region(i)] != FREE) + manager.bounds[i] for i in range(regions)]
        packed = [manager.bounds[i] + np.arange(len(pages)) for i, pages in enumerate(old)]
        target = [bounds[i] + np.arange(len(pages)) for i, pages in enumerate(old)]
        remap = np.arange(manager.pages)
        owner = np.full_like(manager.owner, FREE)
        for i in range(regions):
            remap[old[i]] = target[i]
            owner[target[i]] = manager.owner[old[i]]
            self._copy_pages(old[i], packed[i])
        # A region that moves right is copied after those to its right, one that moves left after those to its left.
        rightwards = [i for i in reversed(range(regions)) if bounds[i] > manager.bounds[i]]
        leftwards = [i for i in range(regions) if bounds[i] < manager.bounds[i]]
        for i in rightwards + leftwards:
            self._copy_pages(packed[i], target[i])
        manager.bounds, manager.owner = bounds, owner
        self._blank(np.flatnonzero(owner == FREE))
        for table in self.tables:
            table.pages = np.where(table.pages == FREE, FREE, remap[np.maximum(table.pages, 0)])
            table.version += 1

    def _copy_pages(self, source: Pages, target: Pages) -> None:
        if len(source) and not np.array_equal(source, target):
            take, put = (upload(pages, self.bias.device) for pages in (source, target))
            for tensor in self._tensors():
                tensor[put] = tensor[take]
