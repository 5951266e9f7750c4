"""`hardkv config`: the schema, a commented default, a check."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hardkv.cli.configuring import read_configuration
from hardkv.cli.session import ConfigFile, Debug, print_json
from hardkv.errors import InputError

app = typer.Typer(help="Write, check and describe configuration files.", rich_markup_mode=None, no_args_is_help=False)


@app.command()
def schema(config: ConfigFile = None, debug: Debug = False) -> None:
    """Print the JSON Schema of the configuration, with the options of every component known."""
    from hardkv.config import config_schema

    print_json(config_schema(read_configuration(config, []).registry))


@app.command()
def init(
    path: Annotated[str, typer.Argument(metavar="PATH", help="File to write; '-' is stdout.")] = "-",
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    debug: Debug = False,
) -> None:
    """Write a configuration of all defaults, with every key explained."""
    from hardkv.config import default_yaml

    if path == "-":
        sys.stdout.write(default_yaml())
        return
    try:
        with Path(path).open("w" if force else "x", encoding="utf-8") as file:
            file.write(default_yaml())
    except FileExistsError:
        raise InputError(f"{path}: is there already; choose another name, or overwrite it with --force") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {path}", err=True)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The YAML file to check.")], debug: Debug = False
) -> None:
    """Check a configuration file without loading its model; exit code 2 if it has a fault."""
    config = read_configuration(file, []).config
    parts = (config.scorer, config.calibrator, config.budget, config.regularizer, config.condenser)
    typer.echo(f"{file}: valid ({config.model.id}; {', '.join(part.name for part in parts)})")
