"""The cascade cache of a running batch: opens, prefills, steps, compresses and closes sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from hardkv.admission import Admission
from hardkv.block_tables import BlockTables
from hardkv.compression import Compressor, Decision
from hardkv.config import CacheSettings, Components
from hardkv.costs import DeviceCosts
from hardkv.decode_step import DecodeStep
from hardkv.errors import CapacityError, HardKVError, PluginError
from hardkv.faults import named, shown
from hardkv.graph import bucket_of
from hardkv.interfaces import CacheTier
from hardkv.memory import PagePool
from hardkv.pipeline import blaming, let_go
from hardkv.prefill import Prefill
from hardkv.query_ring import QueryRing
from hardkv.stopwatch import Stopwatch
from hardkv.tiers.cascade import Cascade
from hardkv.tiers.evict import Evict
from hardkv.tiers.sliding import SlidingRings
from hardkv.types import AttentionCall, AttentionSettings, ModelGeometry, TokenBatch


class CascadeCache:
    """All sequences' tiers over one page pool. `parts` is None when every token is kept.

    `layer_regions`: whether each layer's pages lie together, which only a CPU gains by; default: on a CPU.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        settings: CacheSettings,
        parts: Components | None,
        costs: DeviceCosts,
        layer_regions: bool | None = None,
    ) -> None:
        self.layer_regions = geometry.device.type == "cpu" if layer_regions is None else layer_regions
        self.geometry, self.settings, self.parts, self.costs = geometry, settings, parts, costs
        if parts is not None:
            parts.check_model(geometry)
        self.admission = Admission(geometry, settings, parts)
        self.index_of_layer = {layer: index for index, layer in enumerate(geometry.full_layers)}
        self.watch = Stopwatch()
        self.cascades: dict[int, Cascade] = {}
        self.peak_bytes = 0
        self.compressions = 0
        self.generation = 0
        """Counts the allocations: what refers to the buffers is stale when this has changed."""
        self.ring: QueryRing | None = None
        self._sizes = (-1, -1, -1)
        self._free_lanes: list[int] = []
        self._reserved_pages: dict[int, int] = {}
        self._needs: dict[int, int] = {}
        self._layers: dict[int, AttentionSettings] = {}
        self._prefills: dict[int, Prefill] = {}

    @property
    def telling(self) -> Sequence[nn.Module]:
        """Attention modules whose calls must carry their input: all that are compressed, if the scorer reads it."""
        if self.parts is None or not self.parts.scorer.needs_hidden_states:
            return ()
        return [self.geometry.modules[layer] for layer in self.geometry.full_layers]

    # Memory

    def prepare(self, pages: int, lanes: int, head_pages: int) -> None:
        """Allocate a pool of `pages`, and room for `lanes` sequences of up to `head_pages` pages in a head.

        Buffers that are large enough already, and not twice too large, are kept, with the graphs captured over them.
        Only while no sequence is open.
        """
        if self.cascades:
            raise HardKVError("the cache cannot be resized while sequences are open; close them first")
        wanted = (pages, lanes, head_pages)
        if not all(want <= have <= 2 * want for want, have in zip(wanted, self._sizes, strict=True)):
            self._allocate(pages, lanes, head_pages)
            self._sizes = wanted
            self.generation += 1
        self._free_lanes = list(range(lanes))
        self._reserved_pages = {}
        self.peak_bytes = self.compressions = 0
        self.watch = Stopwatch()

    def _allocate(self, pages: int, lanes: int, head_pages: int) -> None:
        geometry, settings = self.geometry, self.settings
        layers, numbers = len(geometry.full_layers), self.admission.numbers_tokens
        heads, head_dim, dtype, device = geometry.heads, geometry.head_dim, geometry.dtype, geometry.device
        self.release()
        self.pool = PagePool(
            pages,
            settings.page_slots,
            layers,
            heads,
            head_dim,
            dtype,
            device,
            numbers,
            self.layer_regions,
            statistic_stays=numbers and not self.admission.online,
        )
        if self.parts is not None and self.parts.needs_queries:
            rows = settings.query_rows
            hidden = geometry.hidden_size if self.parts.holds_hidden_states else 0
            self.ring = QueryRing(layers, lanes, heads, geometry.group, rows, head_dim, dtype, device, hidden)
        windows = {layer: window for layer, window in enumerate(geometry.windows) if window is not None}
        rows = bucket_of(lanes)
        self.sliding = SlidingRings(windows, lanes, rows, heads, head_dim, dtype, device)
        scorer = self.parts.scorer if self.parts is not None and numbers else None
        tables = BlockTables(self.pool, lanes, head_pages)
        self.step = DecodeStep(self.pool, tables, scorer, self.ring, self.sliding, geometry.group, lanes, rows)
        self.compressor = Compressor(
            geometry,
            settings,
            self.parts,
            self.costs,
            self.admission,
            self.pool,
            self.ring,
            self._layers,
            head_pages,
        )

    def release(self) -> None:
        """Free every buffer; only while no sequence is open."""
        for name in ("compressor", "step", "sliding", "pool"):
            self.__dict__.pop(name, None)
        self.ring = None
        self._sizes = (-1, -1, -1)

    @property
    def kv_bytes(self) -> int:
        """Physical bytes in use: pool pages, rings, tables, last tiers."""
        if self._sizes[0] < 0:
            return 0
        total = self.pool.used_bytes + self.step.allocated_bytes
        total += self.sliding.allocated_bytes
        total += self.ring.allocated_bytes if self.ring is not None else 0
        return total + sum(cascade.extra_bytes for cascade in self.cascades.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes allocated, whether in use or not; they stay from call to call, or are freed for what the next needs."""
        if self._sizes[0] < 0:
            return 0
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
            CapacityError: it does not fit now; nothing changes. PluginError: the last tier failed; nothing changes.
        """
        pages = self.admission.sequence_pages(total_tokens)
        if not self.has_room(total_tokens):
            free = self.pool.manager.pages - sum(self._reserved_pages.values())
            raise CapacityError(
                f"a sequence of {total_tokens} tokens needs {pages} pages and a lane; "
                f"{free} pages and {len(self._free_lanes)} lanes are free"
            )
        last: CacheTier = Evict()
        if self.parts is not None:
            with blaming("condenser", self.parts.condenser):
                last = self.parts.condenser.fresh()
            if not isinstance(last, CacheTier):
                what = named("condenser", self.parts.condenser)
                raise PluginError(f"{what} gave {shown(last)} as a fresh tier; expected a CacheTier")
        lane = self._free_lanes.pop(0)
        settings = self.settings
        cascade = Cascade(self.pool, lane, settings.sinks, settings.local_window, settings.interval, last)
        self.cascades[lane], self._reserved_pages[lane], self._needs[lane] = cascade, pages, total_tokens
        try:
            with blaming("condenser", last):
                cascade.allocate(settings.condensed_slots)
        except HardKVError:
            self.close(cascade)
            raise
        return cascade

    def raise_share(self) -> None:
        """Let the open sequences have what those that ended gave back, where bytes are shared; nobody may wait."""
        self.admission.raise_share(list(self._needs.values()), self.pool.manager.pages)
        if self.admission.share_tokens is not None:
            self._reserved_pages = {lane: self.admission.sequence_pages(need) for lane, need in self._needs.items()}

    @torch.inference_mode()
    def close(self, cascade: Cascade) -> None:
        """Free all that a sequence holds."""
        if self.cascades.pop(cascade.lane, None) is None:
            return
        cascade.close()
        self.sliding.clear(cascade.lane)
        if self.ring is not None:
            self.ring.clear(cascade.lane)
        self._prefills.pop(cascade.lane, None)
        del self._reserved_pages[cascade.lane], self._needs[cascade.lane]
        self._free_lanes = sorted([*self._free_lanes, cascade.lane])

    def begin_prefill(self, cascade: Cascade, tokens: int) -> None:
        """Expect a prompt of so many tokens."""
        self._prefills[cascade.lane] = Prefill(
            self.parts,
            self.admission.limits(tokens),
            tokens,
            self.settings.query_rows,
            partial(self._place, cascade),
            partial(let_go, cascade.last) if cascade.last.holds_tokens or cascade.last.folds else None,
            cascade.calibration,
            self.note_peak,
            self.geometry,
        )

    def prefill_attend(self, cascade: Cascade, call: AttentionCall) -> Tensor:
        """Answer one layer's attention over (a chunk of) the prompt, out `[1, S, H*G, D]`; a full layer is selected."""
        prefill = self._prefills[cascade.lane]
        window = self.geometry.windows[call.layer]
        out, complete = prefill.attend(call, window)
        if complete:
            layer = prefill.take_layer()
            with self.watch.phase("prefill_compression"):
                if window is not None:
                    self.sliding.fill(call.layer, cascade.lane, layer.keys, layer.values)
                else:
                    index = self.index_of_layer[call.layer]
                    self._layers[index] = call.settings
                    prefill.finish_layer(index, layer, call)
                    if self.ring is not None:
                        queries, hidden = layer.window()
                        last = torch.arange(prefill.tokens - queries.shape[2], prefill.tokens, device=queries.device)
                        self.ring.fill(index, cascade.lane, queries, last, None if hidden is None else hidden[0])
        return out.flatten(0, 1).transpose(0, 1)[None]

    def end_prefill(self, cascade: Cascade) -> None:
        """Settle the selection of the whole prompt."""
        prefill = self._prefills.pop(cascade.lane)
        with self.watch.phase("prefill_compression"):
            prefill.finish()
        cascade.seen_tokens = prefill.tokens
        if prefill.selects:
            cascade.record_compression(float(cascade.kept_tokens().float().mean()))
            self.compressions += 1
        self.note_peak()

    # Decoding

    def attend(self, call: AttentionCall) -> Tensor:
        """Answer one layer of a decode step, out `[B, 1, H*G, D]`."""
        if self.geometry.windows[call.layer] is not None:
            return self.step.attend_sliding(call.layer, call)
        return self.step.attend(self.index_of_layer[call.layer], call)

    def compress(self, cascade: Cascade) -> None:
        """Age tokens out of a full dense tier, selecting when the sequence is longer than `lower`.

        Raises:
            PluginError: a component failed; the sequence must be closed, others are untouched.
        """
        with self.watch.phase("compression"):
            self.carry_out(self.compressor.decide(cascade))

    def carry_out(self, decision: Decision) -> None:
        """Do what a compression pass decided.

        Raises:
            PluginError: a score was not finite; the sequence must be closed, others are untouched.
        """
        if self.compressor.carry_out(decision, self._reserved_pages[decision.cascade.lane]):
            self.compressions += 1
        self.note_peak()

    def _place(self, cascade: Cascade, index: int, tokens: TokenBatch) -> None:
        """Put a prompt's kept tokens of one layer into the dense and the sparse tier."""
        newest = tokens.positions >= tokens.positions.shape[-1] - self.settings.local_window
        for tier, chosen in ((cascade.sparse, ~newest), (cascade.dense, newest)):
            tier.admit(index, replace(tokens, mask=tokens.mask & chosen))
