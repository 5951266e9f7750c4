"""The cascade cache of a running batch: opens, prefills, steps, compresses and closes sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hardkv.admission import Admission
from hardkv.config import CacheSettings, Components
from hardkv.costs import DeviceCosts
from hardkv.errors import CapacityError, HardKVError
from hardkv.graph import DecodeStep
from hardkv.interfaces import OnlineScorer
from hardkv.memory import PagePool
from hardkv.pipeline import claim_layer, lay_out, select
from hardkv.prefill import Prefill
from hardkv.query_ring import QueryRing
from hardkv.stopwatch import Stopwatch
from hardkv.tiers.cascade import Cascade, Resident
from hardkv.tiers.evict import Evict
from hardkv.tiers.sliding import SlidingRing
from hardkv.types import (
    AttentionCall,
    Claims,
    CostModel,
    Layout,
    ModelGeometry,
    ScoreView,
    TierShape,
    TokenBatch,
)


class CascadeCache:
    """All sequences' tiers over one page pool. `parts` is None when every token is kept."""

    def __init__(
        self, geometry: ModelGeometry, settings: CacheSettings, parts: Components | None, costs: DeviceCosts
    ) -> None:
        self.geometry, self.settings, self.parts, self.costs = geometry, settings, parts, costs
        self.admission = Admission(geometry, settings, parts)
        self.index_of_layer = {layer: index for index, layer in enumerate(geometry.full_layers)}
        self.watch = Stopwatch()
        self.cascades: dict[int, Cascade] = {}
        self.peak_bytes = 0
        self.compressions = 0
        self._free_lanes: list[int] = []
        self._reserved_pages: dict[int, int] = {}
        self._calls: dict[int, AttentionCall] = {}
        self._prefills: dict[int, Prefill] = {}

    # Memory

    def prepare(self, pages: int, lanes: int) -> None:
        """Allocate a pool of `pages` and room for `lanes` sequences; only while no sequence is open."""
        if self.cascades:
            raise HardKVError("the cache cannot be resized while sequences are open; close them first")
        geometry, layers = self.geometry, len(self.geometry.full_layers)
        scorer = self.parts.scorer if self.parts is not None and self.parts.scorer.online else None
        assert scorer is None or isinstance(scorer, OnlineScorer)
        self.pool = PagePool(
            pages,
            self.settings.page_slots,
            layers,
            geometry.heads,
            geometry.head_dim,
            geometry.dtype,
            geometry.device,
            scorer is not None,
        )
        self.ring: QueryRing | None = None
        if self.parts is not None and self.parts.needs_queries:
            self.ring = QueryRing(
                layers,
                lanes,
                geometry.heads,
                geometry.group,
                self.settings.query_rows,
                geometry.head_dim,
                geometry.dtype,
                geometry.device,
            )
        self.sliding = {
            layer: SlidingRing(lanes, geometry.heads, window, geometry.head_dim, self.pool.keys)
            for layer, window in enumerate(geometry.windows)
            if window is not None
        }
        self.step = DecodeStep(self.pool, scorer, self.ring)
        self._free_lanes = list(range(lanes))
        self._reserved_pages = {}
        self.peak_bytes = self.compressions = 0
        self.watch = Stopwatch()

    @property
    def kv_bytes(self) -> int:
        """Physical bytes in use: pool pages, rings, tables, last tiers."""
        total = self.pool.used_bytes + self.step.allocated_bytes
        total += sum(ring.allocated_bytes for ring in self.sliding.values())
        total += self.ring.allocated_bytes if self.ring is not None else 0
        return total + sum(cascade.extra_bytes for cascade in self.cascades.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes allocated, whether in use or not."""
        return self.kv_bytes - self.pool.used_bytes + self.pool.reserved_bytes

    def note_peak(self, transient_bytes: int = 0) -> int:
        """Record the bytes held now, with what is held only for a moment; gives the bytes in use."""
        held = self.kv_bytes
        self.peak_bytes = max(self.peak_bytes, held + transient_bytes)
        return held

    def has_room(self, total_tokens: int) -> bool:
        """Whether a sequence that grows to `total_tokens` can be opened now."""
        pages = self.admission.sequence_pages(total_tokens)
        return bool(self._free_lanes) and sum(self._reserved_pages.values()) + pages <= self.pool.manager.pages

    # A sequence's life

    def open(self, total_tokens: int) -> Cascade:
        """Open a sequence that may grow to `total_tokens`, its worst case reserved.

        Raises:
            CapacityError: it does not fit now; nothing changes.
        """
        pages = self.admission.sequence_pages(total_tokens)
        if not self.has_room(total_tokens):
            free = self.pool.manager.pages - sum(self._reserved_pages.values())
            raise CapacityError(
                f"a sequence of {total_tokens} tokens needs {pages} pages and a lane; "
                f"{free} pages and {len(self._free_lanes)} lanes are free"
            )
        last = self.parts.condenser.fresh() if self.parts is not None else Evict()
        lane = self._free_lanes.pop(0)
        settings = self.settings
        cascade = Cascade(self.pool, lane, settings.sinks, settings.local_window, settings.interval, last)
        self.cascades[lane], self._reserved_pages[lane] = cascade, pages
        dense = settings.local_window + settings.interval
        cascade.dense.allocate(self._tier_shape(dense))
        if last.holds_tokens:
            last.allocate(self._tier_shape(settings.condensed_slots))
        return cascade

    def close(self, cascade: Cascade) -> None:
        """Free all that a sequence holds."""
        if self.cascades.pop(cascade.lane, None) is None:
            return
        cascade.close()
        for ring in self.sliding.values():
            ring.clear(cascade.lane)
        if self.ring is not None:
            self.ring.clear(cascade.lane)
        self._prefills.pop(cascade.lane, None)
        del self._reserved_pages[cascade.lane]
        self._free_lanes = sorted([*self._free_lanes, cascade.lane])

    def begin_prefill(self, cascade: Cascade, tokens: int) -> None:
        """Expect a prompt of so many tokens."""
        self._prefills[cascade.lane] = Prefill(
            self.parts,
            self.admission.limits(tokens),
            tokens,
            self.settings.query_rows,
            lambda index, mask, keys, values: self._place(cascade, tokens, index, mask, keys, values),
            cascade.last.admit if cascade.last.holds_tokens else None,
            cascade.calibration,
            self.note_peak,
        )

    def prefill_attend(self, cascade: Cascade, call: AttentionCall) -> Tensor:
        """Answer one layer's attention over (a chunk of) the prompt, out `[1, S, H*G, D]`; a full layer is selected."""
        prefill = self._prefills[cascade.lane]
        window = self.geometry.windows[call.layer]
        out, complete = prefill.attend(call, window)
        if complete:
            keys, values, queries = prefill.take_layer()
            with self.watch.phase("prefill_compression"):
                if window is not None:
                    self.sliding[call.layer].fill(cascade.lane, keys, values)
                else:
                    index = self.index_of_layer[call.layer]
                    self._calls[index] = call
                    prefill.finish_layer(index, keys, values, queries, call)
                    if self.ring is not None:
                        last = torch.arange(prefill.tokens - queries.shape[2], prefill.tokens, device=keys.device)
                        self.ring.fill(index, cascade.lane, queries, last)
        return out.flatten(0, 1).transpose(0, 1)[None]

    def end_prefill(self, cascade: Cascade) -> None:
        """Settle the selection of the whole prompt."""
        prefill = self._prefills.pop(cascade.lane)
        with self.watch.phase("prefill_compression"):
            prefill.finish()
        cascade.seen_tokens = prefill.tokens
        if prefill.selects:
            cascade.record_compression()
            self.compressions += 1
        self.note_peak()

    # Decoding

    def due(self, cascade: Cascade) -> bool:
        """Whether a sequence's dense tier is full, so that `compress` must run before its next token."""
        return cascade.dense.full

    def begin_step(self, batch: Sequence[Cascade]) -> None:
        """Prepare the tables of one decode step; no sequence may be due for compression."""
        self.step.begin(batch)

    def attend(self, call: AttentionCall) -> Tensor:
        """Answer one layer of a decode step, out `[B, 1, H*G, D]`."""
        if self.geometry.windows[call.layer] is not None:
            return self.step.attend_sliding(self.sliding[call.layer], call)
        return self.step.attend(self.index_of_layer[call.layer], call)

    def compress(self, cascade: Cascade) -> None:
        """Age tokens out of a full dense tier, selecting when the sequence is longer than `lower`.

        Raises:
            PluginError: a component failed; the sequence must be closed, others are untouched.
        """
        with self.watch.phase("compression"):
            resident = cascade.resident()
            limits = self.admission.limits(cascade.seen_tokens)
            selects = self.parts is not None and cascade.seen_tokens > limits.lower
            if selects:
                layout = self._selected_layout(cascade, resident)
            else:
                held = resident.valid.sum(-1)
                layout = Layout(resident.valid, torch.zeros_like(held, dtype=torch.bool), held)
            cascade.apply(resident, layout, self._dropper(cascade))
            if selects:
                cascade.record_compression()
                self.compressions += 1
            self.note_peak()

    def _selected_layout(self, cascade: Cascade, resident: Resident) -> Layout:
        assert self.parts is not None
        parts, limits = self.parts, self.admission.limits(cascade.seen_tokens)
        claims = [
            claim_layer(
                parts,
                self._view(cascade, resident, index),
                resident.protected[index][None],
                cascade.calibration[index],
            )
            for index in range(self.pool.layers)
        ]
        keep = select(parts, Claims.stack(claims), limits)
        layout = lay_out(parts, keep, resident.valid, self._cost_model(), limits)
        if self._pages_after(cascade, resident, layout) > self._reserved_pages[cascade.lane]:
            everywhere = torch.ones_like(layout.rewrite)
            return Layout(layout.keep, everywhere, layout.keep.sum(-1))
        return layout

    def _pages_after(self, cascade: Cascade, resident: Resident, layout: Layout) -> int:
        stays = torch.where(layout.rewrite[..., None], layout.keep, resident.valid) & ~resident.window
        slots = torch.maximum(stays.sum(-1), layout.reserve_slots - self.settings.local_window)
        pages = (slots + self.pool.page_slots - 1) // self.pool.page_slots
        return int(pages.sum()) + int(cascade.dense.table.counts.sum())

    def _view(self, cascade: Cascade, resident: Resident, index: int) -> ScoreView:
        call = self._calls[index]
        keys, values = cascade.gather(resident, index)
        queries = positions = statistic = None
        if self.ring is not None:
            queries, positions = self.ring.read(index, cascade.lane)
        if self.pool.statistic.shape[0]:
            statistic = self.pool.statistic.view(-1)[resident.slots[index]][None]
        heads = self.geometry.heads
        # An online statistic says nothing of a slot that attention did not see, so such a slot cannot come back; then
        # the outcome is the same whether a token was masked or let go.
        online = self.parts is not None and self.parts.scorer.online
        judged = resident.shown if online else resident.valid
        return ScoreView(
            keys=keys[None],
            values=values[None],
            positions=resident.positions[index][None],
            valid=judged[index][None],
            scaling=call.scaling,
            layer=call.layer,
            softcap=call.softcap,
            queries=queries,
            query_positions=positions,
            statistic=statistic,
            sink_logits=None if call.sink_logits is None else call.sink_logits.float().view(heads, -1),
        )

    def _dropper(self, cascade: Cascade):  # type: ignore[no-untyped-def]
        if not cascade.last.holds_tokens:
            return None

        def drop(index: int, tokens: TokenBatch) -> None:
            assert self.ring is not None
            queries, _ = self.ring.read(index, cascade.lane)
            query = queries[0, :, :, -1].mean(1)
            scaling = self._calls[index].scaling
            cascade.last.admit(
                index, TokenBatch(tokens.keys, tokens.values, tokens.positions, tokens.mask, scaling, query)
            )

        return drop

    def _place(self, cascade: Cascade, tokens: int, index: int, mask: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put a prompt's kept tokens of one layer into the dense and the sparse tier; `keys [sum of mask, D]`."""
        heads, device = mask.shape[0], mask.device
        positions = torch.arange(tokens, device=device).expand(heads, tokens)
        newest = positions >= tokens - self.settings.local_window
        spread = keys.new_empty(2, heads, tokens, keys.shape[-1])
        spread[0][mask], spread[1][mask] = keys, values
        for tier, chosen in ((cascade.sparse, mask & ~newest), (cascade.dense, mask & newest)):
            tier.admit(index, TokenBatch(spread[0], spread[1], positions, chosen))

    def _cost_model(self) -> CostModel:
        costs = self.costs
        return CostModel(
            read_seconds_per_byte=costs.read_seconds_per_byte,
            copy_seconds_per_byte=costs.copy_seconds_per_byte,
            launch_seconds=costs.launch_seconds,
            slot_bytes=2 * self.geometry.head_dim * self.geometry.dtype.itemsize,
            horizon_steps=self.settings.interval,
        )

    def _tier_shape(self, slots: int) -> TierShape:
        geometry = self.geometry
        layers = len(geometry.full_layers)
        return TierShape(layers, geometry.heads, geometry.head_dim, slots, geometry.dtype, geometry.device)
