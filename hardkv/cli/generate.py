"""`hardkv generate`: one prompt, live text, statistics."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    facts,
    messages,
    print_json,
    readable_bytes,
)

if TYPE_CHECKING:
    from hardkv.results import RuntimeStats
    from hardkv.runtime import HardKVRuntime

_SHORTCUTS = ("model.id", "budget.mean_tokens", "generation.max_new_tokens", "generation.temperature", "seed")


def generate(
    context: typer.Context,
    prompt: PromptText = None,
    prompt_file: PromptFiles = None,
    question: Question = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    model: ModelName = None,
    mean_tokens: MeanTokens = None,
    max_new_tokens: MaxNewTokens = None,
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
    chat: Chat = None,
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
    runtime = build_runtime(config, changes)
    templated = bool(getattr(runtime.tokenizer, "chat_template", None)) if chat is None else chat
    message: Any = [{"role": "user", "content": text}] if templated else text
    session = context.find_object(Session)
    assert session is not None
    finish_reason = (_whole if as_json else _live)(runtime, message, session)
    if stats:
        messages().print(_stats_table(runtime.stats(), finish_reason))


def _live(runtime: HardKVRuntime, message: Any, session: Session) -> str:
    """Write the text as it comes; gives why it ended."""
    reason = ""
    with prefill_bar() as (progress, finish):
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

    with prefill_bar() as (progress, _):
        generation = runtime.generate(message, progress=note)
    print_json({**asdict(generation), "runtime": runtime.stats().to_dict()})
    return str(generation.finish_reason)


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
