"""The tables of `hardkv eval fidelity`, and the lines below them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

_NUMBERS = (
    "KL", "±", "top-1", "perplexity", "mass kept", "output error", "first other", "same", "mean tokens", "KV MiB",
    "passes", "seconds",
)  # fmt: skip
_CAPTION = (
    "KL to the full cache, nats per token; ±: its standard error over texts. top-1: share of the fed tokens whose"
    " likeliest one is the same. mass kept, output error: of attention, by selection alone, mean over layers. first"
    " other: generated freely, the first token that differs, median over texts; same: share of tokens that are equal."
)


def progress_line(row: Mapping[str, Any]) -> str:
    """Say in a line what a row measured."""
    if row["mean_budget"] is None:
        return f"every token kept: perplexity {row['perplexity']:.3f}, {row['seconds']:.1f} s"
    if row["kl"] is None:
        return f"{row['method']}: {row['note']}"
    note = "" if row["note"] is None else f" ({row['note']})"
    return f"{row['method']}: KL {row['kl']:.4f}, {row['seconds']:.1f} s{note}"


def tables(found: Mapping[str, Any]) -> list[Table]:
    """One table for each number of rounds: the full cache, then the rows of each budget, best first."""
    return [_table(found, rounds) for rounds in dict.fromkeys(row["rounds"] for row in found["rows"])]


def ratio_lines(found: Mapping[str, Any]) -> list[Text]:
    """Say for each of the default's rows how its KL compares with SnapKV's and with the best of the others."""
    lines = []
    for row in found["rows"]:
        ratios = row.get("kl_ratio_to")
        if ratios:
            best = max(ratios, key=lambda name: float(ratios[name]))
            names = [name for name in ("snapkv+top_k",) if name in ratios and name != best]
            parts = [f"{ratios[name]:.3f} times the KL of {name}" for name in names]
            parts.append(f"{ratios[best]:.3f} times {'that' if names else 'the KL'} of {best}, the best of the others")
            where = f"{_rounds(row['rounds'])}, {row['mean_budget']:,} tokens"
            lines.append(Text(f"{where}: default has {', '.join(parts)}"))
    return lines


def _table(found: Mapping[str, Any], rounds: int) -> Table:
    rows = [row for row in found["rows"] if row["rounds"] == rounds]
    first, texts = rows[0], len(found["texts"])
    title = (
        f"{found['model']} in {found['dtype']}, {_rounds(rounds)}; {texts} text{'s' if texts > 1 else ''}:"
        f" {first['prompt_tokens']:,} tokens, then {first['fed_tokens']:,} given ones"
    )
    table = Table(
        title=title, caption=_CAPTION, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("budget", justify="right")
    table.add_column("method", overflow="fold")
    for heading in _NUMBERS:
        table.add_column(heading, justify="right")
    for row in (row for row in rows if row["mean_budget"] is None):
        table.add_row("", Text(row["method"], "bold"), *_numbers(row), end_section=True)
    for budget in dict.fromkeys(row["mean_budget"] for row in rows if row["mean_budget"] is not None):
        group = [row for row in rows if row["mean_budget"] == budget]
        group.sort(key=lambda row: float("inf") if row["kl"] is None else row["kl"])
        for number, row in enumerate(group, start=1):
            shown = f"{budget:,}" if number == 1 else ""
            table.add_row(shown, _name(row), *_numbers(row), end_section=number == len(group))
    return table


def _name(row: Mapping[str, Any]) -> Text:
    lines = [f"{option} = {value:.6g}" for option, value in row["solved"].items()]
    lines += [] if row["note"] is None else [row["note"]]
    return Text.assemble((row["method"], "bold"), *((f"\n  {line}", "dim") for line in lines))


def _numbers(row: Mapping[str, Any]) -> list[str]:
    def shown(value: float | None, pattern: str) -> str:
        return "" if value is None else format(value, pattern)

    def mean(values: list[float] | None) -> float | None:
        return sum(values) / len(values) if values else None

    held = row.get("kv_bytes")
    return [
        shown(row.get("kl"), ".4f"),
        shown(row.get("kl_standard_error"), ".4f"),
        shown(row.get("top1_agreement"), ".3f"),
        shown(row.get("perplexity"), ".3f"),
        shown(mean(row.get("attention_mass_kept")), ".3f"),
        shown(mean(row.get("attention_output_error")), ".3f"),
        shown(row.get("first_divergence_median"), ".1f"),
        shown(row.get("same_tokens"), ".2f"),
        shown(row.get("mean_tokens"), ".1f"),
        shown(None if held is None else held / 2**20, ".1f"),
        shown(row.get("compressions"), "d"),
        shown(row.get("seconds"), ".1f"),
    ]


def _rounds(rounds: int) -> str:
    return "one compression" if rounds == 1 else f"{rounds} rounds"
