"""What `hardkv eval fidelity` checks before any work: files, settings, methods, texts, and what there is to resume."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardkv.cli.comparing import check_budget, in_float32, load
from hardkv.cli.configuring import Assignment, read_configuration
from hardkv.cli.session import check_targets
from hardkv.errors import InputError

if TYPE_CHECKING:
    from hardkv.config import HardKVConfig
    from hardkv.evaluation import Schedule, Workload
    from hardkv.evaluation.faithful import Pending, Results, Task
    from hardkv.model_adapter import LoadedModel
    from hardkv.registry import Registry


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    config: Path | None
    changes: list[Assignment]
    mean_budgets: list[int]
    rounds: list[int]
    sizes: tuple[int | None, int | None, int]
    """Prompt tokens, fed tokens, interval."""
    only: Sequence[str] | None
    variants: Path | None
    texts: Sequence[str] | None
    free_tokens: int
    layers: bool


@dataclass(frozen=True)
class Ready:
    """A request after all checks."""

    loaded: LoadedModel
    config: HardKVConfig
    registry: Registry
    workloads: dict[int, Workload]
    """By rounds."""
    tasks: list[Task]
    missing: list[Task]
    """Those of them that are to be run."""
    free_tokens: int
    layers: bool
    results: Results
    pending: Pending


def check_files(save: Path | None, resume: bool, plot: Path | None) -> None:
    """Refuse files that could not be written, before any work."""
    check_targets({"--output": save, "--plot": plot})
    if resume and save is None:
        raise InputError("--resume: there is nothing to go on with; name the file with --output")
    if plot is not None:
        from hardkv.evaluation.plotting import check_plot

        check_plot(plot)


def prepare(request: Request, command: str, save: Path | None, resume: bool) -> Ready:
    """Make every check, load the model, and take over what is there to be resumed."""
    from hardkv.evaluation import chosen_texts, provenance, read_workload
    from hardkv.evaluation.faithful import KIND, check_room
    from hardkv.model_adapter import read_geometry

    schedules, paths = _schedules(request), chosen_texts(request.texts)
    given = read_configuration(request.config, request.changes)
    config = in_float32(given.config)
    for mean_budget in request.mean_budgets:
        shortest = min(times.prompt_tokens for times in schedules.values())
        check_budget("--mean-budgets", mean_budget, shortest, config.cache)
    tasks = _tasks(request, config, given.registry)
    loaded = load(config.model)
    geometry = read_geometry(loaded.model)
    workloads = {rounds: read_workload(loaded.tokenizer, paths, times) for rounds, times in schedules.items()}
    for workload in workloads.values():
        check_room(workload, request.free_tokens, geometry.max_positions)
    head = {
        "kind": KIND,
        "command": command,
        "complete": False,
        "model": config.model.id,
        "dtype": config.model.dtype,
        **provenance(loaded.model.device),
        "settings": _settings(request, config, paths),
        "texts": [path.name for path in paths],
        "layers": list(geometry.full_layers),
    }
    results, pending = _taken_over(head, save, resume)
    return Ready(
        loaded=loaded,
        config=config,
        registry=given.registry,
        workloads=workloads,
        tasks=tasks,
        missing=[task for task in tasks if not results.has(task, pending.runs)],
        free_tokens=request.free_tokens,
        layers=request.layers,
        results=results,
        pending=pending,
    )


def _schedules(request: Request) -> dict[int, Schedule]:
    from hardkv.evaluation import schedule

    prompt_tokens, fed_tokens, interval = request.sizes
    if fed_tokens is not None and 1 not in request.rounds:
        raise InputError(f"--fed-tokens {fed_tokens}: is for one compression; with more rounds --interval says it")
    return {
        rounds: schedule(prompt_tokens, fed_tokens if rounds == 1 else None, rounds, interval)
        for rounds in request.rounds
    }


def _tasks(request: Request, config: HardKVConfig, registry: Registry) -> list[Task]:
    from hardkv.evaluation.faithful import read_variants, tasks_of

    variants = []
    if request.variants is not None:
        any_target = request.mean_budgets[0]
        variants = read_variants(request.variants, registry, request.config, request.changes, any_target)
    return tasks_of(registry, config, (request.rounds, request.mean_budgets), request.only, variants)


def _taken_over(head: dict[str, Any], save: Path | None, resume: bool) -> tuple[Results, Pending]:
    """What the file holds already, or nothing."""
    from hardkv.evaluation.faithful import Pending, Results

    results, pending = Results(head, save), Pending(save)
    if resume:
        results.resume()
        pending.resume()
    else:
        results.check_unbroken()
    # A kill may have come before the row was written.
    pending.forget([key for key in pending.runs if key not in results.rows])
    return results, pending


def _settings(request: Request, config: HardKVConfig, paths: Sequence[Path]) -> dict[str, Any]:
    """What decides about every row."""
    from hardkv import __version__

    prompt_tokens, fed_tokens, interval = request.sizes
    return {
        "hardkv": __version__,
        "model": config.model.model_dump(include={"id", "revision", "dtype", "device"}),
        "seed": config.seed,
        "plugins": list(config.plugins),
        "cache": config.cache.model_dump(exclude={"interval", "condensed_slots", "max_sequences", "pool_bytes"}),
        "texts": {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in paths},
        "prompt_tokens": prompt_tokens,
        "fed_tokens": fed_tokens,
        "interval": interval,
        "free_tokens": request.free_tokens,
        "layers": request.layers,
    }
