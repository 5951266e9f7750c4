"""Plans which tokens to feed for the log-likelihoods that lm-evaluation-harness asks for, and reads them off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hardkv.errors import InputError

Pair = tuple[list[int], list[int]]
"""Tokens of a context, and of the continuation to score."""


@dataclass(frozen=True)
class Run:
    """Tokens to feed once: a prompt, what follows it, and the pairs that they score, by index."""

    prompt: list[int]
    forced: list[int]
    members: list[int]


@dataclass(frozen=True)
class CallLimits:
    """What one call of the runtime may hold."""

    sequences: int
    positions: int  # of the longest prompt and the longest forced tokens together
    rows: int  # log-probabilities `[vocabulary]`, all sequences together


def fit(pair: Pair, max_length: int, prefix: int) -> Pair:
    """The pair in `max_length` fed tokens, the beginning of the context cut off; `prefix` is an empty context.

    Raises:
        InputError: the continuation alone is too long.
    """
    context, continuation = pair
    # The last token is predicted, never fed.
    room = max_length + 1 - len(continuation)
    if room < 1:
        raise InputError(f"a continuation has {len(continuation)} tokens; at most {max_length} fit")
    return (context or [prefix])[-room:], continuation


def plan_runs(pairs: Sequence[Pair], decoded_tokens: int) -> list[Run]:
    """Runs that score all pairs; those that differ in their last token only, as choices A to D do, share one.

    `decoded_tokens`: of a context, so many at its end follow the prompt instead of belonging to it.
    """
    runs: dict[tuple[tuple[int, ...], tuple[int, ...]], Run] = {}
    for index, (context, continuation) in enumerate(pairs):
        if not continuation:
            continue
        start = len(context) - min(decoded_tokens, len(context) - 1)
        run = Run(context[:start], [*context[start:], *continuation], [])
        runs.setdefault((tuple(context), tuple(continuation[:-1])), run).members.append(index)
    return list(runs.values())


def plan_calls(runs: Sequence[Run], limits: CallLimits) -> Iterator[list[Run]]:
    """The runs in order, as many at a time as the limits allow, at least one."""
    call: list[Run] = []
    for run in runs:
        together = [*call, run]
        longest = max(len(one.prompt) for one in together) + max(len(one.forced) for one in together)
        rows = sum(len(one.forced) for one in together)
        if call and (len(together) > limits.sequences or longest > limits.positions or rows > limits.rows):
            yield call
            together = [run]
        call = together
    if call:
        yield call


def score(logprobs: Tensor, continuation: list[int]) -> tuple[float, bool]:
    """Log-likelihood of the continuation by the last rows of `logprobs [T, V]`, and whether each token is likeliest."""
    rows, tokens = logprobs[-len(continuation) :], torch.tensor(continuation)
    return float(rows.gather(1, tokens[:, None]).sum()), bool((rows.argmax(-1) == tokens).all())
