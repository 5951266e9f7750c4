"""What is hidden in a long text, and what is asked about it: four tasks, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from hardkv.evaluation.retrieval.filler import Placed

_ADJECTIVES = (
    "amber", "blue", "bronze", "crimson", "dusty", "gentle", "golden", "green", "grey", "hollow", "ivory",
    "jade", "lonely", "misty", "narrow", "old", "orange", "pale", "purple", "quiet", "red", "rusty", "silver",
    "steep", "sunny", "tall", "violet", "white", "wild", "yellow",
)  # fmt: skip
_NOUNS = (
    "abbey", "barn", "bridge", "cabin", "canal", "castle", "cellar", "chapel", "cottage", "farm", "forge",
    "garden", "gate", "harbour", "hotel", "island", "kitchen", "library", "lighthouse", "market", "mill",
    "museum", "office", "palace", "quarry", "school", "stable", "station", "theatre", "tower",
)  # fmt: skip
_VARIABLES = [f"{letter}{digit}" for letter in "ABCDEFGHKLMNPRSTUVWXYZ" for digit in "23456789"]


@dataclass(frozen=True)
class Difficulty:
    """How much is hidden beside what is asked for."""

    digits: int
    """Of every number."""
    distractors: int
    """Needles like the one that is asked for."""
    needles: int
    """Asked for together in `multi_needle`."""
    pairs: int
    """Lines of the table of `key_value`."""
    hops: int
    """From the variable that is asked for to its number."""


DIFFICULTIES: Mapping[str, Difficulty] = MappingProxyType(
    {
        "easy": Difficulty(digits=4, distractors=0, needles=2, pairs=8, hops=1),
        "normal": Difficulty(digits=5, distractors=3, needles=3, pairs=24, hops=2),
        "hard": Difficulty(digits=7, distractors=12, needles=4, pairs=64, hops=4),
    }
)

_SPREAD = 0.1
"""What belongs together lies within this share of the text, around the depth."""


@dataclass(frozen=True)
class Puzzle:
    """What is hidden, the question, the beginning of the answer, and the rest of it."""

    placed: list[Placed]
    question: str
    opening: str
    """The model goes on from here; so a small model, too, knows what is wanted."""
    rest: str
    expected: list[str]
    """Numbers, in the order asked for."""


def needle(source: random.Random, level: Difficulty, depth: float) -> Puzzle:
    """One code among those of other places."""
    names, numbers = _names(source, level.distractors + 1), _numbers(source, level.digits, level.distractors + 1)
    placed = [Placed(_code(names[0], numbers[0]), depth)]
    placed += [Placed(_code(*pair), source.random()) for pair in zip(names[1:], numbers[1:], strict=True)]
    opening = f"The secret code of the {names[0]} is the number"
    return Puzzle(placed, f"What is the secret code of the {names[0]}?", opening, f" {numbers[0]}.", numbers[:1])


def multi_needle(source: random.Random, level: Difficulty, depth: float) -> Puzzle:
    """Several codes around the depth, all asked for at once."""
    names, numbers = _names(source, level.needles), _numbers(source, level.digits, level.needles)
    told = [_code(*pair) for pair in zip(names, numbers, strict=True)]
    question = f"What are the secret codes of {_listed([f'the {name}' for name in names])}?"
    opening = f"The secret code of the {names[0]} is the number"
    return Puzzle(_around(depth, told), question, opening, " ".join(told)[len(opening) :], numbers)


def key_value(source: random.Random, level: Difficulty, depth: float) -> Puzzle:
    """A number in a table of many names, which stands at the depth."""
    names, numbers = _names(source, level.pairs), _numbers(source, level.digits, level.pairs)
    lines = [f"{name}: {number}" for name, number in zip(names, numbers, strict=True)]
    asked = source.randrange(level.pairs)
    table = Placed("\n" + "\n".join(lines) + "\n", depth)
    question = f"Which number stands beside {names[asked]} in the table?"
    return Puzzle([table], question, f"{names[asked]}:", f" {numbers[asked]}", [numbers[asked]])


def variable_tracking(source: random.Random, level: Difficulty, depth: float) -> Puzzle:
    """A number that is handed on from variable to variable, among variables that have nothing to do with it."""
    names = source.sample(_VARIABLES, level.hops + 1 + level.distractors)
    chain, others = names[: level.hops + 1], names[level.hops + 1 :]
    number, *wrong = _numbers(source, level.digits, 1 + level.distractors)
    hops = [f"The variable {new} is equal to {old}." for old, new in pairwise(chain)]
    told = [f"The variable {chain[0]} is equal to {number}.", *hops]
    placed = _around(depth, told)
    placed += [
        Placed(f"The variable {name} is equal to {value}.", source.random())
        for name, value in zip(others, wrong, strict=True)
    ]
    opening = f"{hops[-1]} The variable {chain[-2]} is equal to"
    rest = " ".join([*hops[-2::-1], told[0]])[len(f"The variable {chain[-2]} is equal to") :]
    return Puzzle(placed, f"What number is the variable {chain[-1]} equal to?", opening, rest, [number])


TASKS: Mapping[str, Callable[[random.Random, Difficulty, float], Puzzle]] = MappingProxyType(
    {
        "needle": needle,
        "multi_needle": multi_needle,
        "key_value": key_value,
        "variable_tracking": variable_tracking,
    }
)


def _code(name: str, number: str) -> str:
    return f"The secret code of the {name} is the number {number}."


def _around(depth: float, told: list[str]) -> list[Placed]:
    """The sentences in their order, evenly spread around the depth."""
    start = min(max(depth - _SPREAD / 2, 0.0), 1.0 - _SPREAD)
    return [Placed(text, start + _SPREAD * index / max(1, len(told) - 1)) for index, text in enumerate(told)]


def _names(source: random.Random, count: int) -> list[str]:
    """Names of places, none twice; while there are enough, no word twice."""
    whole = len(_ADJECTIVES)
    adjectives, nouns = source.sample(_ADJECTIVES, whole), source.sample(_NOUNS, whole)
    return [f"{adjectives[index % whole]} {nouns[(index % whole + index // whole) % whole]}" for index in range(count)]


def _numbers(source: random.Random, digits: int, count: int) -> list[str]:
    return [str(number) for number in source.sample(range(10 ** (digits - 1), 10**digits), count)]


def _listed(items: list[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}"
