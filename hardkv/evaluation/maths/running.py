"""Makes the answers that are missing, and records each as it is finished."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from hardkv.errors import InputError
from hardkv.evaluation.maths.journal import Journal
from hardkv.evaluation.maths.problems import Problem
from hardkv.evaluation.maths.sample import Sample, Task, seed_of
from hardkv.evaluation.maths.scoring import Score, Scorer
from hardkv.results import Generation
from hardkv.runtime import HardKVRuntime


def check_room(prompts: Mapping[str, list[int]], max_new_tokens: int, max_positions: int) -> None:
    """Refuse answers that the model has no positions for, before any work; `prompts` are token ids by problem.

    Raises:
        InputError: says how many tokens there is room for.
    """
    longest = max(len(ids) for ids in prompts.values())
    room = max_positions - longest
    if max_new_tokens > room:
        raise InputError(
            f"answers of up to {max_new_tokens:,} tokens do not fit: the model has {max_positions:,} positions and the"
            f" longest prompt takes {longest:,}. Give --max-new-tokens {max(room, 1)} or fewer; an answer that is cut"
            " off before its box counts as wrong"
        )


def run(
    runtime: HardKVRuntime,
    tasks: Sequence[Task],
    problems: Mapping[str, Problem],
    prompts: Mapping[str, list[int]],
    scorer: Scorer,
    journal: Journal,
) -> Iterator[Sample | tuple[Task, str]]:
    """Make the answers of `tasks` that the journal does not hold; gives each, or the error that it failed with.

    `problems` and `prompts` (token ids) are by the key of a problem. A failed one is not recorded, so that a later run
    tries it again. The arguments are checked now, not when the first answer is asked for.

    Raises:
        InputError, CapacityError: as in `HardKVRuntime.generate`.
    """
    left = [task for task in tasks if task not in journal.samples]
    if not left:
        return iter(())
    seeds = [seed_of(runtime.config.seed, task) for task in left]
    finished = runtime.as_completed([prompts[task.problem] for task in left], seeds=seeds)
    return _record(runtime, left, finished, problems, scorer, journal)


def _record(
    runtime: HardKVRuntime,
    tasks: Sequence[Task],
    finished: Iterator[tuple[int, Generation]],
    problems: Mapping[str, Problem],
    scorer: Scorer,
    journal: Journal,
) -> Iterator[Sample | tuple[Task, str]]:
    start = time.perf_counter()
    for index, generation in finished:
        seconds = time.perf_counter() - start
        task = tasks[index]
        if generation.error is not None:
            yield task, generation.error
        else:
            peak = runtime.stats().kv_bytes_peak
            sample = _sample(task, generation, problems[task.problem].answer, scorer, peak, seconds)
            journal.add(sample)
            yield sample
        start = time.perf_counter()


def _sample(
    task: Task, generation: Generation, reference: str, scorer: Scorer, kv_bytes_peak: int, seconds: float
) -> Sample:
    stats = generation.stats
    # The last number of a thought that was cut off is no answer; a box is.
    cut_off = generation.finish_reason == "length" and "\\boxed" not in generation.text
    score = Score() if cut_off else scorer.score(reference, generation.text)
    return Sample(
        *task,
        correct=score.correct,
        extracted=score.extracted,
        failure=score.failure,
        finish_reason=generation.finish_reason,
        prompt_tokens=stats.prompt_tokens,
        answer_tokens=len(generation.token_ids),
        tokens_seen=stats.tokens_seen,
        tokens_kept=fmean(kept for layer in stats.tokens_kept for kept in layer),
        tokens_after_compression=stats.mean_tokens_after_compression,
        kv_bytes_peak=kv_bytes_peak,
        seconds=seconds,
        text=generation.text,
    )
