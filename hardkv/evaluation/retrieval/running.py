"""Runs samples through a runtime with every token kept and through compressed ones, and gathers what was answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, Literal, cast

from hardkv.config import HardKVConfig, resolve
from hardkv.errors import InputError
from hardkv.evaluation.methods import Method, all_methods, choose
from hardkv.evaluation.retrieval.building import Frame, Sample, build
from hardkv.evaluation.retrieval.scoring import score, standard_error
from hardkv.evaluation.retrieval.tasks import DIFFICULTIES, TASKS
from hardkv.interfaces import Budget
from hardkv.model_adapter import LoadedModel
from hardkv.registry import SLOTS, Registry
from hardkv.results import Generation
from hardkv.runtime import HardKVRuntime

FULL = "full cache"
"""Name of the runs with every token kept."""
_SMALL_PARAMETERS = 1_000_000_000


Before = Literal["answer", "last", "question"]


@dataclass(frozen=True)
class Plan:
    """Which samples are asked, and how."""

    tasks: tuple[str, ...]
    contexts: tuple[int, ...]
    """Tokens of a prompt."""
    depths: tuple[float, ...]
    samples: int
    """Of each task, context and depth."""
    difficulty: str
    compress_before: Before
    """What is read after the compression: nothing of the prompt, its last token, or the whole question."""
    """Compress the text before the question is read; else the prompt is compressed with the question at its end."""
    batch: int
    """Prompts that are generated for together."""
    seed: int

    def build(self, frame: Frame) -> dict[int, list[Sample]]:
        """All samples, by context; each draws from its own part of the seed."""
        level = DIFFICULTIES[self.difficulty]
        cells = list(product(self.tasks, self.depths, range(self.samples)))
        return {
            tokens: [build(frame, task, level, tokens, depth, index, self.seed) for task, depth, index in cells]
            for tokens in self.contexts
        }


@dataclass(frozen=True)
class Answer:
    """What one method made of one sample."""

    method: str
    task: str
    context_tokens: int
    depth: float
    index: int
    prompt_hash: str
    prompt_tokens: int
    expected: list[str]
    answer: str
    correct: float
    """Share of the expected numbers; 0 where it failed."""
    answer_tokens: int
    mean_tokens: float
    """Per head after the compression; of every token kept, the prompt's."""
    error: str | None


@dataclass(frozen=True)
class Trial:
    """The methods and what they run on; the configuration's sections hold for all of them."""

    loaded: LoadedModel
    config: HardKVConfig
    registry: Registry

    def runtime(self, method: Method | None) -> HardKVRuntime:
        """A runtime of `method`, or for None with every token kept; greedy."""
        plain = {"temperature": 0.0, "repetition_penalty": 1.0, "stop": (), "logprobs": None}
        settings = self.config.model_dump()
        settings["generation"] = {**settings["generation"], **plain}
        if method is not None:
            settings.update(method.components)
            settings["cache"] = {**settings["cache"], "condensed_slots": method.condensed_slots}
        config = HardKVConfig.model_validate({**settings, "compression": method is not None})
        return HardKVRuntime(config, resolve(config, self.registry), self.loaded)

    def run(
        self, name: str, method: Method | None, samples: Sequence[Sample], plan: Plan, done: Callable[[int], None]
    ) -> Iterator[list[Answer]]:
        """Answer all samples, a batch at a time; `done(n)` is told of each batch."""
        runtime = self.runtime(method)
        rest = iter(samples)
        while batch := list(islice(rest, plan.batch)):
            split = [_split(sample, plan.compress_before) for sample in batch]
            answers = runtime.generate(
                [sample.prompt_ids[:at] for sample, at in zip(batch, split, strict=True)],
                given=[sample.prompt_ids[at:] for sample, at in zip(batch, split, strict=True)],
                max_new_tokens=max(sample.max_new_tokens for sample in batch),
            )
            yield [_answer(name, *pair) for pair in zip(batch, answers, strict=True)]
            done(len(batch))
        runtime.reset()


def _split(sample: Sample, before: Before) -> int:
    """How many of a sample's tokens are read before the compression."""
    whole = len(sample.prompt_ids)
    return {"answer": whole, "last": whole - 1, "question": len(sample.context_ids)}[before]


def chosen_difficulty(name: str, loaded: LoadedModel) -> str:
    """What `auto` is for a model: `easy` below a billion parameters, else `normal`."""
    if name != "auto":
        return name
    parameters = sum(weight.numel() for weight in cast(Any, loaded.model).parameters())
    return "easy" if parameters < _SMALL_PARAMETERS else "normal"


def chosen_methods(
    registry: Registry, config: HardKVConfig, context_tokens: int, mean_budget: int | None, against: Sequence[str]
) -> list[Method]:
    """The configuration's method, then those of `against`, at the same mean budget for prompts of `context_tokens`.

    Without `mean_budget` the configuration's method runs as it is configured, and its budget's target holds for the
    others.

    Raises:
        InputError: an unknown name, or a budget that takes no target where one is needed.
    """
    specs = {slot: getattr(config, slot).model_dump() for slot in SLOTS.values()}
    own = Method("config", specs, config.cache.condensed_slots)
    target = mean_budget or registry.build(Budget, specs["budget"]).target_tokens(context_tokens)
    if mean_budget is None and not against:
        return [own]
    if target is None:
        raise InputError(f"--against: budget '{specs['budget']['name']}' has no target to share; give --mean-budget")
    every = all_methods(registry, config, target)
    if mean_budget is not None:
        own = next((one for one in every if one.name == "config"), every[0])
    others = [method for method in choose(every, against) if method.name != own.name] if against else []
    for method in [own, *others]:
        obstacle = method.obstacle or (f"budget.{method.solve} would have to be searched" if method.solve else None)
        if obstacle is not None:
            raise InputError(f"method '{method.name}' cannot be set to a mean budget of {target} tokens: {obstacle}")
    return [replace(own, name="config"), *others]


def check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a name that is not known.

    Raises:
        InputError: naming the option and what there is.
    """
    for name in names:
        if name not in known:
            raise InputError(f"{option} {name}: expected one of {', '.join(known)}")


def cells(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Accuracy with its count and standard error for each method, task, context and depth, in the order they came."""
    groups: dict[tuple[str, str, int, float], list[float]] = {}
    for one in answers:
        groups.setdefault((one.method, one.task, one.context_tokens, one.depth), []).append(one.correct)
    names = ("method", "task", "context_tokens", "depth")
    return [{**dict(zip(names, key, strict=True)), **_accuracy(scores)} for key, scores in groups.items()]


def summary(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The same for each method over everything, with its share of the full cache's accuracy on the same samples."""
    methods = dict.fromkeys(one.method for one in answers)
    whole = {(one.prompt_hash, one.index): one.correct for one in answers if one.method == FULL}
    rows = []
    for method in methods:
        mine = [one for one in answers if one.method == method]
        full = sum(whole[one.prompt_hash, one.index] for one in mine) / len(mine)
        row = {"method": method, **_accuracy([one.correct for one in mine]), "full_cache_accuracy": full}
        tokens = sum(one.mean_tokens for one in mine) / len(mine)
        rows.append({**row, "share_of_full_cache": row["accuracy"] / full if full else None, "mean_tokens": tokens})
    return rows


def tasks_of(names: Sequence[str] | None) -> tuple[str, ...]:
    """The tasks that are named, all of them for none."""
    check_names("--tasks", names or (), list(TASKS))
    return tuple(dict.fromkeys(names or TASKS))


def _accuracy(scores: Sequence[float]) -> dict[str, Any]:
    mean = sum(scores) / len(scores)
    return {"accuracy": mean, "samples": len(scores), "standard_error": standard_error(scores)}


def _answer(name: str, sample: Sample, found: Generation) -> Answer:
    after = found.stats.mean_tokens_after_compression
    return Answer(
        method=name,
        task=sample.task,
        context_tokens=sample.context_tokens,
        depth=sample.depth,
        index=sample.index,
        prompt_hash=sample.prompt_hash,
        prompt_tokens=len(sample.prompt_ids),
        expected=sample.expected,
        answer=found.text,
        correct=score(found.text, sample.expected) if found.error is None else 0.0,
        answer_tokens=len(found.token_ids),
        mean_tokens=after[0] if after else float(found.stats.prompt_tokens),
        error=found.error,
    )
