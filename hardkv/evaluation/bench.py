"""Runs methods in the same runtime on the same texts, and measures each against that runtime with every token kept."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hardkv.config import HardKVConfig, resolve
from hardkv.errors import ConfigError, HardKVError, UnsupportedModelError
from hardkv.evaluation.fidelity import Differences, Predictions
from hardkv.evaluation.methods import Method
from hardkv.evaluation.solving import solve_share
from hardkv.evaluation.workload import Workload
from hardkv.interfaces import Budget
from hardkv.model_adapter import LoadedModel
from hardkv.registry import Registry
from hardkv.results import RuntimeStats
from hardkv.runtime import HardKVRuntime
from hardkv.scheduler import Observer

FAR_FROM_MEAN = 0.02
"""A measured mean that is off by more than this share of the target is marked."""


@dataclass(frozen=True)
class Bench:
    """What all runs share."""

    loaded: LoadedModel
    config: HardKVConfig
    """Its `cache` section and seed hold for every run, but for the interval and the condensed slots."""
    registry: Registry
    workload: Workload
    mean_tokens: int

    def runtime(
        self,
        components: Mapping[str, Any],
        condensed_slots: int = 0,
        compression: bool = True,
        changes: Mapping[str, Any] | None = None,
    ) -> HardKVRuntime:
        """A runtime with these components, and `changes` of the `cache` section.

        Raises:
            ConfigError: they do not fit together.
        """
        cache = {
            **self.config.cache.model_dump(),
            **(changes or {}),
            "interval": self.interval(changes),
            "condensed_slots": condensed_slots,
            "max_sequences": max(self.config.cache.max_sequences, len(self.workload.prompts)),
        }
        settings = {**self.config.model_dump(), **components, "cache": cache, "compression": compression}
        config = HardKVConfig.model_validate(settings)
        return HardKVRuntime(config, resolve(config, self.registry), self.loaded)

    def interval(self, changes: Mapping[str, Any] | None) -> int:
        """Fed tokens from one compression to the next; with a single one, all of them, whatever `changes` says."""
        times = self.workload.schedule
        return int((changes or {}).get("interval", times.interval)) if times.rounds > 1 else times.interval


@dataclass(frozen=True)
class Reference:
    """The runtime with every token kept."""

    logits: list[Tensor]
    """`[T, vocabulary]` per text, after each fed token, on the CPU in the model's precision."""
    perplexity: float
    kv_bytes: int
    seconds: float


@dataclass(frozen=True)
class Row:
    """What one method measured; numbers are None where it did not run or never compressed."""

    method: str
    components: dict[str, dict[str, Any]]
    """Name and options of each slot, as run."""
    kl: float | None = None
    """KL(every token kept || method), nats per token, mean over tokens and texts."""
    top1_agreement: float | None = None
    """How often the likeliest token is the same, a share of the fed tokens."""
    kl_standard_error: float | None = None
    """Of `kl`, over texts; None for a single one."""
    kl_by_text: dict[str, float] = field(default_factory=dict)
    kl_by_round: list[float] = field(default_factory=list)
    """Mean over texts of each block of fed tokens between two compressions of the schedule."""
    perplexity: float | None = None
    """Of the texts' own tokens under the method, mean over tokens and texts of the logarithm."""
    mean_tokens: float | None = None
    """Tokens per head after a compression, condensed slots included: mean over layers, heads, texts, compressions."""
    kv_bytes: int | None = None
    """Physical bytes in use in the last decode step, all texts together."""
    kv_bytes_share: float | None = None
    """The same as a share of what every token kept takes."""
    compressions: int | None = None
    compression_ms: float | None = None
    """Wall time of one compression pass of one text, mean: scoring, selecting and moving, after the prompt and while
    decoding. What an online scorer adds to each decode step is not in it."""
    seconds: float | None = None
    """Wall time of the whole row, searches for the budget included."""
    solved: dict[str, float] = field(default_factory=dict)
    """Options found so that the mean is met."""
    note: str | None = None
    """Why it did not run, with what it failed, or how far its mean is off."""


def measure_reference(bench: Bench) -> Reference:
    """Run the texts with every token kept."""
    start = time.perf_counter()
    runtime = bench.runtime({}, compression=False)
    predictions = Predictions(bench.workload.fed, runtime.geometry.dtype)
    runtime.force(bench.workload.prompts, bench.workload.fed, predictions.take)
    kv_bytes = runtime.stats().kv_bytes
    runtime.reset()
    return Reference(predictions.logits, predictions.perplexity, kv_bytes, time.perf_counter() - start)


def measure(bench: Bench, reference: Reference, method: Method, observer: Observer | None = None) -> Row:
    """Run one method; whatever it raises becomes the note of its row."""
    if method.obstacle is not None:
        return Row(method.name, method.components, note=f"not run: {method.obstacle}")
    start = time.perf_counter()
    try:
        solved = {} if method.solve is None else {method.solve: _solve(bench, method, method.solve)}
        components = _with_options(method, solved)
        runtime = bench.runtime(components, method.condensed_slots, changes=method.cache)
        differences = Differences(reference.logits, bench.workload.fed)
        runtime.force(bench.workload.prompts, bench.workload.fed, differences.take, observer)
    # One method of a stranger must not cost the others' results.
    except Exception as error:
        return Row(method.name, method.components, note=why(error))
    stats = runtime.stats()
    runtime.reset()
    passes = stats.seconds["prefill_compression"] + stats.seconds["compression"]
    mean = _mean(stats, method)
    return Row(
        method=method.name,
        components=components,
        **differences.summary(bench.workload.names, bench.workload.schedule.interval),
        mean_tokens=mean,
        kv_bytes=stats.kv_bytes,
        kv_bytes_share=stats.kv_bytes / reference.kv_bytes,
        compressions=stats.compressions,
        compression_ms=1e3 * passes / stats.compressions if stats.compressions else None,
        seconds=time.perf_counter() - start,
        solved={f"budget.{option}": value for option, value in solved.items()},
        note=_off(mean, bench.mean_tokens),
    )


def _solve(bench: Bench, method: Method, option: str) -> float:
    """The value of the budget's option that meets the mean after the prompt."""
    first = [fed[:1] for fed in bench.workload.fed]

    def mean_at(share: float) -> float:
        runtime = bench.runtime(_with_options(method, {option: share}), method.condensed_slots, changes=method.cache)
        runtime.teacher_force(bench.workload.prompts, first)
        mean = _mean(runtime.stats(), method)
        runtime.reset()
        return float(bench.workload.schedule.prompt_tokens) if mean is None else mean

    budget = method.components["budget"]
    default = bench.registry.get(Budget, budget["name"]).Config.model_fields[option].default
    start = budget.get(option, default if isinstance(default, float) else 0.5)
    return solve_share(mean_at, start, bench.mean_tokens).share


def _with_options(method: Method, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {**method.components, "budget": {**method.components["budget"], **options}}


def why(error: Exception) -> str:
    """The note of a row that an error ended: `not run` where the method does not fit, else `failed`."""
    text = str(error).replace("\n", "; ")
    if isinstance(error, ConfigError | UnsupportedModelError):
        return f"not run: {text}"
    return f"failed: {text}" if isinstance(error, HardKVError) else f"failed: {type(error).__name__}: {text}"


def _mean(stats: RuntimeStats, method: Method) -> float | None:
    mean = stats.mean_tokens_after_compression
    return None if mean is None else mean + method.condensed_slots


def _off(mean: float | None, target: int) -> str | None:
    if mean is None:
        return "never compressed"
    share = mean / target - 1
    return f"mean off by {share:+.1%}" if abs(share) > FAR_FROM_MEAN else None
