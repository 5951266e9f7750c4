"""`hardkv report`: result files as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hardkv.cli.session import Debug
from hardkv.errors import InputError


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="JSON results of compare, eval and bench, in the order they shall appear."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(metavar="TEXT", help="The page's heading.")] = "hardkv: results",
    debug: Debug = False,
) -> None:
    """Write one HTML page with the charts, tables and settings of result files; it needs no network."""
    from hardkv.evaluation.pages import read_result, write_page

    page = write_page([read_result(path) for path in files], title)
    staged = out.with_name(out.name + ".part")
    try:
        staged.write_text(page, encoding="utf-8")
        staged.replace(out)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {out}", err=True)
