"""Greedy generation from the texts' prompts, and where it leaves that of the full cache."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from hardkv.errors import HardKVError
from hardkv.runtime import HardKVRuntime


def run_free(runtime: HardKVRuntime, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Generate greedily, whatever the configuration says of sampling, past the model's end token.

    Raises:
        HardKVError: a text failed.
    """
    plain: dict[str, Any] = {
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": None,
        "stop": (),
        "stop_token_ids": (),
    }
    found = runtime.generate(list(prompts), max_new_tokens=tokens, ignore_eos=True, **plain)
    for generation in found:
        if generation.error is not None:
            raise HardKVError(generation.error)
    return [generation.token_ids for generation in found]


def compare_free(names: Sequence[str], full: Sequence[list[int]], own: Sequence[list[int]]) -> dict[str, Any]:
    """The index of the first token that differs, by text (their number where none does), and the share that is same."""
    same = [[a == b for a, b in zip(theirs, ours, strict=True)] for theirs, ours in zip(full, own, strict=True)]
    first = [row.index(False) if False in row else len(row) for row in same]
    return {
        "first_divergence": dict(zip(names, first, strict=True)),
        "first_divergence_median": float(median(first)),
        "first_divergence_mean": fmean(first),
        "same_tokens": fmean(fmean(row) for row in same),
    }
