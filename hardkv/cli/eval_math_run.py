"""What `hardkv eval math` does at length: open what is recorded, answer what is missing, collect the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from hardkv.cli.session import messages
from hardkv.errors import InputError

if TYPE_CHECKING:
    from hardkv.config import LoadedConfig
    from hardkv.evaluation.maths import Journal, Problems, Sample, Scorer, Task
    from hardkv.model_adapter import LoadedModel
    from hardkv.runtime import HardKVRuntime

_NO_PART_OF_AN_ANSWER = {"pool_bytes", "max_sequences", "prefill_chunk_tokens"}


@dataclass(frozen=True)
class Plan:
    """What is asked, and how."""

    source: str
    preset: str
    problems: Problems
    samples: int
    chat: bool
    ready: LoadedConfig
    loaded: LoadedModel

    def settings(self, cache: str) -> dict[str, Any]:
        """What decides about an answer; those of the full cache know nothing of the method, so all methods share it."""
        from hardkv import __version__
        from hardkv.evaluation.maths import INSTRUCTION

        config = self.ready.config.model_dump()
        kept: dict[str, Any] = {
            "hardkv": __version__,
            "model": {key: config["model"][key] for key in ("id", "revision", "dtype")},
            "cache": cache,
            "generation": config["generation"],
            "seed": config["seed"],
            "instruction": INSTRUCTION,
            "chat": self.chat,
        }
        if cache == "compressed":
            slots = ("plugins", "scorer", "calibrator", "budget", "regularizer", "condenser")
            kept["cache"] = {key: value for key, value in config["cache"].items() if key not in _NO_PART_OF_AN_ANSWER}
            kept.update({slot: config[slot] for slot in slots})
        return kept


@dataclass(frozen=True)
class Arm:
    """One of the two caches."""

    cache: str
    runtime: HardKVRuntime
    journal: Journal
    tasks: list[Task]
    answers: Iterator[Sample | tuple[Task, str]]

    def samples(self) -> list[Sample]:
        """What is finished of this run's answers; the journal may hold more."""
        return [self.journal.samples[task] for task in self.tasks if task in self.journal.samples]


def open_arms(plan: Plan, scorer: Scorer, folder: Path, full: bool, stack: ExitStack) -> list[Arm]:
    """Make all checks of both caches, before either begins.

    Raises:
        InputError, CapacityError: something does not fit, or another process writes the same journal.
    """
    from hardkv.config import resolve
    from hardkv.evaluation import provenance
    from hardkv.evaluation.maths import Journal, check_room, prompt_of, run, tasks_of
    from hardkv.prompts import read_prompts
    from hardkv.runtime import HardKVRuntime

    config, loaded = plan.ready.config, plan.loaded
    problems = {problem.key: problem for problem in plan.problems.problems}
    asked = [prompt_of(problem.question, plan.chat) for problem in problems.values()]
    embeddings: Any = loaded.model.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    prompts = dict(zip(problems, read_prompts(asked, loaded.tokenizer, vocabulary).token_ids, strict=True))
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"--journal {folder}: cannot be made a folder: {error.strerror}") from None
    arms = []
    for cache in _caches(config.compression, full):
        settings = config.model_copy(update={"compression": cache == "compressed"})
        runtime = HardKVRuntime(settings, resolve(settings, plan.ready.registry), loaded)
        check_room(prompts, config.generation.max_new_tokens, runtime.geometry.max_positions)
        path = folder / f"{Path(plan.source).stem}-{cache}-{_digest(plan.settings(cache))}.jsonl"
        journal = Journal(path, plan.settings(cache), provenance(loaded.model.device))
        stack.callback(journal.close)
        tasks = tasks_of(cache, plan.problems.problems, plan.samples)
        arms.append(Arm(cache, runtime, journal, tasks, run(runtime, tasks, problems, prompts, scorer, journal)))
        done = len(arms[-1].samples())
        messages().print(f"{path}: {done} of {len(tasks)} answers are there", soft_wrap=True, markup=False)
    return arms


def answer_all(plan: Plan, arms: Sequence[Arm]) -> tuple[dict[str, str], bool]:
    """Make what is missing, with progress; gives what failed with its error, and whether somebody broke it off."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = messages()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed: dict[str, str] = {}
    names = {problem.key: problem.name for problem in plan.problems.problems}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        try:
            for arm in arms:
                row = bar.add_task(arm.cache, total=len(arm.tasks), completed=len(arm.samples()))
                right = sum(sample.correct for sample in arm.samples())
                for answer in arm.answers:
                    if isinstance(answer, tuple):
                        task, error = answer
                        failed[f"{arm.cache}, problem {names[task.problem]}, answer {task.number + 1}"] = error
                        continue
                    right += answer.correct
                    done = len(arm.samples())
                    bar.update(row, completed=done, description=f"{arm.cache}, {right / done:.1%} right")
                    if not console.is_terminal:
                        console.print(escape(_line(answer, names, done, len(arm.tasks), right)), soft_wrap=True)
                arm.runtime.reset()
        except KeyboardInterrupt:
            return failed, True
    for place, error in failed.items():
        console.print(f"failed: {place}: {error}", soft_wrap=True, markup=False)
    return failed, False


def found_so_far(command: str, plan: Plan, arms: Sequence[Arm], failed: dict[str, str]) -> dict[str, Any]:
    """The result for JSON."""
    from hardkv.evaluation import provenance
    from hardkv.evaluation.maths import difference, per_problem, summarize

    samples = {arm.cache: arm.samples() for arm in arms}
    question, answer = plan.problems.fields
    return {
        "kind": "math",
        "command": command,
        "complete": all(len(samples[arm.cache]) == len(arm.tasks) for arm in arms),
        "data": plan.source,
        "fields": {"question": question, "answer": answer},
        "left_out": plan.problems.left_out,
        "preset": plan.preset,
        "samples_per_problem": plan.samples,
        **provenance(plan.loaded.model.device),
        "settings": {arm.cache: plan.settings(arm.cache) for arm in arms},
        "max_sequences": plan.ready.config.cache.max_sequences,
        "journals": {arm.cache: str(arm.journal.path) for arm in arms},
        "caches": {cache: summarize(group, plan.samples) for cache, group in samples.items()},
        "difference": difference(samples["compressed"], samples["full"]) if len(samples) == 2 else None,
        "failed": failed,
        "problems": per_problem(plan.problems.problems, [sample for group in samples.values() for sample in group]),
    }


def _caches(compression: bool, full: bool) -> list[str]:
    if not compression and not full:
        raise InputError("--no-full with compression false leaves nothing to run; drop one of them")
    return [*(["compressed"] if compression else []), *(["full"] if full else [])]


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _line(sample: Sample, names: dict[str, str], done: int, total: int, right: int) -> str:
    verdict = "right" if sample.correct else "not scored" if sample.failure is not None else "wrong"
    place = f"{sample.cache} {done}/{total}: problem {names[sample.problem]}, answer {sample.number + 1}"
    return f"{place}: {verdict}, {sample.answer_tokens:,} tokens; {right / done:.1%} right so far"
