"""One value of `--rounds`: the full cache once, then rows of methods at mean budgets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hardkv.config import HardKVConfig
from hardkv.errors import InputError
from hardkv.evaluation.bench import Bench, Reference, measure, measure_reference, why
from hardkv.evaluation.faithful.free import compare_free, run_free
from hardkv.evaluation.faithful.held import Held, HeldRecorder
from hardkv.evaluation.faithful.layers import ERROR, MASS, judge_layers
from hardkv.evaluation.methods import Method
from hardkv.evaluation.workload import Workload
from hardkv.model_adapter import LoadedModel, read_geometry
from hardkv.registry import Registry

FULL = "full cache"
Row = dict[str, Any]
"""A row as it stands in the result; `RowKey` names it."""
RowKey = tuple[int, int | None, str]
LAYER_KEYS = ("attention_mass_kept", "attention_output_error")


@dataclass(frozen=True)
class Task:
    """One row that is to be measured."""

    rounds: int
    mean_tokens: int
    method: Method

    @property
    def key(self) -> RowKey:
        return (self.rounds, self.mean_tokens, self.method.name)


def key_of(row: Row) -> RowKey:
    """Rounds, mean budget (None for the full cache) and method."""
    return (row["rounds"], row["mean_budget"], row["method"])


class Panel:
    """Measures the rows of one number of rounds: `begin`, then `measure`; `judge` needs neither.

    `free_tokens`: tokens to generate freely, 0 for none. `layers`: whether `measure` records what `judge` needs.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: HardKVConfig,
        registry: Registry,
        workload: Workload,
        free_tokens: int,
        layers: bool,
    ) -> None:
        self.bench = Bench(loaded, config, registry, workload, workload.schedule.prompt_tokens)
        self.geometry = read_geometry(loaded.model)
        self.free_tokens, self.layers = free_tokens, layers
        self.reference: Reference | None = None
        self.free: list[list[int]] = []

    @property
    def rounds(self) -> int:
        return self.bench.workload.schedule.rounds

    def begin(self) -> Row:
        """Run the full cache, which rows are compared with; gives its row."""
        start = time.perf_counter()
        self.reference = measure_reference(self.bench)
        if self.free_tokens:
            runtime = self.bench.runtime({}, compression=False)
            self.free = run_free(runtime, self.bench.workload.prompts, self.free_tokens)
            runtime.reset()
        return {
            **self._frame(FULL, None, None),
            "perplexity": self.reference.perplexity,
            "kv_bytes": self.reference.kv_bytes,
            "seconds": time.perf_counter() - start,
            "note": None,
        }

    def measure(self, task: Task) -> tuple[Row, list[list[Held]]]:
        """Run one method; gives its row and what its cache held, text by text. What it raises becomes a note."""
        assert self.reference is not None
        start = time.perf_counter()
        method, workload = task.method, self.bench.workload
        bench, recorder = replace(self.bench, mean_tokens=task.mean_tokens), HeldRecorder(len(workload.names))
        found = measure(bench, self.reference, method, recorder if self.layers else None)
        row = {**self._frame(method.name, task.mean_tokens, method), **asdict(found)}
        row |= {"perplexity_full": self.reference.perplexity, **dict.fromkeys(LAYER_KEYS)}
        if found.kl is not None and self.free_tokens:
            try:
                runtime = bench.runtime(found.components, method.condensed_slots, changes=method.cache)
                own = run_free(runtime, workload.prompts, self.free_tokens)
                runtime.reset()
                row |= compare_free(workload.names, self.free, own)
            # One method of a stranger must not cost the others' results.
            except Exception as error:
                row["note"] = f"free running {why(error)}"
        row["seconds"] = time.perf_counter() - start
        return row, recorder.held

    def judge(self, runs: Sequence[list[list[Held]]]) -> list[Row]:
        """What the layers of several runs lost, by one forward pass of each text; of each run the keys to add."""
        workload = self.bench.workload
        total = torch.zeros(len(runs), 2, len(self.geometry.full_layers), dtype=torch.float64)
        for text, (prompt, fed) in enumerate(zip(workload.prompts, workload.fed, strict=True)):
            held = [run[text] for run in runs]
            total += judge_layers(self.bench.loaded, self.geometry, [*prompt, *fed[:-1]], len(prompt), held)
        mean = total / len(workload.names)
        return [dict(zip(LAYER_KEYS, (run[MASS].tolist(), run[ERROR].tolist()), strict=True)) for run in mean]

    def _frame(self, name: str, mean_tokens: int | None, method: Method | None) -> Row:
        times = self.bench.workload.schedule
        changes = {} if method is None else method.cache
        return {
            "method": name,
            "rounds": times.rounds,
            "mean_budget": mean_tokens,
            "prompt_tokens": times.prompt_tokens,
            "fed_tokens": times.fed_tokens,
            "interval": self.bench.interval(changes),
            "cache": changes,
        }


def check_room(workload: Workload, free_tokens: int, positions: int) -> None:
    """Refuse what would run past the model's last position.

    Raises:
        InputError: says which option to lower.
    """
    times = workload.schedule
    for option, tokens in (("--fed-tokens", times.fed_tokens), ("--free-tokens", free_tokens)):
        if times.prompt_tokens + tokens > positions:
            raise InputError(
                f"{option} {tokens}: with prompts of {times.prompt_tokens} tokens this is beyond the model's"
                f" {positions} positions; lower it, or --prompt-tokens"
            )
