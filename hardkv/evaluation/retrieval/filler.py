"""Text that nothing is asked about, to any length, cut so that a prompt has the tokens that are wanted."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_TEXTS = ("dialogue.txt", "prose.txt", "report.txt")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Placed:
    """A sentence that must stand in the text, at `depth` in [0, 1]: the share of the filler that stands before it."""

    text: str
    depth: float


def sentences() -> list[str]:
    """Sentences of the texts that come with the package, speakers left out."""
    folder = Path(__file__).parents[1] / "texts"
    found: list[str] = []
    for name in _TEXTS:
        for paragraph in (folder / name).read_text(encoding="utf-8").split("\n"):
            text = re.sub(r"^[A-Z]+: ", "", paragraph.strip())
            found += [one for one in _SENTENCE_END.split(text) if one.endswith((".", "!", "?"))]
    return found


def fill(placed: Sequence[Placed], count: Callable[[str], int], tokens: int, source: random.Random) -> str:
    """Text of at most `tokens` by `count`, and as near as whole words allow, around the sentences of `placed`.

    The filler's sentences come in an order that `source` draws, again and again; the first of them may be cut.
    """
    bare = count(_woven([], placed))
    if bare > tokens:
        raise ValueError(f"the placed sentences alone take {bare} tokens of {tokens}")
    words: list[list[str]] = []
    total, low, high = 0, 0, 1
    text = sentences()
    while True:
        while total < high:
            drawn = source.sample(text, len(text))
            words += [one.split() for one in drawn]
            total += sum(len(one.split()) for one in drawn)
        if count(_woven(_newest(words, high), placed)) > tokens:
            break
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        fits = count(_woven(_newest(words, middle), placed)) <= tokens
        low, high = (middle, high) if fits else (low, middle)
    return _woven(_newest(words, low), placed)


def _newest(words: Sequence[Sequence[str]], count: int) -> list[str]:
    """Sentences with `count` words in all: whole ones, but for the first, of which the end is taken."""
    taken: list[str] = []
    for sentence in words:
        part = sentence[-count:] if count else []
        if not part:
            break
        taken.append(" ".join(part))
        count -= len(part)
    return taken[::-1]


def _woven(filler: Sequence[str], placed: Sequence[Placed]) -> str:
    """The filler with each placed sentence at the boundary nearest to its depth; equal ones in the order given."""
    lengths = [len(sentence) for sentence in filler]
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    at = [min(range(len(bounds)), key=lambda slot: abs(bounds[slot] - one.depth * bounds[-1])) for one in placed]
    parts: list[str] = []
    for slot in range(len(bounds)):
        parts += [one.text for one, where in zip(placed, at, strict=True) if where == slot]
        parts += filler[slot : slot + 1]
    return " ".join(parts)
