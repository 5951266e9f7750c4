"""`hardkv eval fidelity`: how far methods move the model's predictions, over mean budgets and rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hardkv.cli.command_lines import written
from hardkv.cli.configuring import parse_assignments
from hardkv.cli.eval_fidelity_ready import Request, check_files, prepare
from hardkv.cli.eval_fidelity_run import measure_all
from hardkv.cli.eval_fidelity_table import ratio_lines, tables
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
    output,
    print_json,
)


def fidelity(
    context: typer.Context,
    config: ConfigFile = None,
    assignments: Assignments = None,
    model: ModelName = None,
    dtype: PreciseDtype = None,
    mean_budgets: Annotated[
        list[int] | None,
        typer.Option(
            metavar="TOKENS...",
            min=1,
            show_default=False,
            help="Mean tokens per head that every method keeps after a compression. Default: 384 192.",
        ),
    ] = None,
    rounds: Annotated[
        list[int] | None,
        typer.Option(
            metavar="NUMBER...",
            min=1,
            show_default=False,
            help="Compressions of a text, a table for each number; from 2 on, each has --interval fed tokens after it."
            " Default: 1.",
        ),
    ] = None,
    interval: Annotated[
        int, typer.Option(min=1, max=65_536, help="Fed tokens from one compression to the next, with 2 rounds or more.")
    ] = 128,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME...",
            show_default=False,
            help="Methods as in 'hardkv compare', any scorer+budget, or all. Default: the shipped one and six others.",
        ),
    ] = None,
    variants: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="YAML of further rows: a name, and settings on top of the shipped default, such as"
            " {cache.local_window: 64}.",
        ),
    ] = None,
    texts: TextNames = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="Prompt tokens of a text. Default: 2048; with more than one round 1024."
        ),
    ] = None,
    fed_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=65_535,
            show_default=False,
            help="Tokens fed after the prompt where it is compressed once. Default: 256.",
        ),
    ] = None,
    free_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens to generate greedily from each prompt, to see where it leaves; 0: none.")
    ] = 64,
    layers: Annotated[
        bool, typer.Option("--layers/--no-layers", help="Measure attention layer by layer, which costs more time.")
    ] = True,
    as_json: Json = False,
    save: SavedJson = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the file of --output: rows that it holds are not run again.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="Draw the frontier: .png, .svg or .pdf. Needs hardkv[plot]."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Compare methods with the full cache over budgets and rounds. Interrupted, it shows what it has."""
    check_files(save, resume, plot)
    given = {"model.id": model, "model.dtype": dtype}
    request = Request(
        config=config,
        changes=[*parse_assignments(assignments), *((key, value) for key, value in given.items() if value is not None)],
        mean_budgets=list(dict.fromkeys(mean_budgets or [384, 192])),
        rounds=list(dict.fromkeys(rounds or [1])),
        sizes=(prompt_tokens, fed_tokens, interval),
        only=only,
        variants=variants,
        texts=texts,
        free_tokens=free_tokens,
        layers=layers,
    )
    session = context.find_object(Session)
    assert session is not None
    ready = prepare(request, written(context), save, resume)
    session.generating = True
    complete = measure_all(ready)
    found = ready.results.found(complete)
    ready.results.write(complete)
    if as_json:
        print_json(found)
    else:
        for part in [*tables(found), *ratio_lines(found)]:
            output().print(part)
    if plot is not None:
        from hardkv.evaluation.faithful.plotting import draw

        draw(found, plot)
    if not complete:
        raise KeyboardInterrupt
