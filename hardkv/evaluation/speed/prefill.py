"""Time to the first token, and what a prefill takes for a moment."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from hardkv.evaluation.speed.crew import Crew
from hardkv.evaluation.speed.plan import Plan
from hardkv.evaluation.speed.prompts import Saved, read_prompts


@dataclass
class PrefillRow:
    """One way in one case; numbers are None where it did not run."""

    way: str
    batch: int
    context_tokens: int
    first_token_seconds: float | None = None
    """From the prompts to the first token of the last of them: median over turns."""
    first_token_seconds_turns: list[float] = field(default_factory=list)
    tokens_per_s: float | None = None
    """Prompt tokens of the whole batch."""
    compression_seconds: float | None = None
    """Of the prefill, what selecting among the prompt's tokens took; of the last turn."""
    kv_bytes: int | None = None
    """Physical bytes in use when the prompts have been read."""
    transient_bytes: int | None = None
    """Resident memory at its highest during the prefill less what it is afterwards; of the largest turn."""
    device_peak_bytes: int | None = None
    note: str | None = None


def measure_prefill(crew: Crew, saved: Saved, plan: Plan, batch: int, context_tokens: int) -> list[PrefillRow]:
    """One case. Each way reads the prompts once for warm-up, then they take turns; no two caches live at once."""
    prompts = read_prompts(saved, batch, context_tokens)
    rows = {way.name: PrefillRow(way.name, batch, context_tokens) for way in crew.ways}
    for number in range(-1, plan.rounds):
        for way in crew.ways:
            crew.say(f"{way.name}: " + (f"prefill {number + 1} of {plan.rounds}" if number >= 0 else "warm-up"))
            # A short prompt warms code up; the whole one would double the time.
            given = prompts if number >= 0 else [prompt[: plan.mean_tokens + 1] for prompt in prompts]
            reply = crew.ask(way, "start", prompts=given, new_tokens=2)
            crew.ask(way, "stop")
            if reply is None or number < 0:
                continue
            row = rows[way.name]
            row.first_token_seconds_turns.append(reply["prefill_seconds"])
            row.compression_seconds, row.kv_bytes = reply["compression_seconds"], reply["kv_bytes"]
            row.device_peak_bytes = reply["device_peak_bytes"]
            if reply["rss_peak_bytes"] is not None:
                row.transient_bytes = max(row.transient_bytes or 0, reply["rss_peak_bytes"] - reply["rss_bytes"])
    for name, row in rows.items():
        if name in crew.notes:
            rows[name] = PrefillRow(name, batch, context_tokens, note=crew.notes[name])
        else:
            row.first_token_seconds = statistics.median(row.first_token_seconds_turns)
            row.tokens_per_s = batch * context_tokens / row.first_token_seconds
    return list(rows.values())
