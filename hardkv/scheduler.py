"""The generation loop: admits prompts as memory allows, steps all running sequences, compresses each when it is due."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hardkv.cache import CascadeCache
from hardkv.compression import Arriving
from hardkv.config import GenerationSettings
from hardkv.decode_loop import DecodeLoop
from hardkv.errors import HardKVError
from hardkv.results import FinishReason, SequenceStats
from hardkv.sampling import Choice, SamplingRules, with_logprobs
from hardkv.tiers.cascade import Cascade
from hardkv.types import AttentionCall

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


class Observer(Protocol):
    """Looks at sequences as they run, each named by its prompt's index in the call; changes nothing."""

    def on_compression(self, index: int, cascade: Cascade, cache: CascadeCache) -> None:
        """Called once the prompt has been placed, and after each later pass, whether it selected or only aged."""

    def on_step(self, index: int, cascade: Cascade, cache: CascadeCache) -> None:
        """Called after each decode step that the sequence took part in; should not wait for the device."""


@dataclass
class Request:
    """One prompt on its way."""

    index: int
    prompt_ids: list[int]
    settings: GenerationSettings
    seed: int
    end_ids: frozenset[int]
    max_tokens: int
    """Prompt and generation together."""
    generated: list[int] = field(default_factory=list)
    cancelled: bool = False
    """Set by the consumer: a stop text has appeared."""
    given: list[int] = field(default_factory=list)
    """Tokens to feed after the prompt, one a step, whatever the model says; it goes on from there."""
    on_logits: Callable[[Tensor], None] | None = None
    """Told the logits `[vocabulary]` of every step."""


@dataclass(frozen=True)
class Event:
    """One token of one request, or its end."""

    request: Request
    choice: Choice | None
    finish_reason: FinishReason | None = None
    stats: SequenceStats | None = None
    error: HardKVError | None = None


@dataclass
class _Running:
    request: Request
    cascade: Cascade
    rules: SamplingRules
    rest: deque[int]
    """Given tokens still to be fed."""


class _PrefillServer:
    """Serves one sequence's prompt."""

    def __init__(self, cache: CascadeCache, cascade: Cascade) -> None:
        self.cache, self.cascade = cache, cascade

    def attend(self, call: AttentionCall, sliding_window: int | None) -> Tensor:
        return self.cache.prefill_attend(self.cascade, call)


class Scheduler:
    """Runs requests over one cache; sequences join when there is room and leave when they end.

    `overlaps`: compress a sequence while the others decode, instead of before the next step of all. A pass does the
    same either way; it pays where the device works on its own.
    """

    def __init__(
        self,
        loop: DecodeLoop,
        chunk_tokens: int,
        progress: Progress | None,
        overlaps: bool,
        observer: Observer | None = None,
    ) -> None:
        self.loop, self.cache, self.chunk_tokens, self.progress = loop, loop.cache, chunk_tokens, progress
        self.observer = observer
        self.decoder = loop.decoder
        self.overlap = loop.overlap
        self.overlaps = overlaps and self.cache.step.statistic.spares_others
        self.waiting: deque[Request] = deque()
        self.running: list[_Running] = []
        self.step_seconds: list[float] = []
        self.kv_bytes = 0

    @property
    def busy(self) -> bool:
        """Whether requests wait or run; between two events none may be open and more to come."""
        return bool(self.waiting or self.running)

    def run(self, requests: list[Request]) -> Iterator[Event]:
        """Give events as they come; a request that fails ends with an error event and the others go on."""
        self.waiting.extend(requests)
        try:
            while self.waiting or self.running:
                while self.waiting and self.cache.has_room(self.waiting[0].max_tokens):
                    yield from self._admit(self.waiting.popleft())
                if self.waiting and not self.running:
                    raise HardKVError("no place is left for a prompt that fitted before: the cache has been resized")
                yield from self._step()
        finally:
            self.overlap.abandon()
            for running in self.running:
                self.cache.close(running.cascade)
            self.running.clear()
            self.waiting.clear()

    def _admit(self, request: Request) -> Iterator[Event]:
        try:
            with torch.inference_mode():
                cascade = self.cache.open(request.max_tokens)
        except HardKVError as error:
            logger.warning("prompt %d failed: %s", request.index, error)
            yield Event(request, None, "error", self._nothing(len(request.prompt_ids)), error)
            return
        try:
            with self.cache.watch.phase("prefill"):
                logits = self._prefill(request, cascade)
        except HardKVError as error:
            yield self._fail(request, cascade, error)
            return
        except BaseException:
            self.cache.close(cascade)
            raise
        rules = _rules(request.settings)
        running = _Running(request, cascade, rules, deque(request.given))
        self.running.append(running)
        self._note_compression(cascade)
        with self.cache.watch.phase("decode"):
            chosen = self.loop.start(cascade.lane, rules, request.seed, request.prompt_ids, logits)
        yield from self._take(running, chosen, logits[0])

    @torch.inference_mode()
    def _prefill(self, request: Request, cascade: Cascade) -> Tensor:
        self.cache.begin_prefill(cascade, len(request.prompt_ids))
        prompt = torch.tensor(request.prompt_ids, device=self.decoder.device)
        server = _PrefillServer(self.cache, cascade)
        logits = self.decoder.prefill(prompt, server, self.chunk_tokens, self.progress)
        self.cache.end_prefill(cascade)
        return logits

    def _step(self) -> Iterator[Event]:
        started = time.perf_counter()
        yield from self._compress_due()
        batch = [running for running in self.running if running.cascade not in self.overlap]
        self.overlap.mark()
        if batch:
            with self.cache.watch.phase("decode"):
                cascades = [running.cascade for running in batch]
                chosen, logits = self.loop.step(cascades, [running.rules for running in batch])
                self.kv_bytes = self.cache.note_peak()
                arriving = Arriving(chosen)
        ended = self.overlap.advance(wait=not batch)
        if batch:
            with self.cache.watch.phase("decode"):
                tokens = arriving.wait().tolist()
            self.step_seconds.append(time.perf_counter() - started)
            failures = dict(self.cache.step.failures)
            for row, running in enumerate(batch):
                error = failures.get(running.cascade.lane)
                if error is not None:
                    yield from self._drop(running.cascade, error)
                    continue
                if self.observer is not None:
                    self.observer.on_step(running.request.index, running.cascade, self.cache)
                yield from self._take(running, tokens[row], logits[row])
        for cascade, error in ended:
            if error is not None:
                yield from self._drop(cascade, error)
            else:
                self._note_compression(cascade)

    def _compress_due(self) -> Iterator[Event]:
        due = [running for running in self.running if running.cascade.dense.full]
        for running in due:
            if running.cascade in self.overlap:
                continue
            if self.overlaps:
                self.overlap.add(running.cascade)
                continue
            try:
                with torch.inference_mode():
                    self.cache.compress(running.cascade)
            except HardKVError as error:
                yield from self._drop(running.cascade, error)
            else:
                self._note_compression(running.cascade)

    def _note_compression(self, cascade: Cascade) -> None:
        if self.observer is not None:
            index = next(running.request.index for running in self.running if running.cascade is cascade)
            self.observer.on_compression(index, cascade, self.cache)

    def _drop(self, cascade: Cascade, error: HardKVError) -> Iterator[Event]:
        running = next(running for running in self.running if running.cascade is cascade)
        self.running.remove(running)
        yield self._fail(running.request, cascade, error)

    def _take(self, running: _Running, token_id: int, logits: Tensor) -> Iterator[Event]:
        """Take a chosen token; `logits [V]` are those it was chosen from."""
        request = running.request
        if request.on_logits is not None:
            request.on_logits(logits)
        reason: FinishReason | None = None
        if running.rest:
            self._feed(running)
        else:
            choice = Choice(token_id, None, {})
            if request.settings.logprobs is not None:
                choice = with_logprobs(token_id, logits, request.settings.logprobs)
            request.generated.append(token_id)
            yield Event(request, choice)
            if request.cancelled or token_id in request.end_ids:
                reason = "stop"
        taken = len(request.prompt_ids) + len(request.given) - len(running.rest) + len(request.generated)
        if reason is None and taken >= request.max_tokens:
            reason = "length"
        if reason is not None:
            stats = self._stats(running.cascade, len(request.prompt_ids))
            self.running.remove(running)
            self._close(running.cascade)
            yield Event(request, None, reason, stats)

    def _feed(self, running: _Running) -> None:
        """Let the next given token be fed; after the last, the sampler starts as after a prompt that ended there."""
        request, lane = running.request, running.cascade.lane
        self.loop.put(lane, running.rest.popleft())
        if not running.rest:
            self.loop.begin(lane, running.rules, request.seed, request.prompt_ids + request.given)

    def _fail(self, request: Request, cascade: Cascade, error: HardKVError) -> Event:
        logger.warning("prompt %d failed: %s", request.index, error)
        stats = self._stats(cascade, len(request.prompt_ids))
        self._close(cascade)
        return Event(request, None, "error", stats, error)

    def _close(self, cascade: Cascade) -> None:
        self.cache.close(cascade)
        if not self.waiting:
            self.cache.raise_share()

    def _nothing(self, prompt_tokens: int) -> SequenceStats:
        """The statistics of a sequence that was never opened."""
        geometry = self.cache.geometry
        kept = [[0] * geometry.heads for _ in geometry.windows]
        return SequenceStats(prompt_tokens, 0, kept, 0, [])

    def _stats(self, cascade: Cascade, prompt_tokens: int) -> SequenceStats:
        geometry = self.cache.geometry
        full = iter(cascade.kept_tokens().tolist())
        kept = [
            next(full) if window is None else [min(window, cascade.seen_tokens)] * geometry.heads
            for window in geometry.windows
        ]
        return SequenceStats(
            prompt_tokens=prompt_tokens,
            tokens_seen=cascade.seen_tokens,
            tokens_kept=kept,
            compressions=cascade.compressions,
            mean_tokens_after_compression=list(cascade.kept_after_compression),
        )


def _rules(settings: GenerationSettings) -> SamplingRules:
    return SamplingRules(
        settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.repetition_penalty
    )
