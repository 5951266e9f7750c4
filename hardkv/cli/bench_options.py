"""Options that the commands of `hardkv bench` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Preset = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Sizes that are not given: quick, batches of 1 and 4 at 2,048 tokens; or full, 8 sequences of 7,000 tokens"
        " at a mean of 1,024.",
    ),
]
Batches = Annotated[
    list[int] | None,
    typer.Option("--batch", metavar="N...", min=1, show_default=False, help="Sequences decoded together."),
]
Contexts = Annotated[
    list[int] | None,
    typer.Option("--context", metavar="TOKENS...", min=2, show_default=False, help="Prompt tokens of each sequence."),
]
MeanBudget = Annotated[
    int | None,
    typer.Option(
        min=1, show_default=False, help="Mean tokens per head, of hardkv (budget.mean_tokens) and of kvpress alike."
    ),
]
Interval = Annotated[
    int | None,
    typer.Option(min=1, show_default=False, help="Decode steps between compressions (cache.interval). Default: 128."),
]
Rounds = Annotated[int | None, typer.Option(min=1, show_default=False, help="Turns of each way. Default: 2; full: 3.")]
Steps = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default=False,
        help="Decode steps of a turn; ways that compress take whole intervals. Default: 8; full: 12.",
    ),
]
Ways = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME...",
        show_default=False,
        help="Only these ways: hardkv, uncompressed, transformers, transformers_static, kvpress:PRESS, vllm.",
    ),
]
Presses = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME...", show_default=False, help="Presses of kvpress to run. Default: SnapKVPress."),
]
KVPressPython = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        show_default=False,
        help="Python that has kvpress and a transformers it can run on. Default: .venv-peers/bin/python, if it is"
        " there; 'make peers' makes it.",
    ),
]
VLLMPython = Annotated[
    Path | None, typer.Option("--vllm-python", metavar="PATH", show_default=False, help="Python that has vllm.")
]
Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", min=1, help="Longest wait for one answer of a peer: a prefill, or a turn.")
]
Dtype = Annotated[
    str | None,
    typer.Option(show_default=False, help="Precision of weights and cache; the same as --set model.dtype=NAME."),
]
Device = Annotated[
    str | None, typer.Option(show_default=False, help="Where to run; the same as --set model.device=NAME.")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", show_default=False, help="Save the result as JSON."),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", show_default=False, help="Draw the result: .png, .svg or .pdf. Needs hardkv[plot]."),
]
