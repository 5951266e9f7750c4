"""The cascade of one sequence: its tokens move from the dense to the sparse to the last tier, and only forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hardkv.interfaces import CacheTier
from hardkv.memory import PagePool
from hardkv.tiers.dense import DenseTier
from hardkv.tiers.sparse import SparseTier
from hardkv.types import Layout, TokenBatch


@dataclass(frozen=True)
class Resident:
    """Every token of a sequence that is held, per layer and head in position order."""

    slots: Tensor  # [L, H, N] int64, flat slot ids; any slot where not valid
    valid: Tensor  # [L, H, N] bool
    shown: Tensor  # [L, H, N] bool, valid slots that attention sees
    positions: Tensor  # [L, H, N] int64
    protected: Tensor  # [L, H, N] bool, sinks and local window
    window: Tensor  # [L, H, N] bool, the part of the dense tier that stays there


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
        self.seen_tokens = 0
        self.compressions = 0
        self.kept_after_compression: list[float] = []
        self.calibration: list[dict[str, Tensor]] = [{} for _ in range(pool.layers)]

    @property
    def extra_bytes(self) -> int:
        """Bytes held outside the pool."""
        states = sum(tensor.nbytes for state in self.calibration for tensor in state.values())
        return self.last.allocated_bytes + states

    def kept_tokens(self) -> Tensor:
        """Tokens attention sees per layer and head, `[L, H]` int64, those folded into the last tier not counted."""
        return self.sparse.kept() + self.dense.length

    def resident(self) -> Resident:
        """Look at every held token, as a compression pass needs it."""
        device = self.pool.bias.device
        newest = self.dense.length
        sparse, dense = self.sparse.slots(), self.dense.slots(max(newest, 1))
        lengths = torch.from_numpy(self.sparse.lengths).to(device)[..., None]
        column = torch.arange(self.sparse.longest + newest, device=device)
        older = column < lengths
        offset = (column - lengths).clamp(0, max(newest - 1, 0))
        slots = torch.where(older, torch.nn.functional.pad(sparse, (0, newest)), dense.gather(-1, offset))
        valid = column < lengths + newest
        positions = self.pool.positions.view(-1)[slots].long()
        window = valid & ~older & (column - lengths >= newest - self.local_window)
        protected = (valid & (positions < self.sinks)) | window
        shown = valid & (self.pool.bias.view(-1)[slots] > float("-inf"))
        return Resident(slots=slots, valid=valid, shown=shown, positions=positions, protected=protected, window=window)

    def gather(self, resident: Resident, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer's resident tokens, `[H, N, D]` each."""
        flat = resident.slots[layer]
        head_dim = self.pool.head_dim
        return self.pool.keys.view(-1, head_dim)[flat], self.pool.values.view(-1, head_dim)[flat]

    def apply(self, resident: Resident, layout: Layout, drop: Callable[[int, TokenBatch], None] | None) -> None:
        """Carry out a layout: age tokens out of the dense tier, compact or mask every head, free what is left over.

        `drop(layer, tokens)` is told of the tokens that a compaction lets go.
        """
        pool, head_dim = self.pool, self.pool.head_dim
        rewrite = layout.rewrite[..., None]
        keep = layout.keep & resident.valid
        stays = torch.where(rewrite, keep, resident.valid) & ~resident.window
        if drop is not None:
            self._drop(resident, resident.valid & ~keep & ~resident.window & rewrite, drop)
        is_dense = (
            torch.arange(keep.shape[-1], device=keep.device)
            >= torch.from_numpy(self.sparse.lengths).to(keep.device)[..., None]
        )
        rank = torch.cumsum(stays, -1) - 1
        moved = stays & (rewrite | is_dense)
        flat_keys, flat_values = pool.keys.view(-1, head_dim), pool.values.view(-1, head_dim)
        leaving, staying = resident.slots[moved], resident.slots[resident.window]
        moved_keys, moved_values = flat_keys[leaving], flat_values[leaving]
        window_keys, window_values = flat_keys[staying], flat_values[staying]
        lengths = stays.sum(-1)
        self.sparse.set_lengths(lengths.cpu().numpy(), (layout.reserve_slots - self.local_window).cpu().numpy())
        # Pages may have moved: from here on slot ids are asked for again.
        target = self.sparse.slots(max(int(self.sparse.longest), 1)).gather(-1, rank.clamp_min(0))
        flat_keys[target[moved]] = moved_keys
        flat_values[target[moved]] = moved_values
        pool.positions.view(-1)[target[moved]] = resident.positions[moved].to(torch.int32)
        self.sparse.clear_bias()
        shown = stays & keep
        pool.bias.view(-1)[target[shown]] = 0.0
        self._refill_dense(window_keys, window_values, resident.positions[resident.window])
        self._reset_statistic()

    def record_compression(self) -> None:
        """Note the mean budget that a compression left."""
        self.compressions += 1
        self.kept_after_compression.append(float(self.kept_tokens().float().mean()))

    def close(self) -> None:
        """Free everything this sequence holds."""
        self.dense.reset()
        self.sparse.reset()
        self.last.reset()
        for state in self.calibration:
            state.clear()

    def _refill_dense(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        pool, head_dim = self.pool, self.pool.head_dim
        tokens = keys.shape[0] // (pool.layers * pool.heads)
        slots = self.dense.slots(self.dense.capacity)
        pool.bias.view(-1)[slots.flatten()] = float("-inf")
        front = slots[..., :tokens].flatten()
        pool.keys.view(-1, head_dim)[front] = keys
        pool.values.view(-1, head_dim)[front] = values
        pool.positions.view(-1)[front] = positions.to(torch.int32)
        pool.bias.view(-1)[front] = 0.0
        self.dense.lengths[:] = tokens

    def _reset_statistic(self) -> None:
        if self.pool.statistic.shape[0]:
            pages = np.concatenate([table.pages[table.pages >= 0] for table in (self.sparse.table, self.dense.table)])
            self.pool.statistic[torch.from_numpy(pages).to(self.pool.bias.device)] = 0.0

    def _drop(self, resident: Resident, dropped: Tensor, drop: Callable[[int, TokenBatch], None]) -> None:
        for layer in range(self.pool.layers):
            keys, values = self.gather(resident, layer)
            drop(layer, TokenBatch(keys=keys, values=values, positions=resident.positions[layer], mask=dropped[layer]))
