"""The typer application and the entry point `main`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from hardkv import __version__
from hardkv.cli import (
    bench,
    compare,
    config,
    eval,
    generate,
    info,
    inspect,
    lm_eval,
    new_plugin,
    plugins,
    report,
    reporting,
)
from hardkv.cli.command_lines import ManyValues, Remembered
from hardkv.cli.session import Debug, Session

_EPILOG = (
    "Exit codes: 0 done; 1 generation failed while running; 2 wrong usage or configuration; 3 model not found or not"
    " supported; 4 does not fit in memory; 130 interrupted."
)

app = typer.Typer(
    name="hardkv",
    help="Decode with a head-adaptive, compressed KV cache.",
    epilog=_EPILOG,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.command("generate")(generate.generate)
app.command("compare", cls=ManyValues)(compare.compare)
app.command("info")(info.info)
app.command("inspect", cls=Remembered)(inspect.inspect)
app.command("plugins")(plugins.plugins)
app.command("report")(report.report)
app.command("new-plugin")(new_plugin.new_plugin)
app.command("lm-eval", context_settings=lm_eval.PASS_ON)(lm_eval.lm_eval)
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")
app.add_typer(eval.app, name="eval")


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"hardkv {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    debug: Debug = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code; `arguments` are those of the process when left out."""
    session = Session()
    chosen = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" not in chosen:
        _silence_libraries()
    reporting.show_warnings()
    try:
        code: int | None = app(args=chosen, prog_name="hardkv", standalone_mode=False, obj=session)
        sys.stdout.flush()
        # Newer versions of typer give 130 for an interrupt, older ones raise Abort.
        return reporting.interrupted() if code == reporting.INTERRUPTED else code or 0
    except (KeyboardInterrupt, typer.Abort):
        return reporting.interrupted()
    except BrokenPipeError:
        # A reader that went away, as `head` does, is no error; the interpreter would complain when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return reporting.report(error, session)


def _silence_libraries() -> None:
    # Read when these libraries are imported, which no command has done yet.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("ignore")
