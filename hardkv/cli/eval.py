"""`hardkv eval`: how well a compressed cache does at a task."""

from __future__ import annotations

import typer

from hardkv.cli import eval_fidelity, eval_math, eval_retrieval
from hardkv.cli.command_lines import ManyValues, Remembered

app = typer.Typer(help="Measure the compressed cache at a task.", rich_markup_mode=None, no_args_is_help=False)
app.command("fidelity", cls=ManyValues)(eval_fidelity.fidelity)
app.command("math", cls=Remembered)(eval_math.math)
app.command("retrieval", cls=ManyValues)(eval_retrieval.retrieval)
