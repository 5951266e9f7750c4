"""What the commands share: one call's state, its consoles, and the options that several of them take."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hardkv.errors import InputError

_PIPE_WIDTH = 200
"""Columns where there is no terminal, so that tables are not cut in a file or a pipe."""


@dataclass
class Session:
    """One call of the command line."""

    debug: bool = False
    generating: bool = False
    """Whether the checks are over and the model runs; from then on, an error is a failed generation."""


def output() -> Console:
    """Console of the results."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def messages() -> Console:
    """Console of everything that is no result: progress, statistics, errors."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else _PIPE_WIDTH, highlight=False)


def print_json(value: Any) -> None:
    """Write `value` to stdout as JSON."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def facts(title: str, rows: dict[str, Any]) -> Table:
    """Give a table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def check_targets(targets: Mapping[str, Path | None]) -> None:
    """Refuse files that cannot be written, by the option that names each, before any work.

    Raises:
        InputError: the folder of one does not exist.
    """
    for option, target in targets.items():
        if target is not None and not target.absolute().parent.is_dir():
            raise InputError(f"{option} {target}: its folder does not exist")


def readable_bytes(count: float) -> str:
    """Give bytes with a binary unit, such as `15.2 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _set_debug(context: typer.Context, value: bool) -> bool:
    session = context.find_object(Session)
    if session is not None and value:
        session.debug = True
    return value


Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error, and the libraries' warnings.", callback=_set_debug),
]
Json = Annotated[bool, typer.Option("--json", help="Write the result to stdout as JSON, and nothing else there.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        show_default=False,
        help="YAML configuration. Default: what 'hardkv config init' shows, with the packaged smollm2.",
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        show_default=False,
        help="Change one key of the configuration, such as cache.sinks=8 or scorer.name=snapkv; the value is YAML and"
        " is checked like the file. Repeatable.",
    ),
]
PreciseDtype = Annotated[
    str | None,
    typer.Option(
        show_default=False,
        help="Precision of weights and cache. Default: the configuration's if it names one, else float32, so that"
        " rounding is no part of the difference.",
    ),
]
TextNames = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME...",
        show_default=False,
        help="UTF-8 files, or shipped texts by name, such as prose. Default: all eight that come with hardkv.",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="ID",
        show_default=False,
        help="Hub id, folder, GGUF file, or smollm2; the same as --set model.id=ID.",
    ),
]
MeanTokens = Annotated[
    int | None,
    typer.Option(show_default=False, help="Mean tokens to keep per head; the same as --set budget.mean_tokens=N."),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(show_default=False, help="Most tokens to generate; the same as --set generation.max_new_tokens=N."),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        show_default=False,
        help="Send the prompt as a chat message, or as it is. Default: as a chat if the model has a template.",
    ),
]
SavedJson = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", show_default=False, help="Save the result as JSON."),
]
