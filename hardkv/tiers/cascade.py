"""The cascade of one sequence: its tokens move from the dense to the sparse to the last tier, and only forward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hardkv.interfaces import CacheTier
from hardkv.memory import PagePool, Pages, upload
from hardkv.tiers.dense import DenseTier
from hardkv.tiers.sparse import SparseTier
from hardkv.tiers.store import PagedStore
from hardkv.types import Layout, TierShape, TokenBatch
from hardkv_kernels import rewrite

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resident:
    """Every token of a sequence that is held, per layer and head in position order."""

    slots: Tensor  # [L, H, N] int64, flat slot ids; any slot where not valid
    valid: Tensor  # [L, H, N] bool
    shown: Tensor  # [L, H, N] bool, valid slots that attention sees
    positions: Tensor  # [L, H, N] int64
    protected: Tensor  # [L, H, N] bool, sinks and local window
    window: Tensor  # [L, H, N] bool, the part of the dense tier that stays there


@dataclass(frozen=True)
class Moves:
    """What a layout asks of a sequence's tokens."""

    stays: Tensor  # [L, H, N] bool, resident tokens that are held afterwards, the dense window included
    shown: Tensor  # [L, H, N] bool, those of them that attention sees
    lengths: Tensor  # [L, H] int64, slots in the sparse tier afterwards
    reserve: Tensor  # [L, H] int64, slots there to hold pages for


class Cascade:
    """One sequence's tiers. `lane` is its place in the batch, which owns its pages."""

    def __init__(
        self, pool: PagePool, lane: int, sinks: int, local_window: int, interval: int, last: CacheTier
    ) -> None:
        self.pool, self.lane = pool, lane
        self.sinks, self.local_window = sinks, local_window
        self.dense = DenseTier(pool, lane, local_window + interval)
        self.sparse = SparseTier(pool, lane)
        self.last = last
        self.store: PagedStore | None = None
        self.seen_tokens = 0
        self.compressions = 0
        self.kept_after_compression: list[float] = []
        self.calibration: list[dict[str, Tensor]] = [{} for _ in range(pool.layers)]

    @property
    def extra_bytes(self) -> int:
        """Bytes held outside the pool."""
        states = sum(tensor.nbytes for state in self.calibration for tensor in state.values())
        return self.last.allocated_bytes + states

    def allocate(self, condensed_slots: int) -> None:
        """Hold pages for the dense tier, and room for the last one.

        Raises:
            CapacityError: the pool is too small.
        """
        self.dense.allocate(self._shape(self.dense.capacity))
        if self.last.lies_in_pages and condensed_slots:
            self.store = PagedStore(self.pool, self.lane, condensed_slots)
            self.store.allocate(self._shape(condensed_slots))
        if self.last.holds_tokens:
            self.last.allocate(self._shape(condensed_slots))

    def kept_tokens(self) -> Tensor:
        """Tokens attention sees per layer and head, `[L, H]` int64, those folded into the last tier not counted."""
        return self.sparse.kept() + self.dense.length

    def resident(self) -> Resident:
        """Look at every held token, as a compression pass needs it."""
        newest = self.dense.length
        slots = self._slots(self.sparse.lengths, newest)
        lengths = upload(self.sparse.lengths, slots.device)[..., None]
        column = torch.arange(slots.shape[-1], device=slots.device)
        valid = column < lengths + newest
        positions = self.pool.positions.view(-1)[slots].long()
        window = valid & (column - lengths >= max(newest - self.local_window, 0))
        protected = (valid & (positions < self.sinks)) | window
        shown = valid & (self.pool.bias.view(-1)[slots] > float("-inf"))
        return Resident(slots=slots, valid=valid, shown=shown, positions=positions, protected=protected, window=window)

    def gather(self, resident: Resident, layers: slice) -> tuple[Tensor, Tensor]:
        """K and V of some layers' resident tokens, `[L, H, N, D]` each."""
        flat = resident.slots[layers]
        head_dim = self.pool.head_dim
        return self.pool.keys.view(-1, head_dim)[flat], self.pool.values.view(-1, head_dim)[flat]

    def plan(self, resident: Resident, layout: Layout) -> Moves:
        """Work out a layout's moves, on the device."""
        keep = layout.keep & resident.valid
        stays = torch.where(layout.rewrite[..., None], keep, resident.valid) | resident.window
        window = resident.window.sum(-1)
        lengths = stays.sum(-1) - window
        return Moves(
            stays=stays,
            shown=keep | resident.window,
            lengths=lengths,
            reserve=torch.maximum(lengths, layout.reserve_slots - window),
        )

    def apply(
        self,
        resident: Resident,
        moves: Moves,
        lengths: Pages,
        reserve: Pages,
        drop: Callable[[int, TokenBatch], Tensor | None] | None,
    ) -> None:
        """Carry out the moves: age tokens out of the dense tier, compact or mask every head, free what is left over.

        `lengths, reserve [L, H]`: those of the moves, on the host. `drop(layer, tokens)` is told of the tokens that are
        let go, and may give new values `[H, N, D]` for those that stay. Heads that shrink go first, so that the pages
        they give back are there for those that grow.
        """
        if drop is not None:
            self._drop(resident, moves.stays, drop)
        scores = self._scores_of(resident)
        before, newest = self.sparse.lengths.copy(), self.dense.length
        window = min(newest, self.local_window)
        self.sparse.clear_bias()
        self.dense.clear_bias()
        grows = self.sparse.pages_of(reserve) > self.sparse.table.counts
        self._move(resident.slots, moves, lengths, window, ~grows)
        self.sparse.set_lengths(lengths, reserve)
        if grows.any():  # pages may have moved: slot ids are asked for again
            self._move(self._slots(before, newest), moves, lengths, window, grows)
        self.dense.lengths[:] = window
        if scores is None:
            self._reset_statistic()
        else:
            self._carry_scores(scores, moves.stays, lengths, window)

    def record_compression(self, mean_tokens: float) -> None:
        """Note the mean budget that a compression left."""
        self.compressions += 1
        self.kept_after_compression.append(mean_tokens)

    def close(self) -> None:
        """Free everything this sequence holds."""
        self.dense.reset()
        self.sparse.reset()
        for state in self.calibration:
            state.clear()
        try:
            self.last.reset()
        except Exception:
            # A plugin's: the sequence is over, and its pages must be freed all the same.
            logger.exception("condenser '%s' failed to reset", self.last.name)
        if self.store is not None:
            self.store.reset()

    def _shape(self, slots: int) -> TierShape:
        pool = self.pool
        return TierShape(
            pool.layers, pool.heads, pool.head_dim, slots, pool.keys.dtype, pool.keys.device, store=self.store
        )

    def _slots(self, lengths: Pages, newest: int) -> Tensor:
        """Flat ids of the first `lengths [L, H]` sparse slots and the first `newest` dense ones, `[L, H, N]`."""
        longest = int(lengths.max(initial=0))
        sparse = self.sparse.slots(longest)
        if not newest:
            return sparse
        held = upload(lengths, sparse.device)[..., None]
        column = torch.arange(longest + newest, device=sparse.device)
        dense = self.dense.slots(newest).gather(-1, (column - held).clamp(0, newest - 1))
        return torch.where(column < held, torch.nn.functional.pad(sparse, (0, newest)), dense)

    def _move(
        self,
        source: Tensor,
        moves: Moves,
        lengths: Pages,
        window: int,
        heads: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    ) -> None:
        """Move the tokens of the heads that `heads [L, H]` marks to their new slots."""
        pool, width = self.pool, source.shape[-1]
        target = self._slots(np.where(heads, lengths, 0), window)
        target = torch.nn.functional.pad(target, (0, max(width - target.shape[-1], 0)))[..., :width]
        chosen = upload(heads, source.device)[..., None]
        rewrite(
            source.flatten(0, 1),
            (moves.stays & chosen).flatten(0, 1),
            moves.shown.flatten(0, 1),
            target.flatten(0, 1),
            pool.keys,
            pool.values,
            pool.positions,
            pool.bias,
        )

    def _reset_statistic(self) -> None:
        if self.pool.statistic.shape[0]:
            pages = np.concatenate([table.pages[table.pages >= 0] for table in (self.sparse.table, self.dense.table)])
            self.pool.statistic.index_fill_(0, upload(pages, self.pool.bias.device), 0.0)

    def _scores_of(self, resident: Resident) -> Tensor | None:
        """What each resident token scored when it entered, `[L, H, N]`; None where scores belong to the round."""
        return self.pool.statistic.view(-1)[resident.slots] if self.pool.statistic_stays else None

    def _carry_scores(self, scores: Tensor, stays: Tensor, lengths: Pages, window: int) -> None:
        """Write the scores of the tokens that stay at the slots they have come to."""
        target = self._slots(lengths, window)
        rank = (torch.cumsum(stays, -1) - 1).clamp_min(0)
        nobody = self.pool.nobody_page * self.pool.page_slots
        place = torch.where(stays, target.gather(-1, rank), nobody)
        self.pool.statistic.view(-1).index_copy_(0, place.flatten(), scores.flatten())

    def _drop(self, resident: Resident, stays: Tensor, drop: Callable[[int, TokenBatch], Tensor | None]) -> None:
        for layer in range(self.pool.layers):
            keys, values = self.gather(resident, slice(layer, layer + 1))
            tokens = TokenBatch(
                keys=keys[0],
                values=values[0],
                positions=resident.positions[layer],
                mask=resident.valid[layer] & ~stays[layer],
                survivors=stays[layer],
            )
            folded = drop(layer, tokens)
            if folded is not None:
                nobody = self.pool.nobody_page * self.pool.page_slots
                place = torch.where(stays[layer], resident.slots[layer], nobody).flatten()
                new = folded.to(self.pool.values.dtype).reshape(-1, self.pool.head_dim)
                self.pool.values.view(-1, self.pool.head_dim).index_copy_(0, place, new)
