"""`hardkv generate`: one prompt, live text, statistics."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hardkv.cli.configuring import Assignment, parse_assignments, read_configuration
from hardkv.cli.prompting import read_prompt
from hardkv.cli.session import (
    Assignments,
    ConfigFile,
    Debug,
    Json,
    ModelName,
    Session,
    facts,
    messages,
    print_json,
    readable_bytes,
)

if TYPE_CHECKING:
    from hardkv.results import RuntimeStats
    from hardkv.runtime import HardKVRuntime
    from hardkv.scheduler import Progress

_SHORTCUTS = ("model.id", "budget.mean_tokens", "generation.max_new_tokens", "generation.temperature", "seed")


def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", show_default=False, help="The prompt; '-' or nothing reads it from stdin."),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompt-file",
            "-f",
            metavar="FILE",
            show_default=False,
            help="Read the prompt from a UTF-8 text file. Repeatable: the files are joined to one document.",
        ),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option(
            "--question", "-q", metavar="TEXT", show_default=False, help="A question about the prompt's text."
        ),
    ] = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    model: ModelName = None,
    mean_tokens: Annotated[
        int | None,
        typer.Option(show_default=False, help="Mean tokens to keep per head; the same as --set budget.mean_tokens=N."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            show_default=False, help="Most tokens to generate; the same as --set generation.max_new_tokens=N."
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            show_default=False,
            help="Sampling temperature, 0 takes the likeliest token; the same as --set generation.temperature=T.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(show_default=False, help="Seed of sampling; the same as --set seed=N.")
    ] = None,
    no_compression: Annotated[
        bool, typer.Option("--no-compression", help="Keep every token; the same as --set compression=false.")
    ] = False,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            show_default=False,
            help="Send the prompt as a chat message, or as it is. Default: as a chat if the model has a template.",
        ),
    ] = None,
    as_json: Json = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show tokens, seconds and bytes in a table on stderr afterwards.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Generate text for one prompt; it appears as it comes."""
    text = read_prompt(prompt, prompt_file, question)
    given = zip(_SHORTCUTS, (model, mean_tokens, max_new_tokens, temperature, seed), strict=True)
    changes: list[Assignment] = [*parse_assignments(assignments), *(pair for pair in given if pair[1] is not None)]
    if no_compression:
        changes.append(("compression", False))
    runtime = _build(config, changes)
    templated = bool(getattr(runtime.tokenizer, "chat_template", None)) if chat is None else chat
    message: Any = [{"role": "user", "content": text}] if templated else text
    session = context.find_object(Session)
    assert session is not None
    finish_reason = (_whole if as_json else _live)(runtime, message, session)
    if stats:
        messages().print(_stats_table(runtime.stats(), finish_reason))


def _build(config: Path | None, changes: list[Assignment]) -> HardKVRuntime:
    ready = read_configuration(config, changes)

    from hardkv.model_adapter import load_model
    from hardkv.runtime import HardKVRuntime

    model = ready.config.model
    with messages().status(f"Loading {model.id}"):
        loaded = load_model(model.id, model.dtype, model.device, model.revision, model.pack_weights)
        return HardKVRuntime(ready.config, ready.components, loaded)


def _live(runtime: HardKVRuntime, message: Any, session: Session) -> str:
    """Write the text as it comes; gives why it ended."""
    reason = ""
    with _prefill_bar() as (progress, finish):
        pieces = runtime.stream(message, progress=progress)
        session.generating = True
        for piece in pieces:
            finish()
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            reason = piece.finish_reason or reason
    sys.stdout.write("\n")
    return reason


def _whole(runtime: HardKVRuntime, message: Any, session: Session) -> str:
    """Write the result as JSON; gives why it ended."""

    def note(done: int, total: int) -> None:
        # Prefill has begun, so the checks are over.
        session.generating = True
        progress(done, total)

    with _prefill_bar() as (progress, _):
        generation = runtime.generate(message, progress=note)
    print_json({**asdict(generation), "runtime": runtime.stats().to_dict()})
    return str(generation.finish_reason)


@contextmanager
def _prefill_bar() -> Iterator[tuple[Progress, Any]]:
    """Give a progress callback that draws a bar on stderr, and what makes it vanish."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("Reading the prompt"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = messages()
    bar = Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task("prefill", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield progress, bar.stop


def _stats_table(stats: RuntimeStats, finish_reason: str) -> Any:
    seconds = stats.seconds
    rate = len(stats.step_seconds) / seconds["decode"] if seconds["decode"] else 0.0
    mean = stats.mean_tokens_after_compression
    return facts(
        "Statistics",
        {
            "prompt tokens": stats.tokens_seen - max(0, stats.generated_tokens - 1),
            "generated tokens": f"{stats.generated_tokens} (ended by: {finish_reason})",
            "prefill": f"{seconds['prefill']:.2f} s, {seconds['prefill_compression']:.2f} s to select",
            "decode": f"{seconds['decode']:.2f} s, {rate:.1f} steps/s",
            "compression": f"{seconds['compression']:.2f} s, {stats.compressions} passes",
            "tokens kept": "all" if mean is None else f"{mean:.1f} per head, mean after compression",
            "KV cache": f"{readable_bytes(stats.kv_bytes)} at the end, {readable_bytes(stats.kv_bytes_peak)} at most",
            "KV cache reserved": readable_bytes(stats.kv_bytes_reserved),
        },
    )
