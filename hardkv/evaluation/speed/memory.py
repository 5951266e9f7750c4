"""What a batch holds once its prompts have been read and a few tokens decoded."""

from __future__ import annotations

from dataclasses import dataclass

from hardkv.evaluation.speed.crew import Crew
from hardkv.evaluation.speed.plan import Plan
from hardkv.evaluation.speed.prompts import Saved, read_prompts


@dataclass
class MemoryRow:
    """One way in one case; numbers are None where it did not run."""

    way: str
    batch: int
    context_tokens: int
    kv_bytes: int | None = None
    """Physical bytes of the cache in use, tables and buffers included."""
    kv_bytes_per_sequence: float | None = None
    sequences_in_room: int | None = None
    """Whole sequences of this length whose caches the given bytes hold."""
    rss_growth_bytes: int | None = None
    """Resident memory of the process less what it was when the weights had been loaded."""
    rss_peak_growth_bytes: int | None = None
    """The same for its highest, prefill included."""
    device_peak_bytes: int | None = None
    mean_tokens: float | None = None
    note: str | None = None


def measure_memory(
    crew: Crew, saved: Saved, plan: Plan, batch: int, context_tokens: int, room_bytes: int
) -> list[MemoryRow]:
    """One case, each way in a fresh process, one after the other."""
    prompts = read_prompts(saved, batch, context_tokens)
    rows = []
    for way in crew.ways:
        row = MemoryRow(way.name, batch, context_tokens)
        rows.append(row)
        crew.say(f"{way.name}: {batch} x {context_tokens:,} tokens")
        started = crew.ask(way, "start", prompts=prompts, new_tokens=plan.warmup_steps + 2)
        reply = None if started is None else crew.ask(way, "steps", count=plan.warmup_steps)
        crew.end(way.name)
        row.note = crew.notes.get(way.name)
        if started is None or reply is None:
            continue
        row.kv_bytes, row.mean_tokens = reply["kv_bytes"], started["mean_tokens"]
        row.kv_bytes_per_sequence = reply["kv_bytes"] / batch
        row.sequences_in_room = room_bytes * batch // max(1, reply["kv_bytes"])
        row.device_peak_bytes = reply["device_peak_bytes"]
        before = crew.loaded_rss[way.name]
        if before is not None:
            row.rss_growth_bytes = reply["rss_bytes"] - before
            row.rss_peak_growth_bytes = reply["rss_peak_bytes"] - before
    return rows
