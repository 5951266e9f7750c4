"""Prefill of one sequence, layer by layer: exact attention over the prompt, then selection, then the next layer.

At any moment the uncompressed K and V of one layer are held, and of the layers before it what the budget admits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hardkv.config import Components
from hardkv.interfaces import EntryScorer, OnlineScorer
from hardkv.pipeline import check_finite, claim, count, enter, keep_best, prompt_rows, seeded_statistic, select
from hardkv.types import AttentionCall, Claims, EnteringTokens, Limits, ModelGeometry, ScoreView, TokenBatch
from hardkv_kernels import causal_attention


@dataclass
class _Staged:
    """What is held of a layer until its final selection: K and V of the masked tokens, rows of `mask` end to end."""

    mask: Tensor  # [H, N] bool
    keys: Tensor  # [sum of mask, D]
    values: Tensor  # [sum of mask, D]
    scaling: float
    query: Tensor  # [H, D], the newest, mean over the group
    scores: Tensor | None  # [H, N] float32, given on entry

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.mask.nbytes

    def shrink(self, keep: Tensor) -> None:
        """Hold only the tokens of `keep` from here on."""
        within = keep[self.mask]
        self.mask, self.keys, self.values = keep & self.mask, self.keys[within], self.values[within]

    def spread(self) -> TokenBatch:
        """The held tokens, at their places in the prompt."""
        heads, tokens = self.mask.shape
        spread = self.keys.new_zeros(2, heads, tokens, self.keys.shape[-1])
        spread[0][self.mask], spread[1][self.mask] = self.keys, self.values
        positions = torch.arange(tokens, device=self.mask.device).expand(heads, tokens)
        return TokenBatch(spread[0], spread[1], positions, self.mask, self.scaling, self.query, scores=self.scores)


@dataclass(frozen=True)
class PromptLayer:
    """One layer of a prompt, once all of it has been seen."""

    keys: Tensor  # [H, N, D]
    values: Tensor  # [H, N, D]
    queries: Tensor  # [H, G, at least W, D], the newest
    hidden: Tensor | None  # [1, at least W, M], the newest
    rows: int  # W

    def window(self) -> tuple[Tensor, Tensor | None]:
        """The last W queries `[H, G, W, D]` and hidden states `[1, W, M]`."""
        return self.newest(self.rows), None if self.hidden is None else self.hidden[:, -self.rows :]

    def newest(self, rows: int) -> Tensor:
        """So many of the last queries, or as many as are held, `[H, G, R, D]`."""
        return self.queries[:, :, -rows:]


class Prefill:
    """Takes the attention calls of one prompt, whole or in chunks along the sequence, and places the kept tokens.

    With a budget that spans the model, a layer is staged under the threshold that the layers so far can afford; each
    further layer only raises it, so the stage never exceeds the model's budget by more than a tenth and one layer.
    """

    def __init__(
        self,
        parts: Components | None,
        limits: Limits,
        tokens: int,
        rows: int,
        place: Callable[[int, TokenBatch], None],
        drop: Callable[[int, TokenBatch], Tensor | None] | None,
        calibration: list[dict[str, Tensor]],
        report_bytes: Callable[[int], int],
        geometry: ModelGeometry,
    ) -> None:
        self.geometry = geometry
        self.parts, self.limits, self.tokens, self.rows = parts, limits, tokens, min(rows, tokens)
        self.place, self.drop, self.calibration, self.report_bytes = place, drop, calibration, report_bytes
        self.selects = parts is not None and tokens > limits.lower
        self.claims: list[Claims] = []
        self.staged: list[_Staged] = []
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._queries: list[Tensor] = []
        self._hidden: list[Tensor] = []
        self._filled = 0

    def attend(self, call: AttentionCall, window: int | None) -> tuple[Tensor, bool]:
        """Answer one call of batch 1 exactly; gives `(out [H, G, S, D], layer is complete)`."""
        heads, fresh = call.keys.shape[1], call.keys.shape[2]
        group = call.query.shape[1] // heads
        query = call.query[0].view(heads, group, fresh, -1)
        if self._filled == 0 and fresh == self.tokens:
            self._keys, self._values = call.keys[0], call.values[0]
        else:
            if self._keys is None or self._filled == 0:
                self._keys = call.keys.new_empty(heads, self.tokens, call.keys.shape[-1])
                self._values = torch.empty_like(self._keys)
            assert self._values is not None
            self._keys[:, self._filled : self._filled + fresh] = call.keys[0]
            self._values[:, self._filled : self._filled + fresh] = call.values[0]
        assert self._values is not None
        self._filled += fresh
        self._remember(query, call)
        out = causal_attention(
            query,
            self._keys[:, : self._filled],
            self._values[:, : self._filled],
            call.scaling,
            window,
            call.softcap,
            call.settings.sinks(heads),
        )
        return out, self._filled == self.tokens

    def take_layer(self) -> PromptLayer:
        """Hand over the complete layer."""
        assert self._keys is not None
        assert self._values is not None
        queries = torch.cat(self._queries, 2)
        hidden = torch.cat(self._hidden, 1) if self._hidden else None
        layer = PromptLayer(self._keys, self._values, queries, hidden, self.rows)
        self._keys, self._values, self._queries, self._hidden, self._filled = None, None, [], [], 0
        return layer

    def finish_layer(self, index: int, layer: PromptLayer, call: AttentionCall) -> None:
        """Select among a full-attention layer's tokens and place or stage what is kept; `index` counts such layers."""
        keys, values = layer.keys, layer.values
        heads, tokens, _ = keys.shape
        self.report_bytes(self._staged_bytes() + keys.nbytes + values.nbytes)
        everything = torch.ones(heads, tokens, dtype=torch.bool, device=keys.device)
        scores = self._scores_on_entry(layer, call)
        query = layer.queries[:, :, -1].mean(1)
        staged = _Staged(everything, keys.flatten(0, 1), values.flatten(0, 1), call.scaling, query, scores)
        if not self.selects:
            self.place(index, staged.spread())
            return
        assert self.parts is not None
        claims = self._claim(index, layer, call, scores)
        if self.parts.budget.scope == "layer" and self.parts.regularizer.mode != "union":
            self._shrink(index, staged, select(self.parts, claims, self.limits)[0])
            self.place(index, staged.spread())
            return
        self.claims.append(claims)
        self.staged.append(staged)
        if self.parts.regularizer.mode != "union":
            self._shrink_stage()

    def finish(self) -> None:
        """Settle a selection that spans the model, and place it."""
        if not self.staged:
            return
        assert self.parts is not None
        final = select(self.parts, Claims.stack(self.claims), self.limits)
        for index, keep in enumerate(final):
            staged = self.staged[index]
            self._shrink(index, staged, keep)
            self.place(index, staged.spread())
            staged.shrink(torch.zeros_like(keep))
        self.claims, self.staged = [], []

    def _remember(self, query: Tensor, call: AttentionCall) -> None:
        """Hold what of a chunk's queries `[H, G, S, D]` and hidden states is read once the layer is complete."""
        scorer = None if self.parts is None else self.parts.scorer
        rows = self.rows
        if scorer is not None and self.geometry.windows[call.layer] is None:
            rows = self.tokens if scorer.scores_on_entry else max(rows, self._prompt_rows)
        _append_newest(self._queries, query, 2, rows)
        if call.hidden_states is not None:
            _append_newest(self._hidden, call.hidden_states, 1, rows)

    def _scores_on_entry(self, layer: PromptLayer, call: AttentionCall) -> Tensor | None:
        """What a scorer that scores on entry gives every token of the prompt, `[H, N]`."""
        if self.parts is None or not isinstance(self.parts.scorer, EntryScorer):
            return None
        entering = EnteringTokens(
            layer=call.layer,
            keys=layer.keys[None],
            values=layer.values[None],
            queries=layer.queries[None],
            positions=torch.arange(self.tokens, device=layer.keys.device)[None],
            hidden_states=layer.hidden,
        )
        return enter(self.parts.scorer, entering)[0]

    @property
    def _prompt_rows(self) -> int:
        """How many of the prompt's newest queries an online scorer reads."""
        assert self.parts is not None
        asked = prompt_rows(self.parts.scorer) if isinstance(self.parts.scorer, OnlineScorer) else None
        return self.rows if asked is None else min(asked, self.tokens)

    def _claim(self, index: int, layer: PromptLayer, call: AttentionCall, scores: Tensor | None) -> Claims:
        assert self.parts is not None
        heads, tokens, _ = layer.keys.shape
        queries, hidden = layer.window()
        positions = torch.arange(tokens, device=queries.device)
        view = ScoreView(
            keys=layer.keys[None],
            values=layer.values[None],
            positions=positions.expand(1, heads, tokens),
            valid=torch.ones(1, heads, tokens, dtype=torch.bool, device=queries.device),
            scaling=call.scaling,
            layers=(call.layer,),
            softcap=call.softcap,
            queries=queries[None],
            query_positions=positions[None, tokens - queries.shape[2] :],
            statistic=None if scores is None else scores[None],
            sink_logits=call.settings.sinks(heads),
            hidden_states=hidden,
            **self.geometry.facts((call.layer,)),
        )
        if self.parts.scorer.online:
            assert isinstance(self.parts.scorer, OnlineScorer)
            newest = layer.newest(self._prompt_rows)
            wider = replace(view, queries=newest[None], query_positions=positions[None, tokens - newest.shape[2] :])
            view = view.with_statistic(seeded_statistic(self.parts.scorer, wider))
        protected = (positions < self.limits.sinks) | (positions >= tokens - self.limits.local_window)
        claims, broken = claim(self.parts, view, protected.expand(1, heads, tokens), [self.calibration[index]])
        check_finite(self.parts, broken.tolist(), [call.layer])
        return claims

    def _shrink_stage(self) -> None:
        """Cut the newest layer to its provisional selection, and the older ones once they have grown stale."""
        assert self.parts is not None
        votes = self.parts.budget.votes
        pooled, counts = count(self.parts, Claims.stack(self.claims), self.limits)
        newest = len(self.staged) - 1
        self._shrink(newest, self.staged[newest], keep_best(pooled.layer(newest), counts[newest:], votes)[0])
        held = sum(staged.keys.shape[0] for staged in self.staged)
        if held > 1.1 * int(counts.sum()):
            for index, (staged, keep) in enumerate(zip(self.staged, keep_best(pooled, counts, votes), strict=True)):
                self._shrink(index, staged, keep)

    def _shrink(self, index: int, staged: _Staged, keep: Tensor) -> None:
        if self.drop is not None:
            tokens = staged.spread()
            dropped, survivors = staged.mask & ~keep, staged.mask & keep
            folded = self.drop(index, replace(tokens, mask=dropped, survivors=survivors))
            if folded is not None:
                folded = folded.to(tokens.values.dtype)
                staged.values = torch.where(survivors[..., None], folded, tokens.values)[staged.mask]
        staged.shrink(keep)

    def _staged_bytes(self) -> int:
        claims = sum(claim.value.nbytes + claim.votes.nbytes for claim in self.claims)
        return claims + sum(staged.nbytes for staged in self.staged)


def _append_newest(held: list[Tensor], chunk: Tensor, axis: int, rows: int) -> None:
    """Append a chunk, of which no more than `rows` along `axis` are read, and let go what it replaces."""
    if chunk.shape[axis] > rows:
        # A copy: a view would hold the whole chunk until the layer is complete.
        chunk = chunk.narrow(axis, chunk.shape[axis] - rows, rows).clone()
    held.append(chunk)
    while sum(later.shape[axis] for later in held[1:]) >= rows:
        held.pop(0)
