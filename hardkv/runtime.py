"""HardKVRuntime: a model with a compressed cache, from one configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, overload

import torch
from pydantic import ValidationError

from hardkv.admission import usable_bytes
from hardkv.cache import CascadeCache
from hardkv.config import Components, GenerationSettings, HardKVConfig, load_config
from hardkv.costs import measure_costs
from hardkv.decode_loop import DecodeLoop
from hardkv.detokenize import Detokenizer
from hardkv.errors import CapacityError, HardKVError, InputError, did_you_mean
from hardkv.graph import Graphs
from hardkv.model_adapter import Decoder, LoadedModel, load_model, read_geometry
from hardkv.prompts import read_prompts
from hardkv.results import Generation, Piece, RuntimeStats, SequenceStats, TokenLogprob
from hardkv.scheduler import Event, Observer, Progress, Request, Scheduler
from hardkv.stopwatch import PHASES

logger = logging.getLogger(__name__)
_SIZINGS = 6


class HardKVRuntime:
    """Generates text with a head-adaptive, compressed KV cache."""

    def __init__(self, config: HardKVConfig, components: Components, loaded: LoadedModel) -> None:
        self.config = config
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.geometry = read_geometry(loaded.model)
        self.costs = measure_costs(self.geometry.device, self.geometry.dtype)
        self._cache = CascadeCache(self.geometry, config.cache, components if config.compression else None, self.costs)
        self._decoder = Decoder(loaded.model, self._cache.telling)
        embeddings: Any = self.model.get_input_embeddings()
        self._vocabulary = int(embeddings.weight.shape[0])
        self._loop = DecodeLoop(self._decoder, self._cache, self._vocabulary, Graphs(self.geometry.device))
        self._overlaps = self.geometry.device.type == "cuda"
        self._scheduler: Scheduler | None = None
        self._stats = self._empty_stats()

    @classmethod
    def from_config(
        cls, source: str | Path | Mapping[str, Any] | HardKVConfig, *, loaded: LoadedModel | None = None
    ) -> HardKVRuntime:
        """Build a runtime from a YAML file, a dict or a `HardKVConfig`.

        `loaded`: a model and tokenizer already in memory, instead of `model.id`.

        Raises:
            ConfigError: a wrong configuration, naming the path, what came and what is allowed.
            ModelNotFoundError, UnsupportedModelError: the model cannot be loaded or served.
        """
        ready = load_config(source)
        model = ready.config.model
        loaded = loaded or load_model(model.id, model.dtype, model.device, model.revision, model.pack_weights)
        return cls(ready.config, ready.components, loaded)

    @overload
    def generate(
        self, prompts: str, *, progress: Progress | None = None, observer: Observer | None = None, **overrides: Any
    ) -> Generation: ...
    @overload
    def generate(
        self, prompts: Any, *, progress: Progress | None = None, observer: Observer | None = None, **overrides: Any
    ) -> Any: ...
    def generate(
        self, prompts: Any, *, progress: Progress | None = None, observer: Observer | None = None, **overrides: Any
    ) -> Any:
        """Generate for one prompt (a `Generation`) or many (a list, in order).

        A prompt is a string, a chat (list of messages) or token ids; a batch is a list of them. `overrides` are the
        keys of the configuration's `generation` section, and `seed`. `given` are token ids to feed after the prompt (a
        list of such lists for a batch): the prompt is compressed without them, they go through decode steps, and the
        model goes on from there; they are no part of the result. `progress(done, total)` counts prefill chunks of
        each prompt. `observer` looks at each sequence's cache as it changes. In a batch a prompt that fails while
        running has `finish_reason == "error"`; a single one raises.

        Raises:
            InputError: a wrong prompt or argument; before any work starts.
            CapacityError: one of the sequences can never fit in memory; before any work starts.
        """
        requests, single = self._requests(prompts, overrides)
        collectors = [_Collector(request, self.tokenizer) for request in requests]
        for event in self._run(requests, progress, observer):
            collectors[event.request.index].take(event)
        if single and collectors[0].error is not None:
            raise collectors[0].error
        generations = [collector.result() for collector in collectors]
        return generations[0] if single else generations

    def as_completed(
        self, prompts: Any, *, seeds: Sequence[int] | None = None, **overrides: Any
    ) -> Iterator[tuple[int, Generation]]:
        """Generate for a batch and give each result when it is finished, with its prompt's place in the batch.

        `seeds`: one for each prompt, in place of `seed` plus its place. Other arguments and errors as in `generate`;
        they are checked now, not when the first result is asked for. There is no `progress` and no
        `observer`.
        """
        requests, _ = self._requests(prompts, overrides)
        if seeds is not None:
            if len(seeds) != len(requests):
                raise InputError(f"got {len(requests)} prompts and {len(seeds)} seeds; give each prompt one")
            for request, seed in zip(requests, seeds, strict=True):
                _check_seed(seed)
                request.seed = seed
        return self._completed(requests)

    def stream(self, prompt: Any, *, progress: Progress | None = None, **overrides: Any) -> Iterator[Piece]:
        """Generate for one prompt and give its text as it becomes certain; the last piece has a `finish_reason`.

        Arguments and errors as in `generate`; they are checked now, not when the first piece is asked for.
        """
        requests, single = self._requests(prompt, overrides)
        if not single and len(requests) != 1:
            raise InputError(f"stream takes one prompt, got {len(requests)}; use generate for a batch")
        return self._pieces(requests[0], progress)

    def teacher_force(self, prompts: list[list[int]], continuations: list[list[int]]) -> list[torch.Tensor]:
        """Feed given tokens and give the model's log-probabilities, to compare caches at equal inputs.

        `prompts`, `continuations`: token ids, one list per sequence. Each result is `[T, vocabulary]` float32 on the
        CPU: row t predicts the token after the prompt and the first t continuation tokens, t = 0 .. T - 1. Row 0 comes
        from the prefill, which attends the whole prompt.

        Raises:
            InputError, CapacityError: as in `generate`; any error of a sequence is raised.
        """
        rows: list[list[torch.Tensor]] = [[] for _ in prompts]

        def take(sequence: int, row: int, logits: torch.Tensor) -> None:
            rows[sequence].append(torch.log_softmax(logits, -1).cpu())

        self.force(prompts, continuations, take)
        return [torch.stack(mine) for mine in rows]

    def force(
        self,
        prompts: Sequence[list[int]],
        continuations: Sequence[list[int]],
        take: Callable[[int, int, torch.Tensor], None],
        observer: Observer | None = None,
    ) -> None:
        """As `teacher_force`, but nothing is held: `take(sequence, row, logits)` is told each row as it comes.

        `logits [vocabulary]`, not normalised, are valid until it returns. `observer` as in `generate`.

        Raises:
            InputError, CapacityError: as in `generate`; any error of a sequence is raised.
        """
        if len(prompts) != len(continuations) or not all(continuations):
            raise InputError(f"got {len(prompts)} prompts and {len(continuations)} continuations; give each prompt one")
        # The last row comes after all but the last token.
        given = [list(continuation[:-1]) for continuation in continuations]
        plain = {"max_new_tokens": 1, "temperature": 0.0, "repetition_penalty": 1.0, "logprobs": None}
        requests, _ = self._requests(list(prompts), {**plain, "given": given})
        for request in requests:
            counted = count()
            request.on_logits = lambda logits, sequence=request.index, counted=counted: take(
                sequence, next(counted), logits
            )
        for event in self._run(requests, None, observer):
            if event.error is not None:
                raise event.error

    def stats(self) -> RuntimeStats:
        """What the latest call used: tokens, bytes, seconds per phase."""
        return self._stats

    def reset(self) -> None:
        """Give back the pool and forget the latest call's statistics."""
        self._cache.release()
        self._loop.release()
        self._stats = self._empty_stats()

    def _completed(self, requests: list[Request]) -> Iterator[tuple[int, Generation]]:
        collectors = [_Collector(request, self.tokenizer) for request in requests]
        for event in self._run(requests, None):
            collector = collectors[event.request.index]
            collector.take(event)
            if collector.end is not None:
                yield event.request.index, collector.result()

    def _pieces(self, request: Request, progress: Progress | None) -> Iterator[Piece]:
        collector = _Collector(request, self.tokenizer)
        for event in self._run([request], progress):
            piece = collector.take(event)
            if collector.error is not None:
                raise collector.error
            yield piece

    def _run(
        self, requests: list[Request], progress: Progress | None, observer: Observer | None = None
    ) -> Iterator[Event]:
        if self._cache.cascades or (self._scheduler is not None and self._scheduler.busy):
            raise HardKVError("the runtime is already generating; finish or close the running stream first")
        shared = self._cache.admission.shared_bytes
        if shared is None:
            self._prepare(requests)
        else:
            self._prepare_shared(requests, shared)
        self._loop.prepare()
        scheduler = Scheduler(self._loop, self.config.cache.prefill_chunk_tokens, progress, self._overlaps, observer)
        self._scheduler = scheduler
        ended: list[tuple[Request, SequenceStats]] = []
        try:
            for event in scheduler.run(requests):
                if event.stats is not None:
                    ended.append((event.request, event.stats))
                    self._stats = self._collect(scheduler, ended)
                yield event
        finally:
            for cascade in list(self._cache.cascades.values()):
                self._cache.close(cascade)

    def _requests(self, prompts: Any, overrides: dict[str, Any]) -> tuple[list[Request], bool]:
        seed, given = overrides.pop("seed", self.config.seed), overrides.pop("given", None)
        _check_seed(seed)
        settings = _overridden(self.config.generation, overrides)
        read = read_prompts(prompts, self.tokenizer, self._vocabulary)
        fed = self._given([given] if read.single and given is not None else given, len(read.token_ids))
        ends = frozenset(settings.stop_token_ids) | (frozenset() if settings.ignore_eos else self._end_ids())
        requests = []
        for index, (ids, after) in enumerate(zip(read.token_ids, fed, strict=True)):
            room = self.geometry.max_positions - len(after)  # without what is given
            if len(ids) >= room:
                raise InputError(
                    f"prompt {index} has {len(ids)} tokens; the model has {room} positions, one is needed for an answer"
                )
            if len(ids) + settings.max_new_tokens > room:
                logger.warning(
                    "prompt %d: only %d tokens fit after it, fewer than max_new_tokens", index, room - len(ids)
                )
            total = min(len(ids) + settings.max_new_tokens, room) + len(after)
            requests.append(Request(index, ids, settings, (seed + index) % 2**63, ends, total, given=after))
        admission = self._cache.admission
        before = admission.share_tokens
        try:
            if admission.shared_bytes is not None:
                self._share_out(requests, admission.shared_bytes)
            self._check_memory(requests)
        finally:
            admission.share_tokens = before  # a check leaves no trace: sequences of another call may be running
        return requests, read.single

    def _given(self, given: Any, count: int) -> list[list[int]]:
        if given is None:
            return [[] for _ in range(count)]
        if not isinstance(given, Sequence) or len(given) != count:
            raise InputError(f"given: expected one list of token ids for each of {count} prompts, got {given!r}"[:200])
        return [self._given_ids(ids) for ids in given]

    def _given_ids(self, ids: Any) -> list[int]:
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        fits = isinstance(ids, Sequence) and not isinstance(ids, str | bytes)
        if not fits or not all(type(one) is int and 0 <= one < self._vocabulary for one in ids):
            raise InputError(
                f"given: expected token ids from 0 to {self._vocabulary - 1} after each prompt, got {ids!r}"[:200]
            )
        return list(ids)

    def _end_ids(self) -> frozenset[int]:
        named = getattr(self.model.generation_config, "eos_token_id", None)
        ids = list(named) if isinstance(named, list | tuple) else [named]
        return frozenset(int(token) for token in [*ids, self.tokenizer.eos_token_id] if token is not None)

    def _check_memory(self, requests: list[Request]) -> None:
        admission, limit = self._cache.admission, self.config.cache.pool_bytes
        free = usable_bytes(self.geometry.device) + self._cache.reserved_bytes
        for request in requests:
            prompt = len(request.prompt_ids)
            pool = admission.sequence_pages(request.max_tokens) * admission.page_bytes
            if limit is not None and pool > limit:
                raise CapacityError(
                    f"prompt {request.index} ({prompt} tokens, {request.max_tokens - prompt} to generate) needs up to "
                    f"{pool:,} bytes of pages; cache.pool_bytes is {limit:,}. Raise it, or lower the budget or "
                    "max_new_tokens"
                )
            need = admission.sequence_bytes(prompt, request.max_tokens - prompt)
            if need > free:
                raise CapacityError(
                    f"prompt {request.index} ({prompt} tokens, {request.max_tokens - prompt} to generate) needs up to "
                    f"{need:,} bytes; {free:,} are free on {self.geometry.device}. Lower the budget or max_new_tokens"
                )

    def _prepare(self, requests: list[Request]) -> None:
        """Size the pool for as many of the requests at once as memory and `max_sequences` allow."""
        admission, settings = self._cache.admission, self.config.cache
        free = usable_bytes(self.geometry.device) + self._cache.reserved_bytes
        transient = max(admission.prefill_bytes(len(request.prompt_ids)) for request in requests)
        needs = sorted((admission.sequence_pages(request.max_tokens) for request in requests), reverse=True)
        pages, lanes = needs[0], 1
        for need in needs[1 : settings.max_sequences]:
            more = (pages + need) * admission.page_bytes
            if settings.pool_bytes is not None and more > settings.pool_bytes:
                break
            if more + (lanes + 1) * admission.lane_bytes() + transient > free:
                break
            pages, lanes = pages + need, lanes + 1
        # Some slack, where it costs nobody a place, lets layers grow and shrink without moving each other's pages.
        slack = pages // 8
        more = (pages + slack) * admission.page_bytes
        if more <= (free if settings.pool_bytes is None else settings.pool_bytes):
            pages += slack
        longest = max(request.max_tokens for request in requests)
        # Buffers made here may only be written in inference mode; that spares each write the version count of autograd.
        with torch.inference_mode():
            self._cache.prepare(pages, lanes, admission.head_pages(longest))

    def _prepare_shared(self, requests: list[Request], shared_bytes: int) -> None:
        """Size the pool so that all that is allocated, tables included, is at most `shared_bytes`."""
        admission, room = self._cache.admission, shared_bytes
        needs = sorted((request.max_tokens for request in requests), reverse=True)
        admission.share_out(needs[:1], room)
        head_pages = admission.head_pages(needs[0])  # a sequence that is left alone may have it all
        if self._cache.reserved_bytes > shared_bytes:  # kept from an earlier call
            self._cache.release()
        for _ in range(_SIZINGS):
            lanes = self._share_out(requests, room)
            pages = sum(admission.sequence_pages(need) for need in needs[:lanes])
            with torch.inference_mode():
                self._cache.prepare(pages, lanes, head_pages)
            excess = self._cache.reserved_bytes - shared_bytes
            if excess <= 0:
                return
            self._cache.release()
            room -= excess
        raise CapacityError(
            f"the tables of the cache alone exceed what the budget's {shared_bytes:,} bytes leave; raise budget.total"
        )

    def _share_out(self, requests: list[Request], room_bytes: int) -> int:
        needs = sorted((request.max_tokens for request in requests), reverse=True)
        return self._cache.admission.share_out(needs[: self.config.cache.max_sequences], room_bytes)

    def _collect(self, scheduler: Scheduler, ended: list[tuple[Request, SequenceStats]]) -> RuntimeStats:
        kept = torch.tensor([stats.tokens_kept for _, stats in ended], dtype=torch.float64).mean(0)
        after = [mean for _, stats in ended for mean in stats.mean_tokens_after_compression]
        cache = self._cache
        return RuntimeStats(
            tokens_seen=sum(stats.tokens_seen for _, stats in ended),
            tokens_kept=kept.tolist(),
            kv_bytes=scheduler.kv_bytes or cache.kv_bytes,
            kv_bytes_peak=cache.peak_bytes,
            kv_bytes_reserved=cache.reserved_bytes,
            compressions=cache.compressions,
            mean_tokens_after_compression=sum(after) / len(after) if after else None,
            seconds=dict(cache.watch.seconds),
            generated_tokens=sum(len(request.generated) for request, _ in ended),
            step_seconds=list(scheduler.step_seconds),
        )

    def _empty_stats(self) -> RuntimeStats:
        nothing = [[0.0] * self.geometry.heads for _ in self.geometry.windows]
        return RuntimeStats(0, nothing, 0, 0, 0, 0, None, dict.fromkeys(PHASES, 0.0))


class _Collector:
    """Gathers one request's events into text and a result."""

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self.request = request
        self.detokenizer = Detokenizer(tokenizer, request.settings.stop)
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.end: Event | None = None
        self.error: HardKVError | None = None

    def take(self, event: Event) -> Piece:
        if event.choice is None:
            self.end, self.error = event, event.error
            rest = self.detokenizer.flush()
            self.text += rest
            return Piece(rest, None, finish_reason=event.finish_reason)
        chosen = event.choice
        text = "" if chosen.token_id in self.request.end_ids else self.detokenizer.add(chosen.token_id)
        self.request.cancelled = self.detokenizer.stopped
        self.text += text
        logprob = None
        if chosen.logprob is not None:
            logprob = TokenLogprob(chosen.token_id, chosen.logprob, chosen.top_logprobs)
            self.logprobs.append(logprob)
        return Piece(text, chosen.token_id, logprob)

    def result(self) -> Generation:
        assert self.end is not None
        assert self.end.finish_reason is not None
        assert self.end.stats is not None
        return Generation(
            text=self.text,
            token_ids=list(self.request.generated),
            finish_reason=self.end.finish_reason,
            logprobs=self.logprobs if self.request.settings.logprobs is not None else None,
            stats=self.end.stats,
            error=None if self.error is None else str(self.error),
        )


def _check_seed(seed: Any) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise InputError(f"seed: expected a whole number from 0 to 2**63 - 1, got {seed!r}")


def _overridden(settings: GenerationSettings, overrides: dict[str, Any]) -> GenerationSettings:
    known = set(GenerationSettings.model_fields)
    for name in overrides:
        if name not in known:
            hint = did_you_mean(name, known)
            raise InputError(f"generate has no argument '{name}'.{hint} Known: {', '.join(sorted([*known, 'seed']))}")
    try:
        return GenerationSettings.model_validate({**settings.model_dump(), **overrides})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{name}: {first['msg']} (got {first['input']!r})") from None
