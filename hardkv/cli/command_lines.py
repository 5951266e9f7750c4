"""Command lines that are remembered as they were written, and options that take several values at once."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

_ARGUMENTS = "hardkv.arguments"


class Remembered(TyperCommand):
    """Keeps its arguments, so that a result can say how it was made."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, self._read(args))

    def _read(self, arguments: list[str]) -> list[str]:
        return arguments


class ManyValues(Remembered):
    """Lets options whose metavar ends in `...` take several values at once: `--texts a.txt b.txt`."""

    def _read(self, arguments: list[str]) -> list[str]:
        return spread(
            arguments, {name for each in self.params if (each.metavar or "").endswith("...") for name in each.opts}
        )


def written(context: typer.Context) -> str:
    """The command line of a `Remembered` command, as one would type it."""
    return shlex.join([*context.command_path.split(), *context.meta[_ARGUMENTS]])


def spread(arguments: Sequence[str], many: Collection[str]) -> list[str]:
    """Repeat an option of several values, one of `many`, before each of them."""
    found: list[str] = []
    option = None
    for argument in arguments:
        if argument.startswith("-"):
            name = argument.split("=")[0]
            option = name if name in many else None
        elif option is not None and found[-1] != option:
            found.append(option)
        found.append(argument)
    return found
