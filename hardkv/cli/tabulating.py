"""The table of `hardkv compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from hardkv.cli.session import readable_bytes

if TYPE_CHECKING:
    from hardkv.evaluation import Row

_NUMBERS = ("KL", "top-1", "mean tokens", "KV MiB", "share", "compression ms", "passes", "seconds")


def progress_line(row: Row) -> str:
    """Say in a line what a method measured."""
    if row.kl is None:
        return f"{row.method}: {row.note}"
    note = "" if row.note is None else f" ({row.note})"
    return f"{row.method}: KL {row.kl:.4f}, {row.seconds:.1f} s{note}"


def comparison_table(rows: Sequence[Row], found: dict[str, Any]) -> Table:
    """Give the table of all methods, best first; why a method did not run stands under its name."""
    texts, rounds = len(found["texts"]), found["rounds"]
    title = (
        f"{found['model']} in {found['dtype']}, mean budget {found['mean_budget']:,} tokens per head; {texts}"
        f" text{'s' if texts > 1 else ''}: {found['prompt_tokens']:,} tokens, then {found['fed_tokens']:,} given ones,"
        f" {rounds} compression{'s' if rounds > 1 else ''} each"
    )
    kept = readable_bytes(found["reference"]["kv_bytes"])
    caption = (
        "KL to the runtime with every token kept, nats per token; top-1: share of tokens whose likeliest one is the"
        f" same. KV: physical bytes in use at the end, query ring included, of {kept} with every token kept."
        " compression ms: wall time of one pass of one text, after the prompt or while decoding."
    )
    table = Table(
        title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("method", overflow="fold")
    for heading in _NUMBERS:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(_named(row), *_numbers(row))
    return table


def _named(row: Row) -> Text:
    parts = row.components
    described = f" ({parts['scorer']['name']}+{parts['budget']['name']})" if "+" not in row.method else ""
    lines = [f"{option} = {value:.6g}" for option, value in row.solved.items()]
    lines += [] if row.note is None else [row.note]
    return Text.assemble((row.method, "bold"), described, *((f"\n  {line}", "dim") for line in lines))


def _numbers(row: Row) -> list[str]:
    def shown(value: float | None, pattern: str) -> str:
        return "" if value is None else format(value, pattern)

    return [
        shown(row.kl, ".4f"),
        shown(row.top1_agreement, ".3f"),
        shown(row.mean_tokens, ".1f"),
        shown(None if row.kv_bytes is None else row.kv_bytes / 2**20, ".1f"),
        shown(row.kv_bytes_share, ".1%"),
        shown(row.compression_ms, ".1f"),
        shown(row.compressions, "d"),
        shown(row.seconds, ".1f"),
    ]
