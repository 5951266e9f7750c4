"""One compression pass over one sequence, in two halves: decide on the device, then move and free.

Between the halves the host reads one small report, how many slots each head keeps, since it gives out the pages. Where
the device works on its own the first half can run beside decode steps of other sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardkv.admission import Admission
from hardkv.config import CacheSettings, Components
from hardkv.costs import DeviceCosts
from hardkv.memory import PagePool, Pages
from hardkv.pipeline import check_finite, claim, lay_out, let_go, select
from hardkv.query_ring import QueryRing
from hardkv.tiers.cascade import Cascade, Moves, Resident
from hardkv.types import AttentionSettings, Claims, CostModel, Layout, ModelGeometry, ScoreView, TokenBatch

_WORKSPACE_BYTES = 512 << 20
_CPU_WORKSPACE_BYTES = 8 << 20
"""About what stays in a CPU's caches between two operations."""


class Arriving:
    """A tensor on its way to the host; nothing waits until `wait`."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensor.device).record_event()
        else:
            self._host = tensor

    @property
    def here(self) -> bool:
        """Whether `wait` would give it at once."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> Tensor:
        """Give it, waiting for nothing but its own arrival."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


@dataclass(frozen=True)
class Decision:
    """What the first half found; `report` is on its way to the host."""

    cascade: Cascade
    resident: Resident
    moves: Moves
    compact: Moves | None  # the same selection with every head compacted, should pages be short
    report: Arriving  # [4, L, H] int64: lengths, reserve, lengths if compacted, kept
    not_finite: Arriving  # [3, L] int64, values that were not finite; on its way after the report
    selects: bool

    @property
    def ready(self) -> bool:
        """Whether it can be carried out without waiting."""
        return self.report.here and self.not_finite.here


def _part(resident: Resident, group: slice, slots: int) -> Resident:
    """Some layers of it, without the padding beyond their own `slots`."""
    return Resident(**{each.name: getattr(resident, each.name)[group, :, :slots] for each in fields(resident)})


class Compressor:
    """Runs compression passes over the sequences of one pool."""

    def __init__(
        self,
        geometry: ModelGeometry,
        settings: CacheSettings,
        parts: Components | None,
        costs: DeviceCosts,
        admission: Admission,
        pool: PagePool,
        ring: QueryRing | None,
        layers: dict[int, AttentionSettings],
        head_pages: int,
    ) -> None:
        self.geometry, self.settings, self.parts, self.costs = geometry, settings, parts, costs
        self.admission, self.pool, self.ring, self.layers = admission, pool, ring, layers
        self.head_pages = head_pages

    def decide(self, cascade: Cascade) -> Decision:
        """Score, select and lay out; changes nothing but the calibration's state.

        Raises:
            PluginError: a component raised, or gave a wrong shape.
        """
        resident = cascade.resident()
        limits = self.admission.limits(cascade.seen_tokens)
        layers = self.pool.layers
        if self.parts is None or cascade.seen_tokens <= limits.lower:
            held = resident.valid.sum(-1)
            moves = cascade.plan(resident, Layout(resident.valid, torch.zeros_like(held, dtype=torch.bool), held))
            report = torch.stack([moves.lengths, moves.reserve, moves.lengths, held])
            nothing = Arriving(torch.zeros(3, layers, dtype=torch.int64))
            return Decision(cascade, resident, moves, None, Arriving(report), nothing, selects=False)
        widths = (cascade.sparse.lengths + cascade.dense.length).max(1)
        scored = [
            self._claim(self.parts, cascade, _part(resident, group, int(widths[group].max())), group)
            for group in self._groups(widths)
        ]
        keep = select(self.parts, Claims.stack([claims for claims, _ in scored]), limits)
        layout = lay_out(self.parts, keep, resident.valid, self._cost_model(), limits)
        moves = cascade.plan(resident, layout)
        everywhere = Layout(layout.keep, torch.ones_like(layout.rewrite), torch.zeros_like(layout.reserve_slots))
        compact = cascade.plan(resident, everywhere)
        kept = (layout.keep & resident.valid).sum(-1)
        report = torch.stack([moves.lengths, moves.reserve, compact.lengths, kept])
        return Decision(
            cascade,
            resident,
            moves,
            compact,
            Arriving(report),
            Arriving(torch.cat([broken for _, broken in scored], 1)),
            selects=True,
        )

    def carry_out(self, decision: Decision, reserved_pages: int) -> bool:
        """Move and free, once the report has arrived; gives whether tokens were selected.

        Every head is compacted where the layout would need more than `reserved_pages` or a block table's width.

        Raises:
            PluginError: a component gave values that are not finite; nothing has changed.
        """
        cascade = decision.cascade
        if decision.selects:
            assert self.parts is not None
            check_finite(self.parts, decision.not_finite.wait().tolist(), self.geometry.full_layers)
        lengths, reserve, compact_lengths, kept = decision.report.wait().numpy()
        moves = decision.moves
        if decision.compact is not None and self._too_many(cascade, np.maximum(lengths, reserve), reserved_pages):
            moves, lengths, reserve = decision.compact, compact_lengths, compact_lengths
        cascade.apply(decision.resident, moves, lengths, reserve, self._dropper(cascade))
        if decision.selects:
            cascade.record_compression(float(kept.mean()))
        return decision.selects

    def _too_many(self, cascade: Cascade, slots: Pages, reserved_pages: int) -> bool:
        others = sum(table.counts for table in self.pool.tables if table.lane == cascade.lane)
        others = others - cascade.sparse.table.counts
        pages = others + cascade.sparse.pages_of(slots)
        return bool(pages.sum() > reserved_pages or pages.max(initial=0) > self.head_pages)

    def _groups(self, widths: Pages) -> list[slice]:
        """Layers to score at once: as many alike, of `widths [L]` slots, as a moderate workspace holds."""
        slot_bytes = self.geometry.heads * self.geometry.head_dim * 2 * 4
        most = _CPU_WORKSPACE_BYTES if self.geometry.device.type == "cpu" else _WORKSPACE_BYTES
        groups: list[slice] = []
        for index in range(self.pool.layers):
            first = groups[-1].start if groups else 0
            together = (index + 1 - first) * int(widths[first : index + 1].max()) * slot_bytes
            if groups and together <= most and self._alike(first, index):
                groups[-1] = slice(first, index + 1)
            else:
                groups.append(slice(index, index + 1))
        return groups

    def _alike(self, first: int, second: int) -> bool:
        one, other = self.layers[first], self.layers[second]
        sinks = one.sink_logits is not None or other.sink_logits is not None
        turns = [self.geometry.frequencies[each.layer] for each in (one, other) if self.geometry.frequencies]
        weights = [self.geometry.output_weights[each.layer] for each in (one, other) if self.geometry.output_weights]
        if (
            len({None if turn is None else len(turn) for turn in turns}) > 1
            or len({weight is None for weight in weights}) > 1
        ):
            return False
        return not sinks and (one.scaling, one.softcap) == (other.scaling, other.softcap)

    def _claim(self, parts: Components, cascade: Cascade, resident: Resident, group: slice) -> tuple[Claims, Tensor]:
        """Claims of some layers, whose part `resident` is."""
        view = self._view(cascade, resident, group)
        return claim(parts, view, resident.protected, cascade.calibration[group])

    def _view(self, cascade: Cascade, resident: Resident, group: slice) -> ScoreView:
        settings = self.layers[group.start]
        keys, values = cascade.gather(resident, slice(None))
        queries = positions = hidden = statistic = None
        if self.ring is not None:
            queries, positions = self.ring.read(group, cascade.lane)
            hidden = self.ring.read_hidden(group, cascade.lane)
        if self.pool.statistic.shape[0]:
            statistic = self.pool.statistic.view(-1)[resident.slots]
        # An online statistic says nothing of a slot that attention did not see, so such a slot cannot come back; then
        # the outcome is the same whether a token was masked or let go.
        online = self.parts is not None and self.parts.scorer.online
        judged = resident.shown if online else resident.valid
        return ScoreView(
            keys=keys,
            values=values,
            positions=resident.positions,
            valid=judged,
            scaling=settings.scaling,
            layers=self.geometry.full_layers[group],
            softcap=settings.softcap,
            queries=queries,
            query_positions=positions,
            statistic=statistic,
            sink_logits=settings.sinks(self.geometry.heads),
            hidden_states=hidden,
            **self.geometry.facts(self.geometry.full_layers[group]),
        )

    def _dropper(self, cascade: Cascade) -> Callable[[int, TokenBatch], Tensor | None] | None:
        if not (cascade.last.holds_tokens or cascade.last.folds):
            return None

        def drop(index: int, tokens: TokenBatch) -> Tensor | None:
            query = None
            if cascade.last.needs_queries:
                assert self.ring is not None
                queries, _ = self.ring.read(slice(index, index + 1), cascade.lane)
                query = queries[0, :, :, -1].mean(1)
            scaling = self.layers[index].scaling
            return let_go(cascade.last, index, replace(tokens, scaling=scaling, query=query))

        return drop

    def _cost_model(self) -> CostModel:
        costs = self.costs
        return CostModel(
            read_seconds_per_byte=costs.read_seconds_per_byte,
            copy_seconds_per_byte=costs.copy_seconds_per_byte,
            launch_seconds=costs.launch_seconds,
            slot_bytes=2 * self.geometry.head_dim * self.geometry.dtype.itemsize,
            horizon_steps=self.settings.interval,
        )
