"""What was recorded of one sequence, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hardkv.errors import InputError

Ranges = list[int]
"""Ascending positions as start, end, start, end, ...; each end is one past its range."""


@dataclass(frozen=True)
class Step:
    """How full the tiers are after a decode step or a pass; slots are summed over compressed layers and heads."""

    step: int
    """Decode steps so far; 0 is the end of the prefill."""
    tokens_seen: int
    dense_slots: int
    sparse_shown_slots: int
    sparse_masked_slots: int
    """Held in the sparse tier, but not attended: a later pass may bring them back."""
    condensed_slots: int
    """Slots of the pool that a merging tier has filled."""
    pages: int
    kv_bytes: int


@dataclass(frozen=True)
class Pass:
    """What the prefill or a later compression pass left; per compressed layer, then per KV head."""

    step: int
    tokens_seen: int
    selected: bool
    """False where the sequence was still short enough to keep everything."""
    dense_tokens: int
    kept: list[list[int]]
    """Tokens that attention sees, the dense tier's included."""
    shown: list[list[Ranges]]
    """Positions that attention sees."""
    masked: list[list[Ranges]]
    """Positions that are held, but not attended."""
    pages: int
    kv_bytes: int


@dataclass(frozen=True)
class Trace:
    """One prompt and its answer, from inside the cache."""

    model: str
    dtype: str
    windows: list[int | None]
    """Per model layer: the sliding window in tokens, or None where all tokens are attended, and compression works."""
    heads: int
    sinks: int
    local_window: int
    interval: int
    page_slots: int
    prompt_tokens: int
    tokens: list[str]
    """The text that each token of prompt and answer adds; a character of several tokens stands at its last one."""
    finish_reason: str
    passes: list[Pass]
    steps: list[Step]

    @property
    def full_layers(self) -> list[int]:
        """The model layers that are compressed."""
        return [layer for layer, window in enumerate(self.windows) if window is None]

    @property
    def tokens_kept(self) -> list[list[int]]:
        """Tokens attended at the end per model layer and KV head; a sliding-window layer has its window."""
        last, newest = self.passes[-1], self.steps[-1]
        layers = max(len(self.full_layers) * self.heads, 1)
        grown = newest.dense_slots // layers - last.dense_tokens
        full = iter(last.kept)
        return [
            [count + grown for count in next(full)]
            if window is None
            else [min(window, newest.tokens_seen)] * self.heads
            for window in self.windows
        ]

    @property
    def ranked_heads(self) -> list[tuple[int, int, int]]:
        """`(tokens kept, model layer, KV head)` after the last pass, leanest first."""
        rows = zip(self.full_layers, self.passes[-1].kept, strict=True)
        return sorted((count, layer, head) for layer, row in rows for head, count in enumerate(row))

    def numbered(self, layer: int, head: int) -> int:
        """The place of a model layer among the compressed ones.

        Raises:
            InputError: no such layer or head, or a layer that is not compressed.
        """
        return place_of(self.windows, self.heads, layer, head)

    def mean_kept(self, index: int = -1) -> float:
        """Mean tokens per compressed head after a pass."""
        counts = [count for row in self.passes[index].kept for count in row]
        return sum(counts) / len(counts)

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trace:
        """The trace that `to_dict` gave.

        Raises:
            InputError: a key is missing or unknown.
        """
        try:
            parts = {
                "passes": [Pass(**each) for each in values["passes"]],
                "steps": [Step(**each) for each in values["steps"]],
            }
            return cls(**{**values, **parts})
        except (KeyError, TypeError) as error:
            raise InputError(
                f"expected the trace that 'hardkv inspect --json' writes under 'trace' ({error})"
            ) from None


def place_of(windows: Sequence[int | None], heads: int, layer: int, head: int) -> int:
    """The place of a model layer among those that are compressed, given the window of every layer.

    Raises:
        InputError: no such layer or head, or a layer that is not compressed.
    """
    if not 0 <= layer < len(windows):
        raise InputError(f"layer {layer}: the model has layers 0 to {len(windows) - 1}")
    if not 0 <= head < heads:
        raise InputError(f"head {head}: the model has KV heads 0 to {heads - 1}")
    compressed = [each for each, window in enumerate(windows) if window is None]
    if windows[layer] is not None:
        names = ", ".join(str(each) for each in compressed)
        raise InputError(
            f"layer {layer} attends a sliding window of {windows[layer]} tokens and is not compressed; {names} are"
        )
    return compressed.index(layer)
