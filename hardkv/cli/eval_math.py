"""`hardkv eval math`: sampled answers to mathematics problems, scored, beside the full cache's."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hardkv.cli.command_lines import written
from hardkv.cli.comparing import load, write_files
from hardkv.cli.configuring import Assignment, parse_assignments, read_configuration
from hardkv.cli.eval_math_run import Plan, answer_all, found_so_far, open_arms
from hardkv.cli.eval_math_table import math_table
from hardkv.cli.session import (
    Assignments,
    ConfigFile,
    Debug,
    Json,
    ModelName,
    SavedJson,
    Session,
    check_targets,
    messages,
    output,
    print_json,
)
from hardkv.errors import HardKVError, InputError, did_you_mean

if TYPE_CHECKING:
    from hardkv.config import LoadedConfig
    from hardkv.evaluation.maths import Preset, Problems, Scorer


def math(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="A .json, .jsonl or .parquet file, or an id of a data set, such as openai/gsm8k."
        ),
    ],
    split: Annotated[str, typer.Option(help="Split of a data set of the hub.")] = "test",
    subset: Annotated[
        str | None, typer.Option(show_default=False, help="Subset of a data set of the hub, such as main of gsm8k.")
    ] = None,
    question_field: Annotated[
        str | None, typer.Option(show_default=False, help="Field of the question, where it is not found by itself.")
    ] = None,
    answer_field: Annotated[
        str | None, typer.Option(show_default=False, help="Field of the reference answer, likewise.")
    ] = None,
    preset: Annotated[
        str, typer.Option(help="Sampling: paper, greedy or quick. What the configuration names takes its place.")
    ] = "paper",
    samples: Annotated[
        int | None, typer.Option("--samples", "-n", min=1, show_default=False, help="Answers to each problem.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Only so many problems, from the first on.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Most tokens of an answer; cut off before its box, it is wrong."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Answers at the same time; the same as cache.max_sequences."),
    ] = None,
    no_full: Annotated[bool, typer.Option("--no-full", help="Leave out the full cache and the difference.")] = False,
    journal: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Where each finished answer is recorded; the same command goes on there."),
    ] = Path("hardkv-math"),
    config: ConfigFile = None,
    assignments: Assignments = None,
    model: ModelName = None,
    mean_tokens: Annotated[
        int | None,
        typer.Option(show_default=False, help="Mean tokens to keep per head; the same as --set budget.mean_tokens=N."),
    ] = None,
    seed: Annotated[int | None, typer.Option(show_default=False, help="Seed; the same as --set seed=N.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            show_default=False,
            help="Send a problem as a chat message, or as it is. Default: as a chat if the model has a template.",
        ),
    ] = None,
    as_json: Json = False,
    save: SavedJson = None,
    debug: Debug = False,
) -> None:
    """Answer mathematics problems with the compressed and the full cache. Killed, it goes on where it was."""
    from hardkv.evaluation.maths import Scorer, read_problems

    check_targets({"--output": save})
    chosen = _preset(preset)
    given = (("model.id", model), ("budget.mean_tokens", mean_tokens), ("seed", seed))
    more = (("generation.max_new_tokens", max_new_tokens), ("cache.max_sequences", batch))
    changes = [*parse_assignments(assignments), *(pair for pair in (*given, *more) if pair[1] is not None)]
    ready = _configured(config, changes, chosen)
    count = chosen.samples if samples is None else samples
    if count > 1 and ready.config.generation.temperature == 0.0:
        raise InputError(f"--samples {count}: at temperature 0 all answers to a problem are the same; give --samples 1")
    with ExitStack() as stack:
        scorer = stack.enter_context(Scorer())
        problems = read_problems(source, split, subset, question_field, answer_field)
        problems = _usable(problems, limit or chosen.limit, scorer)
        loaded = load(ready.config.model)
        templated = bool(getattr(loaded.tokenizer, "chat_template", None)) if chat is None else chat
        plan = Plan(source, preset, problems, count, templated, ready, loaded)
        arms = open_arms(plan, scorer, journal, not no_full, stack)
        session = context.find_object(Session)
        assert session is not None
        session.generating = True
        failed, interrupted = answer_all(plan, arms)
        command = written(context)
        found = found_so_far(command, plan, arms, failed)
    print_json(found) if as_json else output().print(math_table(found))
    write_files(found, save, None)
    if interrupted:
        raise KeyboardInterrupt
    if failed:
        raise HardKVError(f"{len(failed)} answers failed ({next(iter(failed.values()))}); the same command tries again")


def _preset(name: str) -> Preset:
    from hardkv.evaluation.maths import PRESETS

    if name not in PRESETS:
        raise InputError(f"--preset {name}: not known.{did_you_mean(name, PRESETS)} Known: {', '.join(PRESETS)}")
    return PRESETS[name]


def _configured(file: Path | None, changes: list[Assignment], preset: Preset) -> LoadedConfig:
    """The configuration with the preset's sampling where it names none itself."""
    named = read_configuration(file, changes).config.generation.model_fields_set
    rest = [(f"generation.{key}", value) for key, value in preset.generation.items() if key not in named]
    return read_configuration(file, [*rest, *changes])


def _usable(problems: Problems, limit: int | None, scorer: Scorer) -> Problems:
    """The first `limit` problems, less those whose reference answer nothing can be compared with."""
    from dataclasses import replace

    kept, left_out = [], dict(problems.left_out)
    with messages().status("Reading the reference answers"):
        for problem in problems.problems[:limit]:
            obstacle = scorer.check(problem.answer)
            if obstacle is None:
                kept.append(problem)
            else:
                left_out[problem.name] = f"reference answer {problem.answer!r}: {obstacle}"
    for name, reason in left_out.items():
        messages().print(f"left out: problem {name}: {reason}", soft_wrap=True, markup=False)
    if not kept:
        raise InputError("no problem is left that can be asked and scored")
    return replace(problems, problems=kept, left_out=left_out)
