"""A measurement as plain data, with all that it was made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from hardkv.config import HardKVConfig
from hardkv.evaluation.report import provenance
from hardkv.evaluation.speed.decode import DecodeRow, ratios
from hardkv.evaluation.speed.plan import Plan

Versions = Mapping[str, Mapping[str, str]]


def document(kind: str, command: str, config: HardKVConfig, plan: Plan, versions: Versions) -> dict[str, Any]:
    """What every kind of result begins with."""
    return {
        "kind": kind,
        "command": command,
        "model": config.model.id,
        "dtype": config.model.dtype,
        "device": config.model.device,
        "packed_weights": config.model.pack_weights,
        **provenance(torch.device(config.model.device)),
        "peer_versions": {name: dict(found) for name, found in versions.items()},
        "mean_budget": plan.mean_tokens,
        "interval": plan.interval,
        "plan": asdict(plan),
        "components": {
            slot: getattr(config, slot).model_dump()
            for slot in ("scorer", "calibrator", "budget", "regularizer", "condenser")
        },
        "cache": config.cache.model_dump(),
    }


def headline(rows: Sequence[DecodeRow]) -> dict[str, Any]:
    """The largest case in few keys, those that the documentation reads."""
    last = (rows[-1].batch, rows[-1].context_tokens)
    ran = {row.way: row for row in rows if (row.batch, row.context_tokens) == last and row.tokens_per_s is not None}
    speed = {name: row.tokens_per_s for name, row in ran.items()}
    held = {name: row.kv_bytes for name, row in ran.items()}
    ours = ran.get("hardkv")

    def share(values: Mapping[str, Any], of: str) -> float | None:
        mine, other = values.get("hardkv"), values.get(of)
        return None if mine is None or other is None else mine / other

    return {
        "batch": last[0],
        "context_tokens": last[1],
        "tokens_per_s": speed,
        "ratio_vs_uncompressed": share(speed, "uncompressed"),
        "ratio_vs_transformers": share(speed, "transformers"),
        "kv_bytes": held,
        "kv_bytes_share": share(held, "uncompressed"),
        "mean_tokens": None if ours is None else ours.mean_tokens,
    }


def case_ratios(rows: Sequence[DecodeRow]) -> list[dict[str, Any]]:
    """For each case, hardkv's speed to that of each other way, turn by turn."""
    cases = sorted({(row.batch, row.context_tokens) for row in rows}, key=lambda case: (case[0] * case[1], case))
    found = []
    for batch, context in cases:
        mine = [row for row in rows if (row.batch, row.context_tokens) == (batch, context)]
        found += [
            {"batch": batch, "context_tokens": context, "hardkv_to": name, **values}
            for name, values in ratios(mine).items()
        ]
    return found
