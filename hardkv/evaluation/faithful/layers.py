"""What selection alone does to each layer's attention: the full run's own queries over the tokens that a cache held.

For the query of each fed token, in each layer and query head, with K and V of the full run:

- attention mass kept: the share of its attention that falls on tokens which the compressed cache still let it read;
- attention output error: `|o_held - o_full| / |o_full|`, where `o_held` attends only those tokens, renormalised.

As queries, K and V are the full run's, neither holds what drift adds from layer to layer and from token to token.
Learned sink logits stay in the denominator of an output and are no token's mass; values that a condenser has changed,
and its slots, are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hardkv.evaluation.faithful.held import Held
from hardkv.model_adapter import Decoder, LoadedModel
from hardkv.types import AttentionCall, ModelGeometry
from hardkv_kernels import causal_attention

_BLOCK_ROWS = 128
MASS, ERROR = range(2)


def judge_layers(
    loaded: LoadedModel,
    geometry: ModelGeometry,
    token_ids: Sequence[int],
    prompt_tokens: int,
    runs: Sequence[Sequence[Held]],
) -> Tensor:
    """Judge several runs of one text in one forward pass, which holds one layer's K and V at a time.

    `token_ids`: the prompt and the tokens that went through decode steps. Gives `[runs, 2, L]` float64 over the
    compressed layers: `MASS` and `ERROR`, means over fed tokens and query heads.
    """
    judge = _Judge(geometry, prompt_tokens, runs)
    tokens = torch.tensor(token_ids)
    Decoder(loaded.model).prefill(tokens, judge, len(token_ids), None)
    return judge.sums / ((len(token_ids) - prompt_tokens) * geometry.heads * geometry.group)


class _Judge:
    """Answers a whole text's attention exactly, and adds up what each run would have read of it."""

    def __init__(self, geometry: ModelGeometry, prompt_tokens: int, runs: Sequence[Sequence[Held]]) -> None:
        self.geometry, self.prompt_tokens, self.runs = geometry, prompt_tokens, runs
        self.index_of_layer = {layer: index for index, layer in enumerate(geometry.full_layers)}
        self.sums = torch.zeros(len(runs), 2, len(self.index_of_layer), dtype=torch.float64)

    def attend(self, call: AttentionCall, sliding_window: int | None) -> Tensor:
        heads, tokens = call.keys.shape[1:3]
        query = call.query[0].view(heads, -1, *call.query.shape[2:])
        window, sinks = self.geometry.windows[call.layer], call.settings.sinks(heads)
        if window is None:
            for first in range(self.prompt_tokens, tokens, _BLOCK_ROWS):
                rows = slice(first, min(first + _BLOCK_ROWS, tokens))
                self._compare(call, query[:, :, rows].float(), rows, sinks)
        out = causal_attention(query, call.keys[0], call.values[0], call.scaling, window, call.softcap, sinks)
        return out.flatten(0, 1).transpose(0, 1)[None]

    def _compare(self, call: AttentionCall, query: Tensor, rows: slice, sinks: Tensor | None) -> None:
        """Add up the numbers of some rows' queries `[H, G, R, D]`."""
        layer = self.index_of_layer[call.layer]
        keys, values = call.keys[0, :, : rows.stop].float(), call.values[0, :, : rows.stop].float()
        logits = torch.matmul(query, keys[:, None].transpose(-1, -2)) * call.scaling
        if call.softcap is not None:
            logits = torch.tanh(logits / call.softcap) * call.softcap
        columns = torch.arange(rows.stop, device=logits.device)
        logits.masked_fill_(columns > columns[rows, None], float("-inf"))  # [H, G, R, N]
        for head in range(logits.shape[0]):
            sink = None if sinks is None else sinks[head, :, None]
            full, whole = _attended(logits[head], values[head], sink)
            for number, run in enumerate(self.runs):
                for held, part in _spans(run, rows):
                    old = held.positions(layer, head).to(columns.device)
                    read = torch.cat([old, columns[held.since : part.stop]])
                    mine = slice(part.start - rows.start, part.stop - rows.start)
                    some = logits[head, :, mine].index_select(-1, read)
                    out, mass = _attended(some, values[head].index_select(0, read), sink)
                    error = (out - full[:, mine]).norm(dim=-1) / full[:, mine].norm(dim=-1).clamp_min(1e-20)
                    self.sums[number, MASS, layer] += float((mass - whole[:, mine]).exp().sum())
                    self.sums[number, ERROR, layer] += float(error.sum())


def _attended(logits: Tensor, values: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend `values [N, D]` with `logits [G, R, N]`: the output `[G, R, D]`, and the tokens' log-sum-exp `[G, R]`."""
    tokens = logits.logsumexp(-1)
    total = tokens if sink is None else torch.logaddexp(tokens, sink)
    return torch.matmul((logits - total[..., None]).exp(), values), tokens


def _spans(run: Sequence[Held], rows: slice) -> Iterator[tuple[Held, slice]]:
    """Cut the query positions `rows` where the cache was compressed."""
    ends = [held.since for held in run[1:]] + [rows.stop]
    for held, end in zip(run, ends, strict=True):
        start, stop = max(held.since, rows.start), min(end, rows.stop)
        if start < stop:
            yield held, slice(start, stop)
