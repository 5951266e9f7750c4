"""How far each way that compresses moves the predictions of its own uncompressed run, on the same given tokens."""

from __future__ import annotations

from dataclasses import dataclass

from hardkv.evaluation.speed.crew import Crew
from hardkv.evaluation.workload import Workload


@dataclass
class FidelityRow:
    """One way; numbers are None where it did not run."""

    way: str
    kl: float | None = None
    """KL(every token kept || compressed), nats per token, mean over tokens and texts."""
    top1_agreement: float | None = None
    """How often the likeliest token is the same, a share of the fed tokens."""
    mean_tokens: float | None = None
    note: str | None = None


def measure_peers(crew: Crew, workload: Workload) -> list[FidelityRow]:
    """Rows of the ways that compress, in a crew of their own."""
    rows = []
    for way in crew.ways:
        crew.say(f"{way.name}: fidelity")
        reply = crew.ask(way, "force", prompts=workload.prompts, continuations=workload.fed)
        crew.end(way.name)
        row = FidelityRow(way.name, note=crew.notes.get(way.name))
        if reply is not None:
            row.kl, row.top1_agreement, row.mean_tokens = reply["kl"], reply["top1_agreement"], reply["mean_tokens"]
        rows.append(row)
    return rows
