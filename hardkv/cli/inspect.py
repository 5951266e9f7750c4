"""`hardkv inspect`: look inside one generation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hardkv.cli.command_lines import written
from hardkv.cli.configuring import Assignment, parse_assignments
from hardkv.cli.prompting import PromptFiles, PromptText, Question, read_prompt
from hardkv.cli.running import build_runtime, prefill_bar
from hardkv.cli.session import (
    Assignments,
    Chat,
    ConfigFile,
    Debug,
    Json,
    MaxNewTokens,
    MeanTokens,
    ModelName,
    Session,
    check_targets,
    facts,
    output,
    print_json,
)
from hardkv.errors import InputError

if TYPE_CHECKING:
    from hardkv.evaluation.inspection import Trace
    from hardkv.runtime import HardKVRuntime

_SHORTCUTS = ("model.id", "budget.mean_tokens", "generation.max_new_tokens")


def inspect(
    context: typer.Context,
    prompt: PromptText = None,
    prompt_file: PromptFiles = None,
    question: Question = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    model: ModelName = None,
    mean_tokens: MeanTokens = None,
    max_new_tokens: MaxNewTokens = None,
    chat: Chat = None,
    layer: Annotated[
        int | None,
        typer.Option(min=0, show_default=False, help="With --head: the model layer whose positions are shown."),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help="With --layer: the KV head whose positions are shown. Default: the greediest and the leanest.",
        ),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Record every so many decode steps; passes always are.")] = 1,
    as_json: Json = False,
    save: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", show_default=False, help="Save what was recorded as JSON."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Draw it: .png, .svg or .pdf. Needs hardkv[plot]."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Write a page to click through: heads, passes, and the text with what is kept of it. The prompt is"
            " in it.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Generate for one prompt and show what each head keeps, pass by pass, and how full the tiers are."""
    text = read_prompt(prompt, prompt_file, question)
    if (layer is None) != (head is None):
        raise InputError("--layer and --head go together; leave both out for the greediest and the leanest head")
    _check_files(save, plot, html)
    given = zip(_SHORTCUTS, (model, mean_tokens, max_new_tokens), strict=True)
    changes: list[Assignment] = [*parse_assignments(assignments), *(pair for pair in given if pair[1] is not None)]
    runtime = build_runtime(config, changes)
    heads = [] if layer is None or head is None else [(layer, head)]
    _check_heads(runtime, heads)
    session = context.find_object(Session)
    assert session is not None
    trace = _record(runtime, text, chat, every, session)
    found = _found(written(context), runtime, trace)
    if as_json:
        print_json(found)
    else:
        _show(trace, heads)
    _write_files(trace, found, heads, save, plot, html)


def _check_files(save: Path | None, plot: Path | None, html: Path | None) -> None:
    """Refuse files that cannot be written, before any work."""
    check_targets({"--output": save, "--plot": plot, "--html": html})
    if plot is not None:
        from hardkv.evaluation.plotting import check_plot

        check_plot(plot)


def _check_heads(runtime: HardKVRuntime, heads: Sequence[tuple[int, int]]) -> None:
    from hardkv.evaluation.inspection.trace import place_of

    for layer, head in heads:
        place_of(runtime.geometry.windows, runtime.geometry.heads, layer, head)


def _record(runtime: HardKVRuntime, text: str, chat: bool | None, every: int, session: Session) -> Trace:
    from hardkv.evaluation.inspection import record

    templated = bool(getattr(runtime.tokenizer, "chat_template", None)) if chat is None else chat
    message: Any = [{"role": "user", "content": text}] if templated else text

    with prefill_bar() as (progress, finish):

        def note(done: int, total: int) -> None:
            # Prefill has begun, so the checks are over.
            session.generating = True
            progress(done, total)
            if done == total:
                finish()

        return record(runtime, message, every_steps=every, progress=note)


def _found(command: str, runtime: HardKVRuntime, trace: Trace) -> dict[str, Any]:
    from hardkv.evaluation import provenance

    return {
        "command": command,
        **provenance(runtime.geometry.device),
        "settings": runtime.config.model_dump(mode="json"),
        "trace": trace.to_dict(),
    }


def _show(trace: Trace, heads: Sequence[tuple[int, int]]) -> None:
    from hardkv.evaluation.inspection import terminal

    console = output()
    width = min(console.width, 120)
    console.print(facts("Summary", terminal.summary(trace)))
    console.print(terminal.heat_map(trace, width))
    console.print(terminal.occupancy(trace, width))
    ranked = trace.ranked_heads
    extremes = dict.fromkeys((ranked[-1][1:], ranked[0][1:]))
    for layer, head in heads or extremes:
        console.print(terminal.strip_chart(trace, layer, head, width))
        console.print()


def _write_files(
    trace: Trace,
    found: dict[str, Any],
    heads: Sequence[tuple[int, int]],
    save: Path | None,
    plot: Path | None,
    html: Path | None,
) -> None:
    from hardkv.evaluation.inspection import plots
    from hardkv.evaluation.inspection.page import page

    try:
        if save is not None:
            save.write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")
        if html is not None:
            html.write_text(page(found), encoding="utf-8")
        if plot is not None:
            plots.draw(trace, plot, heads)
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be written: {error.strerror}") from None
