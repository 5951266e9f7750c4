"""`hardkv info`: versions, device, model, costs, and what fits in memory."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hardkv import __version__
from hardkv.cli.configuring import parse_assignments, read_configuration
from hardkv.cli.session import (
    Assignments,
    ConfigFile,
    Debug,
    Json,
    ModelName,
    facts,
    messages,
    output,
    print_json,
    readable_bytes,
)

if TYPE_CHECKING:
    from hardkv.admission import Admission
    from hardkv.config import LoadedConfig
    from hardkv.runtime import HardKVRuntime

_CONTEXTS = (2048, 8192, 32768, 131072)
_UNKNOWN_POSITIONS = 1 << 30


def info(
    config: ConfigFile = None,
    assignments: Assignments = None,
    model: ModelName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show versions, the device, the model, measured costs and a memory plan."""
    changes = [*parse_assignments(assignments), *([("model.id", model)] if model is not None else [])]
    ready = read_configuration(config, changes)
    versions = _versions()
    console = output()
    if not as_json:
        # Before the model, so that a report about one that does not load has them.
        console.print(facts("Versions", versions))

    from hardkv.model_adapter import load_model
    from hardkv.runtime import HardKVRuntime

    chosen = ready.config.model
    with messages().status(f"Loading {chosen.id}"):
        loaded = load_model(chosen.id, chosen.dtype, chosen.device, chosen.revision)
        runtime = HardKVRuntime(ready.config, ready.components, loaded)
    report = {"versions": versions, "model": _model(runtime), "costs": _costs(runtime), "memory": _plan(runtime, ready)}
    if as_json:
        print_json(report)
        return
    console.print(facts("Model", {**report["model"], "device": _device_name(runtime)}))
    costs = report["costs"]
    console.print(
        facts(
            "Measured costs",
            {
                "read (c_read)": _rate(costs["c_read_seconds_per_byte"]),
                "move (c_copy)": _rate(costs["c_copy_seconds_per_byte"]),
                "start of a move": f"{costs['launch_seconds'] * 1e6:.1f} us",
            },
        )
    )
    console.print(_plan_table(report["memory"]))
    console.print(f"At most {ready.config.cache.max_sequences} sequences decode at once (cache.max_sequences).")


def _versions() -> dict[str, str]:
    found = {"hardkv": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _model(runtime: HardKVRuntime) -> dict[str, Any]:
    geometry = runtime.geometry
    return {
        "id": runtime.config.model.id,
        "device": str(geometry.device),
        "dtype": str(geometry.dtype).removeprefix("torch."),
        "full_layers": len(geometry.full_layers),
        "sliding_layers": len(geometry.windows) - len(geometry.full_layers),
        "kv_heads": geometry.heads,
        "group": geometry.group,
        "head_dim": geometry.head_dim,
        "max_positions": None if geometry.max_positions >= _UNKNOWN_POSITIONS else geometry.max_positions,
    }


def _device_name(runtime: HardKVRuntime) -> str:
    import torch

    device = runtime.geometry.device
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.processor() or platform.machine()}, {torch.get_num_threads()} threads)"


def _costs(runtime: HardKVRuntime) -> dict[str, float]:
    return {
        "c_read_seconds_per_byte": runtime.costs.read_seconds_per_byte,
        "c_copy_seconds_per_byte": runtime.costs.copy_seconds_per_byte,
        "launch_seconds": runtime.costs.launch_seconds,
    }


def _plan(runtime: HardKVRuntime, ready: LoadedConfig) -> dict[str, Any]:
    """Bytes per sequence and how many fit, for growing contexts, with compression and without."""
    from hardkv.admission import Admission, usable_bytes

    geometry, settings = runtime.geometry, ready.config.cache
    ways = {
        "compressed": Admission(geometry, settings, ready.components),
        "uncompressed": Admission(geometry, settings, None),
    }
    free = usable_bytes(runtime.geometry.device)
    lengths = [tokens for tokens in _CONTEXTS if tokens < geometry.max_positions]
    if geometry.max_positions < _UNKNOWN_POSITIONS:
        lengths.append(geometry.max_positions)
    rows = []
    for tokens in lengths:
        row: dict[str, Any] = {"context_tokens": tokens}
        for name, admission in ways.items():
            row[name] = _needs(admission, tokens, free, settings.pool_bytes)
        rows.append(row)
    return {"usable_bytes": free, "pool_bytes": settings.pool_bytes, "contexts": rows}


def _needs(admission: Admission, tokens: int, free: int, pool_limit: int | None) -> dict[str, int]:
    pages = admission.sequence_pages(tokens) * admission.page_bytes
    held, transient = pages + admission.lane_bytes(), admission.prefill_bytes(tokens)
    fit = max(0, free - transient) // held
    if pool_limit is not None:
        fit = min(fit, pool_limit // pages)
    return {"sequence_bytes": held, "prefill_bytes": transient, "sequences": fit}


def _plan_table(memory: dict[str, Any]) -> Table:
    limit = memory["pool_bytes"]
    bound = "" if limit is None else f", cache.pool_bytes {readable_bytes(limit)}"
    title = f"Memory plan (worst case; {readable_bytes(memory['usable_bytes'])} usable{bound})"
    table = Table(title=title, title_justify="left")
    for heading in ("context", "compressed", "uncompressed", "sequences", "sequences, uncompressed"):
        table.add_column(heading, justify="right")
    for row in memory["contexts"]:
        compressed, uncompressed = row["compressed"], row["uncompressed"]
        table.add_row(
            f"{row['context_tokens']:,}",
            readable_bytes(compressed["sequence_bytes"]),
            readable_bytes(uncompressed["sequence_bytes"]),
            f"{compressed['sequences']:,}",
            f"{uncompressed['sequences']:,}",
        )
    return table


def _rate(seconds_per_byte: float) -> str:
    return f"{seconds_per_byte * 1e12:.1f} ps per byte ({1e-9 / seconds_per_byte:.1f} GB/s)"
