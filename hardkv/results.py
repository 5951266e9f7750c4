"""What generation gives back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a chosen token and of the likeliest ones, natural logarithm, of the model's distribution."""

    token_id: int
    logprob: float
    top_logprobs: dict[int, float]


@dataclass(frozen=True)
class SequenceStats:
    """One sequence's cache when it ended."""

    prompt_tokens: int
    tokens_seen: int
    tokens_kept: list[list[int]]
    """Per model layer and KV head; a sliding-window layer keeps its window."""
    compressions: int
    mean_tokens_after_compression: list[float]
    """Mean over full-attention layers and heads, after each compression."""

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Generation:
    """What one prompt led to."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    """`stop`: an end token or a stop text; `length`: the token limit; `error`: see `error`, the text came before it."""
    logprobs: list[TokenLogprob] | None
    stats: SequenceStats
    error: str | None = None


@dataclass(frozen=True)
class Piece:
    """A piece of a stream: text is added as soon as it is certain."""

    text: str
    token_id: int | None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class RuntimeStats:
    """The latest call, all its sequences together."""

    tokens_seen: int
    """Prompt and generated tokens, summed over sequences."""
    tokens_kept: list[list[float]]
    """Per model layer and KV head, mean over sequences, as each was when it ended."""
    kv_bytes: int
    """Physical bytes of everything allocated for the cache and in use, in the latest decode step."""
    kv_bytes_peak: int
    """The most held at any moment, prefill included."""
    kv_bytes_reserved: int
    """Bytes of the pool and the buffers as allocated, whether in use or not."""
    compressions: int
    mean_tokens_after_compression: float | None
    """Mean over full-attention layers, heads, sequences and compressions."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Per phase, not overlapping: prefill, prefill_compression (selection among the prompt's tokens), decode,
    compression (the passes while decoding)."""
    generated_tokens: int = 0
    step_seconds: list[float] = field(default_factory=list)
    """Wall time of each decode step of the batch, the compressions before it included."""

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary, for JSON."""
        return asdict(self)
