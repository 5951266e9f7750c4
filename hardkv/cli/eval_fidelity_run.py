"""What `hardkv eval fidelity` does at length: measure with progress, and keep the file up to date."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.text import Text

from hardkv.cli.eval_fidelity_ready import Ready
from hardkv.cli.eval_fidelity_table import progress_line
from hardkv.cli.session import messages

if TYPE_CHECKING:
    from rich.progress import Progress

    from hardkv.evaluation import Workload
    from hardkv.evaluation.faithful import Panel, Task

_ROWS_PER_PASS = 8
"""Rows whose layers are judged by one forward pass over the full run."""


def measure_all(ready: Ready) -> bool:
    """Measure every row that is missing; gives whether nobody broke it off."""
    missing, pending = ready.missing, ready.pending
    if len(missing) < len(ready.tasks):
        messages().print(f"{len(ready.tasks) - len(missing)} of {len(ready.tasks)} rows are there")
    try:
        with _bar(len(missing)) as bar:
            for rounds, workload in ready.workloads.items():
                mine = [task for task in missing if task.rounds == rounds]
                if mine or pending.of(rounds):
                    _measure_panel(ready, workload, mine, bar)
    except KeyboardInterrupt:
        return False
    return True


def _measure_panel(ready: Ready, workload: Workload, tasks: list[Task], bar: Progress) -> None:
    from hardkv.evaluation.faithful import Panel

    results, console, line = ready.results, messages(), bar.task_ids[0]
    rounds = _named(workload.schedule.rounds)
    panel = Panel(ready.loaded, ready.config, ready.registry, workload, ready.free_tokens, ready.layers)
    _judge(ready, panel, bar)
    if tasks:
        bar.update(line, description=f"{rounds}, every token kept")
        full = panel.begin()
        results.put(full)
        console.print(Text(f"{rounds}, {progress_line(full)}"), soft_wrap=True)
    for number, task in enumerate(tasks, start=1):
        place = f"{rounds}, {task.mean_tokens:,} tokens"
        bar.update(line, description=f"{place}, {task.method.name}")
        row, held = panel.measure(task)
        if ready.layers and row["kl"] is not None:
            ready.pending.add(task.key, held)
        results.put(row)
        console.print(Text(f"{place}, {number}/{len(tasks)} {progress_line(row)}"), soft_wrap=True)
        if len(ready.pending.of(panel.rounds)) == _ROWS_PER_PASS or task is tasks[-1]:
            _judge(ready, panel, bar)
        bar.advance(line)


def _judge(ready: Ready, panel: Panel, bar: Progress) -> None:
    """Add to every pending row of the panel what its layers lost."""
    runs, results = ready.pending.of(panel.rounds), ready.results
    if runs:
        bar.update(bar.task_ids[0], description=f"layers of {len(runs)} rows")
        for key, found in zip(runs, panel.judge(list(runs.values())), strict=True):
            results.rows[key] |= found
        results.write(complete=False)
        ready.pending.forget(runs)


@contextmanager
def _bar(rows: int) -> Iterator[Progress]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = messages()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task("", total=rows)
        yield bar


def _named(rounds: int) -> str:
    return "1 round" if rounds == 1 else f"{rounds} rounds"
