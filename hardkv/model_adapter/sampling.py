"""Chooses the next token with transformers' own logits processors, one generator per sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hardkv.config import GenerationSettings


@dataclass(frozen=True)
class Choice:
    """One chosen token."""

    token_id: int
    logprob: float | None  # natural logarithm, of the model's own distribution
    top_logprobs: dict[int, float]  # the likeliest alternatives, by token id


class Sampler:
    """Samples for one sequence; the same seed gives the same tokens, alone or in a batch."""

    def __init__(self, settings: GenerationSettings, seed: int, prompt_ids: list[int], device: torch.device) -> None:
        self.settings = settings
        self.history = list(prompt_ids)
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.processors = LogitsProcessorList()
        if settings.repetition_penalty != 1.0:
            self.processors.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
        if settings.temperature > 0.0:
            if settings.temperature != 1.0:
                self.processors.append(TemperatureLogitsWarper(settings.temperature))
            if settings.top_k:
                self.processors.append(TopKLogitsWarper(settings.top_k))
            if settings.top_p < 1.0:
                self.processors.append(TopPLogitsWarper(settings.top_p))
            if settings.min_p > 0.0:
                self.processors.append(MinPLogitsWarper(settings.min_p))

    @property
    def is_plain(self) -> bool:
        """Whether the choice is the argmax of the raw logits and nothing more."""
        return not self.processors and self.settings.temperature == 0.0 and self.settings.logprobs is None

    def accept(self, token_id: int) -> None:
        """Note a token that was chosen."""
        self.history.append(token_id)

    def choose(self, logits: Tensor) -> Choice:
        """Choose from `logits [vocabulary]` float32."""
        scores = logits[None]
        if self.processors:
            seen: Any = torch.tensor([self.history], device=logits.device)
            scores = self.processors(seen, cast(Any, scores))
        if self.settings.temperature == 0.0:
            chosen = int(scores[0].argmax())
        else:
            chosen = int(torch.multinomial(torch.softmax(scores[0], -1), 1, generator=self.generator))
        if self.settings.logprobs is None:
            return Choice(chosen, None, {})
        logprobs = torch.log_softmax(logits, -1)
        values, ids = logprobs.topk(self.settings.logprobs)
        alternatives = dict(zip(ids.tolist(), values.tolist(), strict=True))
        return Choice(chosen, float(logprobs[chosen]), alternatives)
