"""One answer to one problem."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from hardkv.evaluation.maths.problems import Problem


class Task(NamedTuple):
    """One answer to be made."""

    cache: str
    """`compressed` or `full`."""
    problem: str
    """Key of the problem."""
    number: int
    """Which of the problem's answers, from 0 on."""


@dataclass(frozen=True)
class Sample:
    """A finished answer."""

    cache: str
    problem: str
    number: int
    correct: bool
    extracted: str | None
    """The expression that was compared."""
    failure: str | None
    """Why it could not be scored."""
    finish_reason: str
    prompt_tokens: int
    answer_tokens: int
    tokens_seen: int
    tokens_kept: float
    """At its end: mean over layers and heads."""
    tokens_after_compression: list[float]
    """After each compression: mean over full-attention layers and heads."""
    kv_bytes_peak: int
    """Most bytes of all sequences that ran with it, up to its end."""
    seconds: float
    """Wall time since the answer that was finished before it, scoring left out; they add up to that of the run."""
    text: str

    @property
    def task(self) -> Task:
        """What it answers."""
        return Task(self.cache, self.problem, self.number)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sample:
        """Read what `asdict` gave."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def without_text(self) -> Sample:
        """The same without its text, which may be long."""
        return replace(self, text="")


def tasks_of(cache: str, problems: Sequence[Problem], samples: int) -> list[Task]:
    """Every answer to be made; the first of each problem comes first, so that a part of a run is a fair sample."""
    return [Task(cache, problem.key, number) for number in range(samples) for problem in problems]


def seed_of(seed: int, task: Task) -> int:
    """The seed of an answer: from the run's, the problem and the number, so the same for both caches in any order."""
    digest = hashlib.sha256(f"{seed}/{task.problem}/{task.number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 2**63
