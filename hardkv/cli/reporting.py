"""Exit codes, and errors as one paragraph."""

from __future__ import annotations

import logging
import traceback

import typer
from rich.text import Text

from hardkv.cli.session import Session, messages
from hardkv.errors import (
    CapacityError,
    ConfigError,
    HardKVError,
    InputError,
    ModelNotFoundError,
    PluginError,
    UnsupportedModelError,
)

FAILED, USAGE, MODEL, CAPACITY, INTERRUPTED = 1, 2, 3, 4, 130
# typer brings its own copy of click in newer versions and the package in older ones; this is the right one of both.
USAGE_ERROR: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def exit_code(error: BaseException, generating: bool) -> int:
    """Give the exit code that tells a script what kind of error this was."""
    if isinstance(error, CapacityError | MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return CAPACITY
    if isinstance(error, ModelNotFoundError | UnsupportedModelError):
        return MODEL
    if isinstance(error, USAGE_ERROR):
        return USAGE
    return USAGE if isinstance(error, ConfigError | InputError | PluginError) and not generating else FAILED


def interrupted() -> int:
    """Say on stderr that the user broke off, and give the exit code for it."""
    typer.echo("interrupted", err=True)
    return INTERRUPTED


def report(error: Exception, session: Session) -> int:
    """Write the error to stderr and give its exit code."""
    if session.debug:
        traceback.print_exception(error)
    console = messages()
    console.print(Text.assemble(("error: ", "bold red"), _explained(error)), soft_wrap=True)
    return exit_code(error, session.generating)


def _explained(error: Exception) -> str:
    if isinstance(error, USAGE_ERROR):
        context = getattr(error, "ctx", None)
        hint = f" (see '{context.command_path} --help')" if context is not None else ""
        text: str = error.format_message()  # type: ignore[attr-defined]  # the class is looked up at run time
        return text + hint
    if isinstance(error, HardKVError):
        return str(error)
    return f"{type(error).__name__}: {error}. This was not expected; --debug shows where it happened"


class _WarningLines(logging.Handler):
    """Shows the package's log records as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        messages().print(Text(f"{record.levelname.lower()}: {record.getMessage()}"), soft_wrap=True)


def show_warnings() -> None:
    """Let the package's warnings be seen, once per process."""
    logger = logging.getLogger("hardkv")
    if not any(isinstance(handler, _WarningLines) for handler in logger.handlers):
        handler = _WarningLines(level=logging.WARNING)
        # A prompt's failure is logged by the scheduler and raised as well; the error is what we show.
        handler.addFilter(lambda record: record.name != "hardkv.scheduler")
        logger.addHandler(handler)
