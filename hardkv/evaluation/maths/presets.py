"""The prompt and the sampling of an evaluation, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Preset:
    """How problems are sampled; a value that the configuration's `generation` section names takes its place."""

    samples: int
    """Answers to each problem."""
    max_new_tokens: int
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    limit: int | None = None
    """Only so many problems, from the first on."""

    @property
    def generation(self) -> dict[str, Any]:
        """Keys of the configuration's `generation` section."""
        names = ("max_new_tokens", "temperature", "top_p", "top_k")
        return {name: getattr(self, name) for name in names}


PRESETS = {
    "paper": Preset(samples=8, max_new_tokens=32_768),
    "greedy": Preset(samples=1, max_new_tokens=32_768, temperature=0.0, top_p=1.0, top_k=0),
    "quick": Preset(samples=1, max_new_tokens=2_048, limit=20),
}
"""`paper` samples as the evaluation script that the authors of HARD-KV released; see the documentation."""


def prompt_of(question: str, chat: bool) -> Any:
    """The prompt of a problem, as a chat or as text."""
    text = f"{question.strip()}\n{INSTRUCTION}"
    return [{"role": "user", "content": text}] if chat else f"{text}\n\n"
