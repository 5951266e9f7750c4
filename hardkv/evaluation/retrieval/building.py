"""Samples as token ids: the model's chat template around the text, the question and the beginning of the answer."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

from hardkv.errors import InputError
from hardkv.evaluation.retrieval.filler import fill
from hardkv.evaluation.retrieval.tasks import TASKS, Difficulty

_SLACK_TOKENS = 8
"""Tokens that an answer may have beyond the shortest right one."""
_BODY = "[the text]"
_TASK_LINE = "Read the text and remember the numbers in it.\n\n"


@dataclass(frozen=True)
class Sample:
    """One prompt with what is right."""

    task: str
    context_tokens: int
    """Tokens that were wanted; the prompt has as many or a few fewer."""
    depth: float
    index: int
    context_ids: list[int]
    """Template and text."""
    question_ids: list[int]
    """The question and the beginning of the answer."""
    expected: list[str]
    max_new_tokens: int

    @property
    def prompt_ids(self) -> list[int]:
        """All of it."""
        return self.context_ids + self.question_ids

    @property
    def prompt_hash(self) -> str:
        """Names the prompt, in 16 hexadecimal digits."""
        return hashlib.sha256(repr(self.prompt_ids).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Frame:
    """What the chat template puts before and after a user's message; nothing, but for special tokens, without one."""

    tokenizer: Any
    before: str
    after: str
    templated: bool

    def context_ids(self, text: str) -> list[int]:
        """Ids of the template's beginning and the text."""
        return self._ids(self.before + _TASK_LINE + text, specials=not self.templated)

    def question_ids(self, question: str, opening: str) -> list[int]:
        """Ids of the question, the template's end and the beginning of the answer."""
        return self._ids(f"\n\n{question}{self.after}{opening}", specials=False)

    def _ids(self, text: str, specials: bool) -> list[int]:
        return [int(token) for token in self.tokenizer(text, add_special_tokens=specials)["input_ids"]]


def read_frame(tokenizer: Any, chat: bool | None = None) -> Frame:
    """The frame of a tokenizer; `chat`: whether to use its chat template, None where it has one.

    Raises:
        InputError: a chat is asked for, but there is no template.
    """
    template = getattr(tokenizer, "chat_template", None)
    if chat and not template:
        raise InputError("--chat: this model's tokenizer has no chat template; leave it out, or pass --raw")
    if not template or chat is False:
        return Frame(tokenizer, "", "\n", False)
    message = [{"role": "user", "content": _BODY}]
    before, _, after = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False).partition(
        _BODY
    )
    return Frame(tokenizer, before, after, True)


def build(
    frame: Frame, task: str, level: Difficulty, context_tokens: int, depth: float, index: int, seed: int
) -> Sample:
    """The sample that these arguments name, the same on every machine.

    Raises:
        InputError: what is hidden and asked alone takes more than `context_tokens`.
    """
    source = random.Random(f"{seed}/{task}/{context_tokens}/{depth:g}/{index}")
    puzzle = TASKS[task](source, level, depth)
    question_ids = frame.question_ids(puzzle.question, puzzle.opening)

    def count(text: str) -> int:
        return len(frame.context_ids(text)) + len(question_ids)

    try:
        text = fill(puzzle.placed, count, context_tokens, source)
    except ValueError as error:
        raise InputError(f"--contexts {context_tokens}: too short for task '{task}': {error}") from None
    rest = frame.tokenizer(puzzle.rest, add_special_tokens=False)["input_ids"]
    return Sample(
        task=task,
        context_tokens=context_tokens,
        depth=depth,
        index=index,
        context_ids=frame.context_ids(text),
        question_ids=question_ids,
        expected=puzzle.expected,
        max_new_tokens=len(rest) + _SLACK_TOKENS,
    )
