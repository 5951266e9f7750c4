"""`hardkv compare`: every method in one table, at one mean budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hardkv.cli.command_lines import written
from hardkv.cli.comparing import check_budget, in_float32, load, measure_all, write_files
from hardkv.cli.configuring import Assignment, parse_assignments, read_configuration
from hardkv.cli.session import (
    Assignments,
    ConfigFile,
    Debug,
    Json,
    ModelName,
    PreciseDtype,
    SavedJson,
    Session,
    TextNames,
    check_targets,
    output,
    print_json,
)
from hardkv.cli.tabulating import comparison_table

if TYPE_CHECKING:
    from hardkv.config import HardKVConfig
    from hardkv.registry import Registry


def compare(
    context: typer.Context,
    config: ConfigFile = None,
    assignments: Assignments = None,
    model: ModelName = None,
    dtype: PreciseDtype = None,
    mean_budget: Annotated[
        int, typer.Option(min=1, help="Mean tokens per head that every method keeps after a compression.")
    ] = 192,
    texts: TextNames = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Prompt tokens of a text. Default: 2048; with --rounds 1024."),
    ] = None,
    fed_tokens: Annotated[
        int | None,
        typer.Option(min=2, max=65_535, show_default=False, help="Tokens fed after the prompt. Default: 256."),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Compressions of a text; from 2 on, each has --interval fed tokens after it."),
    ] = 1,
    interval: Annotated[
        int, typer.Option(min=1, max=65_536, help="Fed tokens from one compression to the next, with --rounds.")
    ] = 128,
    budgets: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME...", show_default=False, help="Budgets that each scorer is run under. Default: top_k."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME...",
            show_default=False,
            help="Only these methods, or methods with these components.",
        ),
    ] = None,
    as_json: Json = False,
    save: SavedJson = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="Draw the result: .png, .svg or .pdf. Needs hardkv[plot]."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Compare every method at equal mean budget: fidelity, bytes, time. Interrupted, it shows what it has."""
    from hardkv.evaluation import Bench, all_methods, choose, chosen_texts, read_workload, schedule
    from hardkv.evaluation.report import ranked, report

    times = schedule(prompt_tokens, fed_tokens, rounds, interval)
    paths = chosen_texts(texts)
    _check_files(save, plot)
    changes = [*parse_assignments(assignments), *([("model.id", model)] if model is not None else [])]
    settings, registry = _configured(config, changes, dtype)
    check_budget("--mean-budget", mean_budget, times.prompt_tokens, settings.cache)
    methods = all_methods(registry, settings, mean_budget, budgets or ["top_k"])
    if only:
        methods = choose(methods, only)
    loaded = load(settings.model)
    workload = read_workload(loaded.tokenizer, paths, times)
    session = context.find_object(Session)
    assert session is not None
    session.generating = True
    bench = Bench(loaded, settings, registry, workload, mean_budget)
    reference, rows, complete = measure_all(bench, methods)
    command = written(context)
    found = report(command, bench, reference, rows, complete)
    if as_json:
        print_json(found)
    else:
        output().print(comparison_table(ranked(rows), found))
    write_files(found, save, plot)
    if not complete:
        raise KeyboardInterrupt


def _check_files(save: Path | None, plot: Path | None) -> None:
    """Refuse files that cannot be written, before any work."""
    check_targets({"--output": save, "--plot": plot})
    if plot is not None:
        from hardkv.evaluation.plotting import check_plot

        check_plot(plot)


def _configured(file: Path | None, changes: list[Assignment], dtype: str | None) -> tuple[HardKVConfig, Registry]:
    if dtype is not None:
        changes = [*changes, ("model.dtype", dtype)]
    ready = read_configuration(file, changes)
    return in_float32(ready.config), ready.registry
