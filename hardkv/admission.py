"""How much memory a sequence may need until it ends, so that a running one never finds the pool empty."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch

from hardkv.config import CacheSettings, Components, limits_at
from hardkv.errors import CapacityError
from hardkv.memory import PagePool
from hardkv.sharing import fair_level
from hardkv.types import Limits, ModelGeometry

NO_CAP = 1 << 40
_USABLE_SHARE = 0.8


def usable_bytes(device: torch.device) -> int:
    """Bytes that a cache may take on a device now: four fifths of what is free."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((torch.cuda.mem_get_info(device)[0] + cached) * _USABLE_SHARE)
    return int(psutil.virtual_memory().available * _USABLE_SHARE)


class Admission:
    """Worst cases of one sequence, from the model's geometry and the configuration."""

    def __init__(self, geometry: ModelGeometry, settings: CacheSettings, parts: Components | None) -> None:
        self.geometry, self.settings, self.parts = geometry, settings, parts
        self.layers = len(geometry.full_layers)
        self.page_slots = settings.page_slots
        self.share_tokens: int | None = None
        """What `share_out` found: mean tokens per head that each sequence may keep of the bytes that all share."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page with its metadata."""
        slot = PagePool.slot_bytes(self.geometry.head_dim, self.geometry.dtype, self.numbers_tokens)
        # An online scorer also needs room for the logits of a step.
        return self.page_slots * (slot + (4 * self.geometry.group if self.online else 0))

    @property
    def online(self) -> bool:
        """Whether an online scorer rides along."""
        return self.parts is not None and self.parts.scorer.online

    @property
    def shared_bytes(self) -> int | None:
        """Bytes that all sequences share, where the budget says so."""
        return None if self.parts is None else self.parts.budget.shared_bytes

    @property
    def numbers_tokens(self) -> bool:
        """Whether every slot holds a number of the scorer's: a round's statistic, or the score on entry."""
        return self.online or (self.parts is not None and self.parts.scorer.scores_on_entry)

    @property
    def store_slots(self) -> int:
        """Slots per head that the last tier holds in pages."""
        paged = self.parts is not None and self.parts.condenser.lies_in_pages
        return self.settings.condensed_slots if paged else 0

    def limits(self, seen_tokens: int) -> Limits:
        """The bounds in force for a sequence that has seen so many tokens."""
        if self.parts is None:
            settings = self.settings
            return Limits(settings.sinks, settings.local_window, NO_CAP, NO_CAP, seen_tokens, self.layers)
        return limits_at(self.settings, self.parts.budget, seen_tokens, self.layers, self.share_tokens)

    def sparse_tokens(self, total_tokens: int) -> int:
        """Largest mean over heads of slots in the sparse tier, for a sequence that grows to `total_tokens`."""
        if self.parts is None:
            return total_tokens
        limits = self.limits(total_tokens)
        target = self.share_tokens
        if target is None:
            target = self.parts.budget.target_tokens(total_tokens)
        most = limits.upper if target is None or self.parts.regularizer.pads_heads else max(limits.lower, target)
        return min(most + self.settings.interval, total_tokens)

    def share_out(self, needs: Sequence[int], total_bytes: int) -> int:
        """Share bytes over sequences that will see `needs` tokens, the first of them at once; gives how many that are.

        Their pages and lanes are counted, and nobody's page; tables are not.

        Raises:
            CapacityError: not even one fits.
        """
        assert self.parts is not None
        least = self.parts.budget.least_tokens
        needs = sorted(needs, reverse=True)
        for lanes in range(len(needs), 0, -1):
            room = total_bytes - lanes * self.lane_bytes() - self.page_bytes
            level = fair_level(needs[:lanes], self._bytes_at, room, least)
            if level is not None:
                self.share_tokens = level
                return lanes
        need = self._bytes_at(needs[0], least) + self.lane_bytes() + self.page_bytes
        raise CapacityError(
            f"budget '{self.parts.budget.name}' shares {total_bytes:,} bytes; a sequence of {needs[0]} tokens needs at "
            f"least {need:,} with {least} tokens per head. Raise budget.total or lower budget.least_tokens"
        )

    def raise_share(self, needs: Sequence[int], pages: int) -> None:
        """Share `pages` over the sequences that are left, which will see `needs` tokens; a share never falls."""
        if self.share_tokens is None or not needs:
            return
        level = fair_level(needs, self._bytes_at, pages * self.page_bytes, self.share_tokens)
        self.share_tokens = self.share_tokens if level is None else level

    def _bytes_at(self, total_tokens: int, level: int) -> int:
        """Bytes of the pages of a sequence of `total_tokens` whose share is `level` tokens."""
        before, self.share_tokens = self.share_tokens, level
        pages = self.sequence_pages(total_tokens)
        self.share_tokens = before
        return pages * self.page_bytes

    def sequence_pages(self, total_tokens: int) -> int:
        """Pages that a sequence of `total_tokens` (prompt and generation) may hold at once."""
        heads = self.geometry.heads
        # Each head may leave its last page part empty.
        sparse = -(-self.sparse_tokens(total_tokens) * heads // self.page_slots) + heads
        return self.layers * (sparse + self._fixed_pages() * heads)

    def head_pages(self, total_tokens: int) -> int:
        """Pages that a single head of a sequence of `total_tokens` may hold at once."""
        most = total_tokens if self.parts is None else min(self.limits(total_tokens).upper, total_tokens)
        return self._fixed_pages() + -(-(most + self.settings.interval) // self.page_slots)

    def _fixed_pages(self) -> int:
        """Pages of the dense tier and of the last tier's store, per head."""
        dense = self.settings.local_window + self.settings.interval
        return -(-dense // self.page_slots) + -(-self.store_slots // self.page_slots)

    def lane_bytes(self) -> int:
        """Bytes per sequence outside the pool: sliding-window rings, query ring, last tier."""
        geometry, item = self.geometry, self.geometry.dtype.itemsize
        windows = [window for window in geometry.windows if window is not None]
        slot = geometry.heads * (2 * geometry.head_dim * item + 4)
        total = sum(windows) * slot
        if self.parts is not None and self.parts.needs_queries:
            query = geometry.heads * geometry.group * geometry.head_dim * item
            if self.parts.holds_hidden_states:
                query += geometry.hidden_size * item
            total += self.layers * self.settings.query_rows * query + self.settings.query_rows * 8
        if self.settings.condensed_slots and not self.store_slots:
            total += self.layers * self.settings.condensed_slots * slot
        return total

    def prefill_bytes(self, prompt_tokens: int) -> int:
        """Transient bytes while a prompt is prefilled: one layer's K and V, and the stage."""
        layer = prompt_tokens * self.geometry.heads * 2 * self.geometry.head_dim * self.geometry.dtype.itemsize
        stage = 0 if self.parts is None else self.sequence_pages(prompt_tokens) * self.page_bytes
        return 2 * layer + stage

    def sequence_bytes(self, prompt_tokens: int, new_tokens: int) -> int:
        """Bytes that one sequence needs from start to end, prefill included."""
        return (
            self.sequence_pages(prompt_tokens + new_tokens) * self.page_bytes
            + self.lane_bytes()
            + self.prefill_bytes(prompt_tokens)
        )
