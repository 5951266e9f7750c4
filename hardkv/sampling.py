"""Chooses the next token of every row at once, on the device: no host sync, so that it can be part of a CUDA graph.

The rules and their order are those of transformers' logits processors: repetition penalty, temperature, top-k, top-p,
min-p. Each row draws with a number computed from its own seed and count of tokens, so that the same seed gives the same
tokens, alone or in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingRules:
    """How one sequence chooses; the defaults change nothing, and a temperature of 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def draws(self) -> bool:
        """Whether a token is drawn; else the likeliest is taken."""
        return self.temperature > 0.0

    @property
    def remembers(self) -> bool:
        """Whether the tokens so far matter."""
        return self.repetition_penalty != 1.0


@dataclass(frozen=True)
class Choice:
    """One chosen token."""

    token_id: int
    logprob: float | None  # natural logarithm, of the model's own distribution
    top_logprobs: dict[int, float]  # the likeliest alternatives, by token id


class Sampler:
    """The rules, seeds and histories of `lanes` sequences; one lane more stands for nobody."""

    def __init__(self, lanes: int, vocabulary: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self._rules = torch.zeros(4, lanes + 1, device=device)  # temperature, top-p, min-p, repetition penalty
        self._rules[1::2] = 1.0
        self._top_k = torch.full((lanes + 1,), vocabulary, device=device)
        self._seeds = torch.zeros(lanes + 1, dtype=torch.int64, device=device)
        self._drawn = torch.zeros(lanes + 1, dtype=torch.int64, device=device)
        self._history: Tensor | None = None

    def open(self, lane: int, rules: SamplingRules, seed: int, prompt_ids: Sequence[int]) -> None:
        """Set a lane up for a sequence."""
        rest = (rules.top_p, rules.min_p, rules.repetition_penalty)
        self._rules[:, lane].copy_(torch.tensor([rules.temperature, *rest]))
        self._top_k[lane : lane + 1].fill_(rules.top_k or self.vocabulary)
        self._seeds[lane : lane + 1].fill_(seed)
        self._drawn[lane : lane + 1].fill_(0)
        if rules.remembers:
            if self._history is None:
                size = (self._seeds.shape[0], self.vocabulary)
                self._history = torch.zeros(size, dtype=torch.bool, device=self._seeds.device)
            self._history[lane].zero_()
            self._history[lane].index_fill_(
                0, torch.tensor(prompt_ids, dtype=torch.int64, device=self._seeds.device), True
            )

    def choose(self, logits: Tensor, lanes: Tensor, draws: bool, remembers: bool) -> Tensor:
        """Choose one token for each row of `logits [R, V]` float32, whose lanes are `lanes [R]`; gives `[R]` int64.

        `draws`, `remembers`: whether any row's rules do; if not, that work is left out.
        """
        temperature, top_p, min_p, penalty = self._rules.index_select(1, lanes)[..., None]  # [R, 1] each
        if remembers:
            assert self._history is not None
            seen = self._history.index_select(0, lanes)
            logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        chosen = logits.argmax(-1)
        if draws:
            top_k = self._top_k.index_select(0, lanes)[:, None]
            drawn = self._draw(logits, lanes, temperature, top_k, top_p, min_p)
            chosen = torch.where(temperature[:, 0] > 0.0, drawn, chosen)
        if remembers:
            assert self._history is not None
            self._history.view(-1).index_fill_(0, lanes * self.vocabulary + chosen, True)
        self._drawn.index_add_(0, lanes, torch.ones_like(lanes))
        return chosen

    def _draw(
        self, logits: Tensor, lanes: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> Tensor:
        """Sort, cut the tail off, and take the token at which the cumulated probability passes a uniform number."""
        scores = logits / torch.where(temperature > 0.0, temperature, 1.0)
        ranked, order = torch.sort(scores, dim=-1, descending=True, stable=True)
        rank = torch.arange(ranked.shape[-1], device=ranked.device)
        weights = torch.exp(ranked - ranked[:, :1]).masked_fill(rank >= top_k, 0.0)
        # Each rule keeps the first ones of the order, so what all keep is the shortest of these.
        before = torch.cumsum(weights, -1) - weights
        kept = (before < top_p * weights.sum(-1, keepdim=True)) & (weights >= min_p) & (rank < top_k)
        kept |= rank == 0
        weights = weights * kept
        reached = torch.cumsum(weights, -1)
        uniform = uniform_of(self._seeds.index_select(0, lanes), self._drawn.index_select(0, lanes))
        place = (reached <= uniform[:, None] * reached[:, -1:]).sum(-1, keepdim=True)
        return order.gather(-1, torch.minimum(place, kept.sum(-1, keepdim=True) - 1))[:, 0]


def uniform_of(seeds: Tensor, counts: Tensor) -> Tensor:
    """Uniform float32 numbers in [0, 1) from `seeds` and `counts` int64, elementwise: the SplitMix64 sequence.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), figure 16.
    """
    mixed = seeds + (counts + 1) * _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shift(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shift(mixed, 27)) * _signed(0x94D049BB133111EB)
    mixed = mixed ^ _shift(mixed, 31)
    return _shift(mixed, 40).float() * 2.0**-24


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _shift(numbers: Tensor, bits: int) -> Tensor:
    """Shift 64-bit numbers to the right, zeros coming in."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def with_logprobs(token_id: int, logits: Tensor, alternatives: int) -> Choice:
    """The choice of `token_id` with log-probabilities from `logits [V]`; waits for the device."""
    logprobs = torch.log_softmax(logits, -1)
    values, ids = logprobs.topk(alternatives)
    return Choice(token_id, float(logprobs[token_id]), dict(zip(ids.tolist(), values.tolist(), strict=True)))
