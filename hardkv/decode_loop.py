"""The decode step as a whole: embedding, layers, cache, sampling. Replayed as a CUDA graph, or run eagerly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hardkv.cache import CascadeCache
from hardkv.graph import Graphs
from hardkv.model_adapter import Decoder
from hardkv.overlap import Overlap
from hardkv.sampling import Sampler, SamplingRules
from hardkv.tiers.cascade import Cascade
from hardkv.types import AttentionCall


class _StepServer:
    """Serves one token of every row."""

    def __init__(self, cache: CascadeCache) -> None:
        self.cache = cache

    def attend(self, call: AttentionCall, sliding_window: int | None) -> Tensor:
        return self.cache.attend(call)


class DecodeLoop:
    """Steps batches of one cache's sequences. The next token of every lane stays on the device, from step to step."""

    def __init__(self, decoder: Decoder, cache: CascadeCache, vocabulary: int, graphs: Graphs) -> None:
        self.decoder, self.cache, self.vocabulary, self.graphs = decoder, cache, vocabulary, graphs
        self.overlap = Overlap(cache)
        self._server = _StepServer(cache)
        self._generation = -1
        self._eager: set[tuple[int, bool, bool]] = set()

    @torch.inference_mode()
    def prepare(self) -> None:
        """Follow the cache, whose buffers may be new ones."""
        if self._generation != self.cache.generation:
            self.graphs.clear()
            self._eager.clear()
            lanes = self.cache.step.nobody
            self.tokens = torch.zeros(lanes + 1, dtype=torch.int64, device=self.decoder.device)
            self.sampler = Sampler(lanes, self.vocabulary, self.decoder.device)
            self._generation = self.cache.generation

    def release(self) -> None:
        """Let go of graphs and buffers; `prepare` makes new ones."""
        self.graphs.clear()
        self.__dict__.pop("tokens", None)
        self.__dict__.pop("sampler", None)
        self._generation = -1

    @torch.inference_mode()
    def start(self, lane: int, rules: SamplingRules, seed: int, prompt_ids: Sequence[int], logits: Tensor) -> int:
        """Set a lane up and choose its first token from the prompt's `logits [1, V]`."""
        self.begin(lane, rules, seed, prompt_ids)
        lanes = torch.tensor([lane], device=self.tokens.device)
        chosen = self.sampler.choose(logits, lanes, rules.draws, rules.remembers)
        self.tokens.index_copy_(0, lanes, chosen)
        return int(chosen)

    @torch.inference_mode()
    def begin(self, lane: int, rules: SamplingRules, seed: int, read_ids: Sequence[int]) -> None:
        """Set a lane's sampler up: what follows `read_ids` is chosen by `rules`, from the seed's first number on."""
        self.sampler.open(lane, rules, seed, read_ids)

    @torch.inference_mode()
    def put(self, lane: int, token_id: int) -> None:
        """Let `token_id` be a lane's next token, whatever was chosen."""
        self.tokens[lane : lane + 1].fill_(token_id)

    @torch.inference_mode()
    def step(self, batch: Sequence[Cascade], rules: Sequence[SamplingRules]) -> tuple[Tensor, Tensor]:
        """Run one token of every sequence: the tokens chosen `[B]` and the logits `[B, V]`, valid until the next step.

        Nothing waits for the device; no sequence may be due for compression.
        """
        step, graphs = self.cache.step, self.graphs
        draws, remembers = any(rule.draws for rule in rules), any(rule.remembers for rule in rules)
        rows = graphs.rows_for(len(batch))
        key = (rows, draws, remembers)

        def body() -> tuple[Tensor, Tensor]:
            return self._body(draws, remembers)

        step.bind(batch, rows)
        if graphs.captures and not step.capturable:
            chosen, logits = body()
        else:
            if graphs.lacks(key) and key not in self._eager:
                step.bind([], rows)
                graphs.capture(key, body)
                if step.failed_for_nobody:  # a replay could not tell whose sequence a plugin fails for
                    graphs.drop(key)
                    self._eager.add(key)
                step.bind(batch, rows)
            chosen, logits = body() if key in self._eager else graphs.run(key, body)
        step.advance()
        return chosen[: len(batch)], logits[: len(batch)]

    def _body(self, draws: bool, remembers: bool) -> tuple[Tensor, Tensor]:
        step = self.cache.step
        positions = step.open()
        logits = self.decoder.decode(self.tokens.index_select(0, step.lanes), positions, self._server)
        step.close()
        chosen = self.sampler.choose(logits, step.lanes, draws, remembers)
        self.tokens.index_copy_(0, step.lanes, chosen)
        return chosen, logits
