"""The generation loop: admits prompts as memory allows, steps all running sequences, compresses each when it is due."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hardkv.cache import CascadeCache
from hardkv.config import GenerationSettings
from hardkv.errors import HardKVError
from hardkv.model_adapter import Decoder, Sampler
from hardkv.model_adapter.sampling import Choice
from hardkv.results import FinishReason, SequenceStats
from hardkv.tiers.cascade import Cascade
from hardkv.types import AttentionCall

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


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
    forced: list[int] | None = None
    """Tokens to feed whatever the model says (teacher forcing)."""
    on_logits: Callable[[Tensor], None] | None = None
    """Told the logits `[vocabulary]` of every step of a forced request."""


@dataclass(frozen=True)
class Event:
    """One token of one request, or its end."""

    request: Request
    choice: Choice | None
    finish_reason: FinishReason | None = None
    stats: SequenceStats | None = None
    error: HardKVError | None = None


class _ForcedChooser:
    """Stands in for a sampler where the tokens are given."""

    is_plain = False

    def __init__(self, forced: list[int], on_logits: Callable[[Tensor], None]) -> None:
        self.rest, self.on_logits = deque(forced), on_logits

    def choose(self, logits: Tensor) -> Choice:
        self.on_logits(logits)
        return Choice(self.rest.popleft() if self.rest else 0, None, {})

    def accept(self, token_id: int) -> None:
        return None


@dataclass
class _Running:
    request: Request
    cascade: Cascade
    sampler: Sampler | _ForcedChooser
    next_id: int = 0


class _PrefillServer:
    """Serves one sequence's prompt."""

    def __init__(self, cache: CascadeCache, cascade: Cascade) -> None:
        self.cache, self.cascade = cache, cascade

    def attend(self, call: AttentionCall, sliding_window: int | None) -> Tensor:
        return self.cache.prefill_attend(self.cascade, call)


class _StepServer:
    """Serves one token of every running sequence."""

    def __init__(self, cache: CascadeCache) -> None:
        self.cache = cache

    def attend(self, call: AttentionCall, sliding_window: int | None) -> Tensor:
        return self.cache.attend(call)


class Scheduler:
    """Runs requests over one cache; sequences join when there is room and leave when they end."""

    def __init__(self, decoder: Decoder, cache: CascadeCache, chunk_tokens: int, progress: Progress | None) -> None:
        self.decoder, self.cache, self.chunk_tokens, self.progress = decoder, cache, chunk_tokens, progress
        self.waiting: deque[Request] = deque()
        self.running: list[_Running] = []
        self.step_seconds: list[float] = []
        self.kv_bytes = 0

    def run(self, requests: list[Request]) -> Iterator[Event]:
        """Give events as they come; a request that fails ends with an error event and the others go on."""
        self.waiting.extend(requests)
        try:
            while self.waiting or self.running:
                while self.waiting and self.cache.has_room(self.waiting[0].max_tokens):
                    yield from self._admit(self.waiting.popleft())
                yield from self._step()
        finally:
            for running in self.running:
                self.cache.close(running.cascade)
            self.running.clear()
            self.waiting.clear()

    def _admit(self, request: Request) -> Iterator[Event]:
        cascade = self.cache.open(request.max_tokens)
        prompt = torch.tensor(request.prompt_ids, device=self.decoder.device)
        try:
            with self.cache.watch.phase("prefill"):
                self.cache.begin_prefill(cascade, len(request.prompt_ids))
                server = _PrefillServer(self.cache, cascade)
                logits = self.decoder.prefill(prompt, server, self.chunk_tokens, self.progress)
                self.cache.end_prefill(cascade)
        except HardKVError as error:
            yield self._fail(request, cascade, error)
            return
        except BaseException:
            self.cache.close(cascade)
            raise
        running = _Running(request, cascade, self._sampler(request))
        self.running.append(running)
        yield from self._choose(running, logits[0])

    def _sampler(self, request: Request) -> Sampler | _ForcedChooser:
        if request.forced is not None and request.on_logits is not None:
            return _ForcedChooser(request.forced, request.on_logits)
        return Sampler(request.settings, request.seed, request.prompt_ids, self.decoder.device)

    def _step(self) -> Iterator[Event]:
        started = time.perf_counter()
        for running in list(self.running):
            if self.cache.due(running.cascade):
                try:
                    self.cache.compress(running.cascade)
                except HardKVError as error:
                    self.running.remove(running)
                    yield self._fail(running.request, running.cascade, error)
        if not self.running:
            return
        batch = list(self.running)
        with self.cache.watch.phase("decode"):
            self.cache.begin_step([running.cascade for running in batch])
            self.kv_bytes = self.cache.note_peak()
            device = self.decoder.device
            tokens = torch.tensor([running.next_id for running in batch], device=device)
            logits = self.decoder.decode(tokens, self.cache.step.positions, _StepServer(self.cache))
            likeliest = logits.argmax(-1).tolist()
        self.step_seconds.append(time.perf_counter() - started)
        for row, running in enumerate(batch):
            if running.sampler.is_plain:
                yield from self._take(running, Choice(likeliest[row], None, {}))
            else:
                yield from self._choose(running, logits[row])

    def _choose(self, running: _Running, logits: Tensor) -> Iterator[Event]:
        with self.cache.watch.phase("decode"):
            choice = running.sampler.choose(logits)
        yield from self._take(running, choice)

    def _take(self, running: _Running, choice: Choice) -> Iterator[Event]:
        request = running.request
        running.next_id = choice.token_id
        running.sampler.accept(choice.token_id)
        request.generated.append(choice.token_id)
        yield Event(request, choice)
        reason: FinishReason | None = None
        if request.cancelled or choice.token_id in request.end_ids:
            reason = "stop"
        elif len(request.prompt_ids) + len(request.generated) >= request.max_tokens:
            reason = "length"
        if reason is not None:
            stats = self._stats(running.cascade, len(request.prompt_ids))
            self.running.remove(running)
            self.cache.close(running.cascade)
            yield Event(request, None, reason, stats)

    def _fail(self, request: Request, cascade: Cascade, error: HardKVError) -> Event:
        logger.warning("prompt %d failed: %s", request.index, error)
        stats = self._stats(cascade, len(request.prompt_ids))
        self.cache.close(cascade)
        return Event(request, None, "error", stats, error)

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
