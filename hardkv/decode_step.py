"""One decode step's work on the cache: give the new tokens their slots, attend every tier, fold the statistic.

All that a step needs to know lies in tensors whose addresses never change. What changes only between steps (which lane
each row stands for, who owns which page) is written by `bind`; `open`, `attend` and `close` read nothing back and have
no shape that depends on data, so that they can be captured in one CUDA graph and replayed after sequences joined, left
or were compressed. A plugin that fails for one sequence is noted in `failures`, by lane; the others' step goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hardkv.block_tables import BlockTables
from hardkv.errors import HardKVError
from hardkv.interfaces import EntryScorer, ImportanceScorer, OnlineScorer
from hardkv.memory import PagePool, upload
from hardkv.online_statistic import OnlineStatistic
from hardkv.pipeline import ask, by_row, enter
from hardkv.query_ring import QueryRing
from hardkv.tiers.cascade import Cascade
from hardkv.tiers.sliding import SlidingRings
from hardkv.types import AttentionCall, EnteringTokens
from hardkv_kernels import (
    PageRun,
    append,
    append_plain,
    attend_pages,
    merge_states,
    open_slots,
    page_run,
    plan_decode,
    ragged_decode,
)


class DecodeStep:
    """A decode step of up to `rows` rows; each stands for one of `lanes` sequences, or for nobody."""

    def __init__(
        self,
        pool: PagePool,
        tables: BlockTables,
        scorer: ImportanceScorer | None,
        ring: QueryRing | None,
        sliding: SlidingRings,
        group: int,
        lanes: int,
        rows: int,
    ) -> None:
        device = pool.bias.device
        self.pool, self.tables, self.ring, self.sliding = pool, tables, ring, sliding
        self.group, self.nobody = group, lanes
        self.counters = torch.zeros(2, lanes + 1, dtype=torch.int64, device=device)  # dense length, tokens seen
        self._counted = np.zeros((2, lanes + 1), dtype=np.int64)  # the same, as the host knows it
        self._all_lanes = torch.full((rows,), lanes, dtype=torch.int64, device=device)
        self._all_starts = torch.zeros(pool.layers * (rows * pool.heads + 1), dtype=torch.int32, device=device)
        self._owner = torch.zeros(pool.manager.pages + 1, dtype=torch.int64, device=device)
        self.statistic = OnlineStatistic(pool, scorer if isinstance(scorer, OnlineScorer) else None, group, rows)
        self.entry = scorer if isinstance(scorer, EntryScorer) else None
        self.failures: dict[int, HardKVError] = {}
        self.failed_for_nobody = False
        """A plugin failed for rows that stand for nobody, as it would unseen in every replay of a graph."""
        self._bound: tuple[int, int, tuple[int, ...]] = (-1, 0, ())
        self.batch: list[Cascade] = []

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the step's tables."""
        own = sum(buffer.nbytes for buffer in (self.counters, self._all_lanes, self._all_starts, self._owner))
        return own + self.tables.allocated_bytes + self.statistic.allocated_bytes

    @property
    def capturable(self) -> bool:
        """Whether every tier in the batch lies in pages; others are attended one by one, from Python."""
        return not self._apart

    # Between steps

    def bind(self, batch: Sequence[Cascade], rows: int | None = None) -> None:
        """Let the first rows stand for the sequences of `batch`, and the others, up to `rows`, for nobody."""
        rows = len(batch) if rows is None else rows
        self.failures.clear()
        self.failed_for_nobody = False
        self.tables.refresh()
        self._write_counters(batch)
        # The step counts on the device, `advance` on the host: if one fails in between, the next step writes them anew.
        self._counted[:, [cascade.lane for cascade in batch]] = -1
        now = (self.tables.version, rows, tuple(cascade.lane for cascade in batch))
        if now == self._bound:
            return
        self._bound, self.batch = now, list(batch)
        pool, owners = self.pool, rows * self.pool.heads
        lanes = np.full(rows, self.nobody, dtype=np.int64)
        lanes[: len(batch)] = now[2]
        self.lanes = self._all_lanes[:rows]
        self.lanes.copy_(upload(lanes, pool.bias.device))
        self._starts = self._all_starts[: pool.layers * (owners + 1)].view(pool.layers, owners + 1)
        plan_decode(self.tables.pages, self.tables.counts, self.lanes, self._starts, self._owner)
        self.sliding.bind(self.lanes)
        spans = [pool.span(layer) for layer in range(pool.layers)]
        self._spans = [(span.start, span.stop) for span in spans]
        self._runs = [self._run(layer, span, owners) for layer, span in enumerate(spans)] if pool.layer_regions else []
        complete = pool.layer_regions and len(batch) == len({table.lane for table in pool.tables})
        self.statistic.bind(self._owner, owners, complete)
        self._apart = any(cascade.last.holds_tokens and not cascade.last.lies_in_pages for cascade in batch)

    def _run(self, layer: int, span: slice, owners: int) -> PageRun:
        pool = self.pool
        return page_run(pool.keys, pool.values, pool.bias, self._owner, layer * owners, span, owners)

    def advance(self) -> None:
        """Count the step that was done, on the host."""
        for cascade in self.batch:
            cascade.dense.advance()
            cascade.seen_tokens += 1
            self._counted[:, cascade.lane] = cascade.dense.length, cascade.seen_tokens

    def _write_counters(self, batch: Sequence[Cascade]) -> None:
        wanted = self._counted.copy()
        for cascade in batch:
            wanted[:, cascade.lane] = cascade.dense.length, cascade.seen_tokens
        if not np.array_equal(wanted, self._counted):
            self.counters.copy_(upload(wanted, self.counters.device))
            self._counted = wanted

    # Within a step

    def open(self) -> Tensor:
        """Give every row's new token its slot; gives the tokens' positions `[R]`."""
        pool, ring = self.pool, self.ring
        opened: tuple[Tensor, Tensor] = open_slots(
            self.tables.pages,
            self.lanes,
            self.counters[0],
            self.counters[1],
            pool.bias,
            pool.positions,
            None if ring is None else ring.positions,
        )
        self._slots, self.positions = opened
        self.sliding.open(self.lanes, self.positions)
        return self.positions

    def attend(self, index: int, call: AttentionCall) -> Tensor:
        """Append one token of full-attention layer `index` and attend it over all tiers; out `[R, 1, H*G, D]`."""
        rows, query_heads, _, head_dim = call.query.shape
        pool, ring = self.pool, self.ring
        query = call.query.reshape(rows, pool.heads, self.group, head_dim)
        if ring is not None and call.hidden_states is not None:
            ring.write_hidden(index, self.lanes, self.positions, call.hidden_states[:, 0])
        add = append_plain if self._runs else append
        add(
            call.keys.reshape(rows, pool.heads, head_dim),
            call.values.reshape(rows, pool.heads, head_dim),
            self._slots[index],
            pool.keys,
            pool.values,
            None if ring is None else query,
            None if ring is None else ring.queries[index],
            self.lanes,
            self.positions,
        )
        out, lse, probabilities = self._attend_pages(index, call, query)
        share = None
        if self._apart:
            inside = lse
            out, lse = self._with_last_tiers(index, call, query, out, lse)
            share = torch.exp(inside - lse)
        self._blame(self.statistic.take(index, *self._spans[index], lse, probabilities, share))
        if self.entry is not None:
            self._score_entering(self.entry, index, call, query)
        return out.view(rows, 1, query_heads, head_dim)

    def _attend_pages(self, index: int, call: AttentionCall, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attend `query [R, H, G, D]` over what lies in pages: output, lse and, where they are folded at once, p."""
        pool, sinks = self.pool, call.settings.sinks(self.pool.heads)
        if self._runs:
            run = self._runs[index]
            return attend_pages(query, run, call.scaling, call.softcap, sinks, self.statistic.at_once)
        answer: tuple[Tensor, Tensor, Tensor] = ragged_decode(
            query,
            pool.keys,
            pool.values,
            pool.bias,
            self.tables.pages[index],
            self.lanes,
            self._starts[index],
            self._owner,
            index * query.shape[0] * pool.heads,
            *self._spans[index],
            call.scaling,
            call.softcap,
            sinks,
            self.statistic.logits,
            self.statistic.at_once,
        )
        return answer

    def attend_sliding(self, layer: int, call: AttentionCall) -> Tensor:
        """The same for a sliding-window layer."""
        rows, query_heads, _, head_dim = call.query.shape
        query = call.query.reshape(rows, self.pool.heads, self.group, head_dim)
        out = self.sliding.attend(layer, call, query, self.lanes, call.settings.sinks(self.pool.heads))
        return out.view(rows, 1, query_heads, head_dim)

    def close(self) -> None:
        """Fold the step's attention into the statistic, where that was not done layer by layer."""
        self._blame(self.statistic.close())

    def _blame(self, failures: Mapping[int, HardKVError]) -> None:
        """Note what went wrong, by row; a sequence's first failure is the one that is told."""
        for row, error in failures.items():
            if row < len(self.batch):
                self.failures.setdefault(self.batch[row].lane, error)
            else:
                self.failed_for_nobody = True

    def _score_entering(self, scorer: EntryScorer, index: int, call: AttentionCall, query: Tensor) -> None:
        """Score the rows' new tokens, once and for all."""
        entering = EnteringTokens(
            layer=call.layer,
            keys=call.keys,
            values=call.values,
            queries=query[:, :, :, None],
            positions=self.positions[:, None],
            hidden_states=call.hidden_states,
        )
        scores, failures = by_row(lambda tokens: enter(scorer, tokens), entering)
        self._blame(failures)
        if scores is not None:
            self.pool.statistic.view(-1).index_copy_(0, self._slots[index], scores.flatten())

    def _with_last_tiers(
        self, index: int, call: AttentionCall, query: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compose with what last tiers hold apart from the pages."""
        outs, lses = torch.zeros_like(out, dtype=torch.float32), torch.full_like(lse, float("-inf"))
        for row, cascade in enumerate(self.batch):
            try:
                outs[row], lses[row] = ask(cascade.last, index, query[row], call.scaling, call.softcap)
            except HardKVError as error:
                self._blame({row: error})
        parts = torch.stack([out.float(), outs]).flatten(1, 3), torch.stack([lse, lses]).flatten(1)
        merged: tuple[Tensor, Tensor] = merge_states(*parts)
        return merged[0].to(out.dtype).view(out.shape), merged[1].view(lse.shape)
