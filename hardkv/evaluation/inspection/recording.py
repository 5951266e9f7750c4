"""Records a generation: small tables at each compression, a few numbers of the host at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hardkv.cache import CascadeCache
from hardkv.detokenize import Detokenizer
from hardkv.errors import InputError
from hardkv.evaluation.inspection.trace import Pass, Ranges, Step, Trace
from hardkv.prompts import read_prompts
from hardkv.runtime import HardKVRuntime
from hardkv.scheduler import Progress
from hardkv.tiers.cascade import Cascade


class Recorder:
    """An observer of one prompt. Keep bits change in passes only, so a step reads nothing from the device.

    `every_steps`: decode steps from one recorded step to the next; passes and the last step are always there.
    """

    def __init__(self, every_steps: int = 1) -> None:
        self.every_steps = every_steps
        self.passes: list[Pass] = []
        self._steps: list[Step] = []
        self._newest: Step | None = None
        self._done = self._selections = self._shown_slots = self._condensed_slots = 0

    @property
    def steps(self) -> list[Step]:
        """What was recorded, the latest step included."""
        if self._newest is None or self._steps[-1] == self._newest:
            return list(self._steps)
        return [*self._steps, self._newest]

    @torch.inference_mode()
    def on_compression(self, index: int, cascade: Cascade, cache: CascadeCache) -> None:
        """Copy what every head keeps."""
        if index:
            raise InputError("a recorder follows one prompt, and this call has several; give it one")
        resident = cascade.resident()
        positions, valid, shown = (
            tensor.cpu().numpy() for tensor in (resident.positions, resident.valid, resident.shown)
        )
        kept, dense = shown.sum(-1), cascade.dense.length
        self._shown_slots = int(kept.sum()) - dense * kept.size
        self._condensed_slots = _condensed_slots(cascade)
        step = self._look(cascade, cache)
        self.passes.append(
            Pass(
                step=step.step,
                tokens_seen=step.tokens_seen,
                selected=cascade.compressions > self._selections,
                dense_tokens=dense,
                kept=kept.tolist(),
                shown=_ranges(positions, shown),
                masked=_ranges(positions, valid & ~shown),
                pages=step.pages,
                kv_bytes=step.kv_bytes,
            )
        )
        self._selections = cascade.compressions
        self._steps = [*self.steps, step]
        self._newest = step

    def on_step(self, index: int, cascade: Cascade, cache: CascadeCache) -> None:
        """Note how full the tiers are, from what the host knows."""
        self._done += 1
        self._newest = self._look(cascade, cache)
        if self._done % self.every_steps == 0:
            self._steps.append(self._newest)

    def _look(self, cascade: Cascade, cache: CascadeCache) -> Step:
        dense, sparse = cascade.dense.lengths, cascade.sparse.lengths
        tables = (table for table in cascade.pool.tables if table.lane == cascade.lane)
        return Step(
            step=self._done,
            tokens_seen=cascade.seen_tokens,
            dense_slots=int(dense.sum()),
            sparse_shown_slots=self._shown_slots,
            sparse_masked_slots=int(sparse.sum()) - self._shown_slots,
            condensed_slots=self._condensed_slots,
            pages=sum(int(table.counts.sum()) for table in tables),
            kv_bytes=cache.kv_bytes,
        )


def record(
    runtime: HardKVRuntime, prompt: Any, *, every_steps: int = 1, progress: Progress | None = None, **overrides: Any
) -> Trace:
    """Generate for one prompt and give what went on inside; arguments and errors as in `generate`.

    Raises:
        InputError: several prompts.
    """
    embeddings: Any = runtime.model.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    read = read_prompts(prompt, runtime.tokenizer, vocabulary)
    if not read.single:
        raise InputError(f"record takes one prompt, got a batch of {len(read.token_ids)}")
    recorder, prompt_ids = Recorder(every_steps), read.token_ids[0]
    generation = runtime.generate(prompt_ids, progress=progress, observer=recorder, **overrides)
    cache = runtime.config.cache
    return Trace(
        model=runtime.config.model.id,
        dtype=str(runtime.geometry.dtype).removeprefix("torch."),
        windows=list(runtime.geometry.windows),
        heads=runtime.geometry.heads,
        sinks=cache.sinks,
        local_window=cache.local_window,
        interval=cache.interval,
        page_slots=cache.page_slots,
        prompt_tokens=len(prompt_ids),
        tokens=token_texts(runtime.tokenizer, [*prompt_ids, *generation.token_ids]),
        finish_reason=generation.finish_reason,
        passes=recorder.passes,
        steps=recorder.steps,
    )


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; special tokens by their names."""
    special = set(tokenizer.all_special_ids)
    detokenizer = Detokenizer(tokenizer, ())
    texts = []
    for token in token_ids:
        added = detokenizer.add(token)
        texts.append(added + str(tokenizer.convert_ids_to_tokens(token)) if token in special else added)
    if texts:
        texts[-1] += detokenizer.flush()
    return texts


def _ranges(positions: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_]) -> list[list[Ranges]]:
    """The chosen `positions [L, H, N]`, ascending in each head."""
    return [
        [_runs(row[mask]) for row, mask in zip(layer, masks, strict=True)]
        for layer, masks in zip(positions, chosen, strict=True)
    ]


def _runs(positions: npt.NDArray[np.int64]) -> Ranges:
    if not len(positions):
        return []
    breaks = np.flatnonzero(np.diff(positions) != 1)
    starts = positions[np.concatenate([[0], breaks + 1])]
    ends = positions[np.concatenate([breaks, [len(positions) - 1]])] + 1
    return [int(edge) for edge in np.stack([starts, ends], 1).flatten()]


def _condensed_slots(cascade: Cascade) -> int:
    if cascade.store is None:
        return 0
    filled = cascade.pool.bias.view(-1)[cascade.store.slots()] > float("-inf")
    return int(filled.sum())
