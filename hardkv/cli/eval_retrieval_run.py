"""What `hardkv eval retrieval` does at length: run with progress, report, show, write."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hardkv.cli.session import Session, check_targets, messages
from hardkv.errors import InputError

if TYPE_CHECKING:
    from hardkv.evaluation import Method
    from hardkv.evaluation.retrieval import Answer, Plan, Trial


def check_files(save: Path | None, plot: Path | None) -> None:
    """Refuse files that could not be written, before any work."""
    check_targets({"--output": save, "--plot": plot})
    if plot is not None:
        from hardkv.evaluation.plotting import check_plot

        check_plot(plot)


def answer_all(
    trial: Trial, plan: Plan, chat: bool | None, mean_budget: int | None, against: Sequence[str], session: Session
) -> tuple[list[Answer], dict[int, list[Method]], bool]:
    """Make every check, then all answers; gives them, the methods by context, and whether nobody broke it off."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from hardkv.evaluation.retrieval import FULL, chosen_methods, read_frame

    config = trial.config
    methods = {n: chosen_methods(trial.registry, config, n, mean_budget, against) for n in plan.contexts}
    for several in methods.values():
        for each in several:
            trial.runtime(each)
    samples = plan.build(read_frame(trial.loaded.tokenizer, chat))
    session.generating = True
    console = messages()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    answers: list[Answer] = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        total = sum(len(samples[tokens]) * (1 + len(methods[tokens])) for tokens in plan.contexts)
        task = bar.add_task("", total=total)
        try:
            for tokens in plan.contexts:
                runs: list[tuple[str, Method | None]] = [(one.name, one) for one in methods[tokens]]
                for name, method in [(FULL, None), *runs]:
                    bar.update(task, description=f"{name}, {tokens:,} tokens")
                    start = len(answers)
                    for some in trial.run(name, method, samples[tokens], plan, lambda count: bar.advance(task, count)):
                        answers += some
                    row = _latest(answers, start)
                    line = f"{name}, {tokens:,} tokens: {_share(row['accuracy'])}, {row['mean_tokens']:.1f} per head"
                    console.print(Text(line), soft_wrap=True)
        except KeyboardInterrupt:
            return answers, methods, False
    return answers, methods, True


def _latest(answers: Sequence[Answer], start: int) -> dict[str, Any]:
    """The summary of those from `start` on."""
    from hardkv.evaluation.retrieval import FULL, summary

    latest = list(answers[start:])
    full = [] if latest[0].method == FULL else [one for one in answers[:start] if one.method == FULL]
    return summary([*full, *latest])[-1]


def report(
    command: str,
    trial: Trial,
    plan: Plan,
    methods: dict[int, list[Method]],
    answers: Sequence[Answer],
    complete: bool,
) -> dict[str, Any]:
    """The result for JSON; `complete`: whether every sample had its turn."""
    from hardkv.evaluation import provenance
    from hardkv.evaluation.retrieval import DIFFICULTIES, cells, summary

    config = trial.config
    return {
        "kind": "retrieval",
        "command": command,
        "complete": complete,
        "model": config.model.id,
        "dtype": config.model.dtype,
        **provenance(trial.loaded.model.device),
        "plan": {**asdict(plan), "level": asdict(DIFFICULTIES[plan.difficulty])},
        "cache": config.cache.model_dump(),
        "methods": {
            str(tokens): {method.name: method.components for method in several} for tokens, several in methods.items()
        },
        "summary": summary(answers),
        "cells": cells(answers),
        "answers": [asdict(one) for one in answers],
    }


def heat_map(found: dict[str, Any]) -> Group:
    """One shaded table for each task, a column for each method and context, and a line for each method."""
    plan = found["plan"]
    accuracy = {
        (cell["task"], cell["method"], cell["context_tokens"], cell["depth"]): cell["accuracy"]
        for cell in found["cells"]
    }
    columns = [(row["method"], tokens) for row in found["summary"] for tokens in plan["contexts"]]
    before = {
        "answer": "",
        "last": ", compressed before the last token",
        "question": ", compressed before the question",
    }
    after = before[plan["compress_before"]]
    parts: list[Any] = [Text(f"{found['model']} in {found['dtype']}, {plan['difficulty']}{after}")]
    for task in plan["tasks"]:
        table = Table(title=task, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("depth", justify="right")
        for method, tokens in columns:
            table.add_column(f"{method}\n{tokens:,}", justify="center")
        for depth in plan["depths"]:
            found_here = [_shaded(accuracy.get((task, *column, depth))) for column in columns]
            table.add_row(f"{depth:g}", *found_here)
        parts.append(table)
    return Group(*parts, *(Text(_line(row)) for row in found["summary"]))


def write(found: dict[str, Any], save: Path | None, plot: Path | None) -> None:
    """Save the result as JSON, whole or not at all, and as a picture, where that was asked for."""
    try:
        if save is not None:
            part = save.with_name(f"{save.name}.part")
            part.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(part, save)
        if plot is not None:
            from hardkv.evaluation.retrieval.plotting import draw

            draw(found, plot)
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be written: {error.strerror}") from None


def _line(row: dict[str, Any]) -> str:
    text = f"{row['method']}: accuracy {_share(row['accuracy'])} ± {100 * row['standard_error']:.1f}"
    text += f" of {row['samples']} samples"
    if row["method"] == "full cache":
        return text
    share = row["share_of_full_cache"]
    part = "" if share is None else f", share {share:.2f}"
    return f"{text}; full cache {_share(row['full_cache_accuracy'])}{part}; {row['mean_tokens']:.1f} tokens per head"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _shaded(accuracy: float | None) -> Text:
    """The number on red for 0, over yellow, to green for 1; nothing for what was not run."""
    if accuracy is None:
        return Text("")
    red, green = round(200 * min(1.0, 2 - 2 * accuracy)), round(170 * min(1.0, 2 * accuracy))
    return Text(f" {accuracy:.2f} ", style=f"black on rgb({60 + red // 2 + red // 4},{60 + green},60)")
