"""`hardkv bench`: speed and memory, hardkv beside its peers on the same weights and prompts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from hardkv.cli import bench_options as options
from hardkv.cli.bench_fidelity import measured_fidelity
from hardkv.cli.bench_run import finish, over_cases, read_request, running
from hardkv.cli.bench_tables import table
from hardkv.cli.command_lines import ManyValues
from hardkv.cli.session import Assignments, ConfigFile, Debug, Json, ModelName
from hardkv.errors import InputError

app = typer.Typer(help="Measure speed and memory beside peers.", rich_markup_mode=None, no_args_is_help=False)


@app.command("decode", cls=ManyValues)
def decode(
    context: typer.Context,
    preset: options.Preset = "quick",
    batches: options.Batches = None,
    contexts: options.Contexts = None,
    mean_budget: options.MeanBudget = None,
    interval: options.Interval = None,
    rounds: options.Rounds = None,
    steps: options.Steps = None,
    ways: options.Ways = None,
    presses: options.Presses = None,
    kvpress_python: options.KVPressPython = None,
    vllm_python: options.VLLMPython = None,
    timeout: options.Timeout = 1800.0,
    fidelity: Annotated[
        bool,
        typer.Option(
            "--fidelity", help="Also feed given tokens to each way that compresses: KL to its own uncompressed run."
        ),
    ] = False,
    fidelity_tokens: Annotated[
        int, typer.Option(min=2, help="Prompt tokens of a text, with --fidelity; two intervals are fed after it.")
    ] = 2048,
    fidelity_budget: Annotated[int, typer.Option(min=1, help="Mean tokens per head, with --fidelity.")] = 192,
    config: ConfigFile = None,
    assignments: Assignments = None,
    model: ModelName = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    as_json: Json = False,
    save: options.Output = None,
    plot: options.Plot = None,
    debug: Debug = False,
) -> None:
    """Decode speed, compressions included and alone. Interrupted, it shows the cases it has."""
    request = read_request(context, "decode", locals())
    if fidelity and fidelity_budget >= fidelity_tokens:
        raise InputError(f"--fidelity-budget {fidelity_budget}: expected fewer than the {fidelity_tokens} of a prompt")
    from hardkv.evaluation.speed import case_ratios, document, headline, measure_decode

    plan = request.plan
    longest = max(plan.contexts) + plan.new_tokens(any(way.whole_intervals for way in request.ways))
    with running(context, request, longest) as (saved, crew):
        rows, complete = over_cases(request, lambda batch, tokens: measure_decode(crew, saved, plan, batch, tokens))
        for way in crew.ways:
            crew.end(way.name)
        measured = {}
        if fidelity and complete:
            measured = measured_fidelity(saved, crew, request, fidelity_tokens, fidelity_budget)
        found = {
            **document("decode", request.command, request.config, plan, crew.versions),
            "complete": complete,
            **headline(rows),
            "ratios": case_ratios(rows),
            **measured,
            "rows": [asdict(row) for row in rows],
        }
    finish(found, table(found), as_json, request)


@app.command("prefill", cls=ManyValues)
def prefill(
    context: typer.Context,
    preset: options.Preset = "quick",
    batches: options.Batches = None,
    contexts: options.Contexts = None,
    mean_budget: options.MeanBudget = None,
    rounds: options.Rounds = None,
    ways: options.Ways = None,
    presses: options.Presses = None,
    kvpress_python: options.KVPressPython = None,
    vllm_python: options.VLLMPython = None,
    timeout: options.Timeout = 1800.0,
    config: ConfigFile = None,
    assignments: Assignments = None,
    model: ModelName = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    as_json: Json = False,
    save: options.Output = None,
    plot: options.Plot = None,
    debug: Debug = False,
) -> None:
    """Time to the first token, and what reading the prompts takes for a moment."""
    request = read_request(context, "prefill", locals())
    from hardkv.evaluation.speed import document, measure_prefill

    plan = request.plan
    with running(context, request, max(plan.contexts) + 2) as (saved, crew):
        rows, complete = over_cases(request, lambda batch, tokens: measure_prefill(crew, saved, plan, batch, tokens))
        found = {
            **document("prefill", request.command, request.config, plan, crew.versions),
            "complete": complete,
            "rows": [asdict(row) for row in rows],
        }
    finish(found, table(found), as_json, request)


@app.command("memory", cls=ManyValues)
def memory(
    context: typer.Context,
    preset: options.Preset = "quick",
    batches: options.Batches = None,
    contexts: options.Contexts = None,
    mean_budget: options.MeanBudget = None,
    room: Annotated[
        str, typer.Option(metavar="BYTES", help="Say how many sequences fit in so much cache, such as 8 GiB.")
    ] = "4 GiB",
    ways: options.Ways = None,
    presses: options.Presses = None,
    kvpress_python: options.KVPressPython = None,
    vllm_python: options.VLLMPython = None,
    timeout: options.Timeout = 1800.0,
    config: ConfigFile = None,
    assignments: Assignments = None,
    model: ModelName = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    as_json: Json = False,
    save: options.Output = None,
    plot: options.Plot = None,
    debug: Debug = False,
) -> None:
    """Physical bytes of the cache, growth of the process, and how many sequences fit in given bytes."""
    from hardkv.units import parse_bytes

    try:
        room_bytes = parse_bytes(room)
    except ValueError as error:
        raise InputError(f"--room: {error}") from None
    request = read_request(context, "memory", locals())
    from hardkv.evaluation.speed import document, measure_memory

    plan = request.plan
    with running(context, request, max(plan.contexts) + plan.warmup_steps + 2) as (saved, crew):
        rows, complete = over_cases(
            request, lambda batch, tokens: measure_memory(crew, saved, plan, batch, tokens, room_bytes)
        )
        found = {
            **document("memory", request.command, request.config, plan, crew.versions),
            "complete": complete,
            "room_bytes": room_bytes,
            "rows": [asdict(row) for row in rows],
        }
    finish(found, table(found), as_json, request)
