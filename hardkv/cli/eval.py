"""`hardkv eval`: how well a compressed cache does at a task."""

from __future__ import annotations

import typer

from hardkv.cli import eval_math, eval_retrieval

app = typer.Typer(help="Measure the compressed cache at a task.", rich_markup_mode=None, no_args_is_help=False)
app.command("math", cls=eval_math.Recorded)(eval_math.math)
app.command("retrieval", cls=eval_retrieval.ManyValues)(eval_retrieval.retrieval)
