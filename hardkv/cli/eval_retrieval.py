"""`hardkv eval retrieval`: what is hidden in long prompts, found by a compressed cache and by the full one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hardkv.cli.command_lines import written
from hardkv.cli.comparing import load
from hardkv.cli.configuring import parse_assignments, read_configuration
from hardkv.cli.eval_retrieval_run import answer_all, check_files, heat_map, report, write
from hardkv.cli.session import Assignments, ConfigFile, Debug, Json, ModelName, SavedJson, Session, output, print_json
from hardkv.errors import HardKVError, InputError, did_you_mean

if TYPE_CHECKING:
    from hardkv.evaluation.retrieval import Before, Plan


def retrieval(
    context: typer.Context,
    config: ConfigFile = None,
    assignments: Assignments = None,
    model: ModelName = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME...",
            show_default=False,
            help="needle, multi_needle, key_value, variable_tracking. Default: all.",
        ),
    ] = None,
    contexts: Annotated[
        list[int] | None,
        typer.Option(metavar="TOKENS...", min=1, show_default=False, help="Tokens of a prompt. Default: 2048."),
    ] = None,
    depths: Annotated[
        list[float] | None,
        typer.Option(
            metavar="SHARE...",
            min=0.0,
            max=1.0,
            show_default=False,
            help="Where in the text it is hidden, 0 is its beginning. Default: 0 0.25 0.5 0.75 1.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Prompts of each task, context, depth.")] = 2,
    difficulty: Annotated[
        str, typer.Option(help="easy, normal, hard; auto is easy for models below a billion parameters, else normal.")
    ] = "auto",
    compress_before: Annotated[
        str,
        typer.Option(
            metavar="answer|last|question",
            help="Compress before the answer, as 'hardkv generate' does: its first token then comes from the prefill,"
            " which attends everything. 'last' reads the prompt's last token after that, 'question' the whole question,"
            " so that none of it helps.",
        ),
    ] = "answer",
    mean_budget: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="Mean tokens per head of every method. Default: the configuration's."
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME...", show_default=False, help="Methods to run beside it, as in 'hardkv compare'."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts that decode together; an interrupt loses them.")] = 8,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            show_default=False,
            help="Ask as a chat message, or as plain text. Default: as a chat if the model has a template.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(show_default=False, help="Seed; the same as --set seed=N.")] = None,
    as_json: Json = False,
    save: SavedJson = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Draw heat maps: .png, .svg, .pdf. Needs hardkv[plot]."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Ask for what is hidden in long prompts, with the compressed and the full cache. Interrupted, shows a part."""
    from hardkv.evaluation.retrieval import DIFFICULTIES, Plan, Trial, check_names, chosen_difficulty, tasks_of

    check_files(save, plot)
    check_names("--difficulty", [difficulty], ["auto", *DIFFICULTIES])
    named = tasks_of(tasks)
    given = [pair for pair in (("model.id", model), ("seed", seed)) if pair[1] is not None]
    ready = read_configuration(config, [*parse_assignments(assignments), *given])
    loaded = load(ready.config.model)
    plan = Plan(
        tasks=named,
        contexts=tuple(dict.fromkeys(contexts or [2048])),
        depths=tuple(dict.fromkeys(depths or [0.0, 0.25, 0.5, 0.75, 1.0])),
        samples=samples,
        difficulty=chosen_difficulty(difficulty, loaded),
        compress_before=_before(compress_before),
        batch=batch,
        seed=ready.config.seed,
    )
    trial = Trial(loaded, ready.config, ready.registry)
    _check_lengths(plan, trial.runtime(None).geometry.max_positions)
    session = context.find_object(Session)
    assert session is not None
    answers, methods, complete = answer_all(trial, plan, chat, mean_budget, against or [], session)
    command = written(context)
    found = report(command, trial, plan, methods, answers, complete)
    if as_json:
        print_json(found)
    else:
        output().print(heat_map(found))
    write(found, save, plot)
    if not complete:
        raise KeyboardInterrupt
    failed = [one.error for one in answers if one.error is not None]
    if failed:
        raise HardKVError(f"{len(failed)} answers failed and count as wrong: {failed[0]}")


def _check_lengths(plan: Plan, positions: int) -> None:
    longest = max(plan.contexts)
    if longest >= positions:
        raise InputError(f"--contexts {longest}: the model has {positions} positions, and answers need some")


def _before(name: str) -> Before:
    """Check `--compress-before`."""
    known: tuple[Before, ...] = ("answer", "last", "question")
    for one in known:
        if name == one:
            return one
    raise InputError(f"--compress-before {name}: expected one of {', '.join(known)}.{did_you_mean(name, known)}")
