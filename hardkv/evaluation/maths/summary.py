"""What a set of answers says: shares with their standard errors, lengths, memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import fmean, median, stdev
from typing import Any

from hardkv.evaluation.maths.problems import Problem
from hardkv.evaluation.maths.sample import Sample


def summarize(samples: Sequence[Sample], per_problem: int) -> dict[str, Any]:
    """Describe the answers of one cache; `per_problem`: how many each problem is to have.

    Every figure is over all answers, right or wrong, but `correct_tokens`. The standard error takes a problem's
    answers for one draw, since they stand or fall together.
    """
    problems = _by_problem(samples)
    means = [fmean(sample.correct for sample in group) for group in problems.values()]
    whole = [group for group in problems.values() if len(group) == per_problem]
    budgets = [fmean(sample.tokens_after_compression) for sample in samples if sample.tokens_after_compression]
    seconds = sum(sample.seconds for sample in samples)
    return {
        "problems": len(problems),
        "samples": len(samples),
        "accuracy": _mean(means),
        "accuracy_error": _error(means),
        f"pass_at_{per_problem}": (
            _mean([any(sample.correct for sample in group) for group in whole]) if per_problem > 1 else None
        ),
        "answer_tokens": _lengths(samples),
        "correct_tokens": _lengths([sample for sample in samples if sample.correct]),
        "truncated": _mean([sample.finish_reason == "length" for sample in samples]),
        "unanswered": _mean([sample.extracted is None and sample.failure is None for sample in samples]),
        "scoring_failures": [
            {"problem": sample.problem, "number": sample.number, "reason": sample.failure}
            for sample in samples
            if sample.failure is not None
        ],
        "mean_budget": _mean(budgets),
        "tokens_kept_share": _share(sum(s.tokens_kept for s in samples), sum(s.tokens_seen for s in samples)),
        "kv_bytes_peak": max((sample.kv_bytes_peak for sample in samples), default=None),
        "tokens_per_second": _share(sum(sample.answer_tokens for sample in samples), seconds),
        "seconds": seconds,
    }


def difference(compressed: Iterable[Sample], full: Iterable[Sample]) -> dict[str, Any]:
    """Accuracy of the compressed cache less that of the full one, over the answers that both have.

    The standard error is that of the problems' differences: how hard a problem is cancels out.
    """
    other = {(sample.problem, sample.number): sample for sample in full}
    pairs: dict[str, list[int]] = defaultdict(list)
    for sample in compressed:
        match = other.get((sample.problem, sample.number))
        if match is not None:
            pairs[sample.problem].append(int(sample.correct) - int(match.correct))
    means = [fmean(group) for group in pairs.values()]
    return {"pairs": sum(map(len, pairs.values())), "accuracy": _mean(means), "accuracy_error": _error(means)}


def per_problem(problems: Sequence[Problem], samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """Each problem with what was answered to it, by cache."""
    answers: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in sorted(samples, key=lambda sample: sample.number):
        answers[sample.problem][sample.cache].append(sample)
    return [
        {
            "problem": problem.key,
            "name": problem.name,
            "reference": problem.answer,
            **{
                cache: [
                    {
                        "number": sample.number,
                        "correct": sample.correct,
                        "extracted": sample.extracted,
                        "answer_tokens": sample.answer_tokens,
                        "finish_reason": sample.finish_reason,
                    }
                    for sample in group
                ]
                for cache, group in answers[problem.key].items()
            },
        }
        for problem in problems
    ]


def _by_problem(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.problem].append(sample)
    return groups


def _lengths(samples: Sequence[Sample]) -> dict[str, float | None]:
    tokens = [sample.answer_tokens for sample in samples]
    return {"mean": _mean(tokens), "median": median(tokens) if tokens else None}


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _error(values: Sequence[float]) -> float | None:
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
