"""A comparison as plain data, and what it was made with."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from hardkv import __version__
from hardkv.evaluation.bench import Bench, Reference, Row


def provenance(device: torch.device) -> dict[str, Any]:
    """`versions` of what decides about numbers, and the `machine` that a model on `device` ran on."""
    name = platform.processor() or platform.machine()
    machine = f"{name}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        machine = f"{torch.cuda.get_device_name(device)}, {machine}"
    return {
        "versions": {
            "hardkv": __version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        "machine": machine,
    }


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Best first by KL; those without a number last, in their order."""
    return sorted(rows, key=lambda row: math.inf if row.kl is None else row.kl)


def report(command: str, bench: Bench, reference: Reference, rows: Sequence[Row], complete: bool) -> dict[str, Any]:
    """The comparison for JSON; `complete`: whether every method had its turn."""
    config, workload = bench.config, bench.workload
    return {
        "kind": "compare",
        "command": command,
        "complete": complete,
        "model": config.model.id,
        "dtype": config.model.dtype,
        **provenance(bench.loaded.model.device),
        "mean_budget": bench.mean_tokens,
        "texts": list(workload.names),
        **asdict(workload.schedule),
        "cache": config.cache.model_dump(exclude={"interval", "condensed_slots", "max_sequences"}),
        "reference": {"kv_bytes": reference.kv_bytes, "seconds": reference.seconds},
        "rows": [asdict(row) for row in ranked(rows)],
    }
