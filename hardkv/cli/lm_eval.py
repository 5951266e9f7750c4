"""`hardkv lm-eval`: lm-evaluation-harness, with hardkv among its models."""

from __future__ import annotations

import importlib.util
import sys
from typing import Annotated

import typer

from hardkv.cli.session import Debug
from hardkv.errors import InputError

PASS_ON = {"ignore_unknown_options": True}


def lm_eval(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGUMENTS...",
            show_default=False,
            help="What follows lm_eval on its own command line; '-- run --help' shows all of it.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Run lm-evaluation-harness with '--model hardkv' known to it; all else is as in its own command.

    hardkv lm-eval --model hardkv --model_args config=run.yaml,cache.interval=64 --tasks my_task.yaml
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("hardkv lm-eval needs lm-evaluation-harness: pip install 'hardkv[lm-eval]'")

    import hardkv.evaluation.lm_eval_adapter  # noqa: F401  # registers the model

    from lm_eval.__main__ import cli_evaluate  # isort: skip

    # lm_eval's entry point reads its arguments from here alone.
    sys.argv = ["lm_eval", *(arguments or ())]
    cli_evaluate()
