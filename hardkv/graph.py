"""The decode step: tables that change only between steps, and the attention of one new token per sequence.

All metadata of a step is prepared before it: where each sequence's token goes and who owns which page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hardkv.interfaces import OnlineScorer
from hardkv.memory import FREE, PagePool
from hardkv.query_ring import QueryRing
from hardkv.tiers.cascade import Cascade
from hardkv.tiers.sliding import SlidingRing
from hardkv.types import AttentionCall
from hardkv_kernels import merge_states, paged_attention


class DecodeStep:
    """One decode step of a batch of sequences over the page pool."""

    def __init__(self, pool: PagePool, scorer: OnlineScorer | None, ring: QueryRing | None) -> None:
        self.pool, self.scorer, self.ring = pool, scorer, ring
        self._flat_keys, self._flat_values = (tensor.view(-1, pool.head_dim) for tensor in (pool.keys, pool.values))
        self.batch: list[Cascade] = []
        self._bound: tuple[int, tuple[int, ...]] = (-1, ())
        self._spans: list[slice] = []
        self._owners: list[Tensor] = []

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the step's tables."""
        tables = [*self._owners]
        if self.batch:
            tables += [self._dense_slots, self._slots, self.positions, self._lanes]
        return sum(table.nbytes for table in tables)

    def begin(self, batch: Sequence[Cascade]) -> None:
        """Give every sequence's next token its slot; call before the model runs."""
        self._bind(batch)
        device = self.pool.bias.device
        lengths = torch.tensor([cascade.dense.length for cascade in batch], device=device)
        self.positions = torch.tensor([cascade.seen_tokens for cascade in batch], device=device)
        layers, _, heads, _ = self._dense_slots.shape
        index = lengths[None, :, None, None].expand(layers, len(batch), heads, 1)
        self._slots = self._dense_slots.gather(-1, index).flatten(1)  # [L, B * H]
        flat = self._slots.flatten()
        self.pool.bias.view(-1).index_fill_(0, flat, 0.0)
        stamps = self.positions.to(torch.int32)[None, :, None].expand(layers, -1, heads).flatten()
        self.pool.positions.view(-1).index_copy_(0, flat, stamps)
        if self.ring is not None:
            self.ring.advance(self._lanes, self.positions)
        for cascade in batch:
            cascade.dense.advance()
            cascade.seen_tokens += 1

    def attend(self, index: int, call: AttentionCall) -> Tensor:
        """Append one token of full-attention layer `index` and attend it over all tiers; out `[B, 1, H*G, D]`."""
        batch, query_heads, _, head_dim = call.query.shape
        heads = call.keys.shape[1]
        owners, group = batch * heads, query_heads // heads
        query = call.query.reshape(owners, group, head_dim)
        pool, span = self.pool, self._spans[index]
        slots = self._slots[index]
        self._flat_keys.index_copy_(0, slots, call.keys.reshape(owners, head_dim))
        self._flat_values.index_copy_(0, slots, call.values.reshape(owners, head_dim))
        sinks = None
        if call.sink_logits is not None:
            sinks = call.sink_logits.float().view(1, heads, group).expand(batch, -1, -1).reshape(owners, group)
        answer: tuple[Tensor, Tensor, Tensor] = paged_attention(
            query,
            pool.keys[span],
            pool.values[span],
            pool.bias[span],
            self._owners[index],
            call.scaling,
            call.softcap,
            sinks,
            self.scorer is not None,
        )
        out, lse, probabilities = answer
        if self._last_tiers:
            out, share = self._with_last_tiers(index, call, query, out, lse)
            if self.scorer is not None:
                probabilities *= torch.nn.functional.pad(share, (0, 0, 0, 1))[self._owners[index], :, None]
        if self.scorer is not None:
            self.scorer.update(pool.statistic[span], probabilities)
        if self.ring is not None:
            self.ring.write(index, self._lanes, self.positions, call.query.view(batch, heads, group, head_dim))
        return out.view(batch, 1, query_heads, head_dim)

    def _with_last_tiers(
        self, index: int, call: AttentionCall, query: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compose with what the last tiers hold; gives the output and the share of mass that stayed, `[O, G]`."""
        heads = call.keys.shape[1]
        answers = [
            cascade.last.attend(index, query[row * heads : (row + 1) * heads], call.scaling, call.softcap)
            for row, cascade in enumerate(self.batch)
        ]
        outs, lses = torch.cat([answer[0] for answer in answers]), torch.cat([answer[1] for answer in answers])
        merged, total = merge_states([out.float(), outs], [lse, lses])
        return merged.to(out.dtype), torch.exp(lse - total)

    def attend_sliding(self, ring: SlidingRing, call: AttentionCall) -> Tensor:
        """The same for a sliding-window layer."""
        batch, query_heads, _, head_dim = call.query.shape
        heads = call.keys.shape[1]
        group = query_heads // heads
        sinks = None
        if call.sink_logits is not None:
            sinks = call.sink_logits.float().view(1, heads, group).expand(batch, -1, -1).reshape(-1, group)
        out = ring.step(
            self._lanes,
            self.positions,
            call.query.reshape(batch, heads, group, head_dim),
            call.keys[:, :, 0],
            call.values[:, :, 0],
            call.scaling,
            call.softcap,
            sinks,
        )
        return out.reshape(batch, 1, query_heads, head_dim)

    def _bind(self, batch: Sequence[Cascade]) -> None:
        """Rebuild the tables when pages moved or the batch changed."""
        now = (self.pool.version, tuple(cascade.lane for cascade in batch))
        if now == self._bound:
            return
        pool, heads = self.pool, self.pool.heads
        device = pool.bias.device
        row_of_lane = np.full(max(cascade.lane for cascade in batch) + 2, FREE, dtype=np.int64)
        for row, cascade in enumerate(batch):
            row_of_lane[cascade.lane] = row
        nobody = len(batch) * heads
        self._spans, self._owners = [], []
        for layer in range(pool.layers):
            span = pool.manager.span(layer)
            owner = pool.manager.owner[span]
            lane = np.where(owner == FREE, -1, owner // heads)
            lane = np.where(lane < len(row_of_lane) - 1, lane, -1)
            rows = row_of_lane[lane]  # lane -1 reads the last entry, which is FREE
            owners = np.where(rows == FREE, nobody, rows * heads + owner % heads)
            self._spans.append(span)
            self._owners.append(torch.from_numpy(owners).to(device))
        self._dense_slots = torch.stack([cascade.dense.slots(cascade.dense.capacity) for cascade in batch], 1)
        self._lanes = torch.tensor([cascade.lane for cascade in batch], device=device)
        self.batch = list(batch)
        self._last_tiers = any(cascade.last.holds_tokens for cascade in batch)
        self._bound = now
