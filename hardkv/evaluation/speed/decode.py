"""Decode speed: all ways take turns on the same prompts; compressions count, and are given alone as well."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from hardkv.evaluation.speed.crew import Crew
from hardkv.evaluation.speed.plan import Plan
from hardkv.evaluation.speed.prompts import Saved, read_prompts
from hardkv.evaluation.speed.ways import Way

_MOST_OF_FREE_MEMORY = 0.6
_PREFILL_SHARE = 0.5
"""What a prefill takes for a moment, as a share of what the caches hold; a guess to decide about turns by."""


@dataclass
class DecodeRow:
    """One way in one case; numbers are None where it did not run."""

    way: str
    batch: int
    context_tokens: int
    tokens_per_s: float | None = None
    """Of the whole batch, compressions included: median over turns."""
    tokens_per_s_turns: list[float] = field(default_factory=list)
    step_ms: float | None = None
    """Median over all steps, as step_ms_p10 and step_ms_p90 are tenths of them."""
    step_ms_p10: float | None = None
    step_ms_p90: float | None = None
    compression_ms: float | None = None
    """Mean wall time of one pass of one sequence while decoding."""
    compression_share: float | None = None
    """Of the time of the turns."""
    passes: int = 0
    mean_tokens: float | None = None
    """Tokens per head after a compression, mean."""
    kv_bytes: int | None = None
    """Physical bytes in use after the last turn."""
    rss_bytes: int | None = None
    """The process's resident memory after the last turn; `rss_loaded_bytes` when the weights were loaded."""
    rss_loaded_bytes: int | None = None
    rss_peak_bytes: int | None = None
    """At most since the prompts came, prefill included."""
    device_peak_bytes: int | None = None
    prefill_seconds: float | None = None
    note: str | None = None


@dataclass
class _Turns:
    row: DecodeRow
    step_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    compression_seconds: float = 0.0

    def add(self, reply: dict[str, Any], tokens: int) -> None:
        """Take in one turn of so many tokens."""
        self.row.tokens_per_s_turns.append(tokens / reply["seconds"])
        self.step_seconds += reply["step_seconds"]
        self.seconds += reply["seconds"]
        self.compression_seconds += reply["compression_seconds"]
        self.row.passes += reply["passes"]
        self.row.mean_tokens = reply["mean_tokens"]
        for name in ("kv_bytes", "rss_bytes", "rss_peak_bytes", "device_peak_bytes"):
            setattr(self.row, name, reply[name])

    def finish(self) -> DecodeRow:
        """The row, with its medians."""
        row = self.row
        row.tokens_per_s = statistics.median(row.tokens_per_s_turns)
        ordered = sorted(1e3 * seconds for seconds in self.step_seconds)
        row.step_ms = statistics.median(ordered)
        row.step_ms_p10, row.step_ms_p90 = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        if row.passes:
            row.compression_share = self.compression_seconds / self.seconds
            row.compression_ms = 1e3 * self.compression_seconds / row.passes
        return row


def measure_decode(crew: Crew, saved: Saved, plan: Plan, batch: int, context_tokens: int) -> list[DecodeRow]:
    """One case: rows in the order of the ways. They take turns where memory holds all caches at once."""
    prompts = read_prompts(saved, batch, context_tokens)
    turns = {way.name: _Turns(DecodeRow(way.name, batch, context_tokens)) for way in crew.ways}
    if takes_turns(crew, saved, batch, context_tokens):
        for way in crew.ways:
            _start(crew, way, plan, prompts, turns[way.name])
        for number in range(plan.rounds):
            for way in crew.ways:
                _turn(crew, way, plan, batch, turns[way.name], number)
        for way in crew.ways:
            crew.ask(way, "stop")
    else:
        for way in crew.ways:
            _start(crew, way, plan, prompts, turns[way.name])
            for number in range(plan.rounds):
                _turn(crew, way, plan, batch, turns[way.name], number)
            crew.ask(way, "stop")
            crew.end(way.name)
    return [
        DecodeRow(name, batch, context_tokens, note=crew.notes[name]) if name in crew.notes else mine.finish()
        for name, mine in turns.items()
    ]


def takes_turns(crew: Crew, saved: Saved, batch: int, context_tokens: int) -> bool:
    """Whether all processes fit at once with their weights, packed copies and caches."""
    device = torch.device(crew.config.model.device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    cache = batch * context_tokens * saved.token_bytes * (1 + _PREFILL_SHARE)
    running = sum(way.name not in crew.notes for way in crew.ways)
    return running * (2 * saved.weight_bytes + cache) < _MOST_OF_FREE_MEMORY * free


def ratios(rows: Sequence[DecodeRow], of: str = "hardkv") -> dict[str, dict[str, float]]:
    """Tokens per second of `of` to those of each other way, turn by turn: `median`, `low`, `high`."""
    turns = {row.way: row.tokens_per_s_turns for row in rows if row.note is None}
    if of not in turns:
        return {}
    found = {}
    for name, theirs in turns.items():
        if name != of:
            each = [mine / other for mine, other in zip(turns[of], theirs, strict=True)]
            found[name] = {"median": statistics.median(each), "low": min(each), "high": max(each)}
    return found


def _start(crew: Crew, way: Way, plan: Plan, prompts: list[list[int]], mine: _Turns) -> None:
    crew.say(f"{way.name}: prefill")
    reply = crew.ask(way, "start", prompts=prompts, new_tokens=plan.new_tokens(way.whole_intervals))
    if reply is not None:
        mine.row.prefill_seconds, mine.row.rss_loaded_bytes = reply["prefill_seconds"], crew.loaded_rss[way.name]
        crew.say(f"{way.name}: warm-up")
        crew.ask(way, "steps", count=plan.warmup_steps)


def _turn(crew: Crew, way: Way, plan: Plan, batch: int, mine: _Turns, number: int) -> None:
    count = plan.steps_of(way.whole_intervals)
    crew.say(f"{way.name}: turn {number + 1} of {plan.rounds}")
    reply = crew.ask(way, "steps", count=count)
    if reply is not None:
        mine.add(reply, count * batch)
