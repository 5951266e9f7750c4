"""The tables of `hardkv bench`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

Column = tuple[str, Callable[[dict[str, Any]], str]]


def _number(key: str, pattern: str, unit: float = 1.0) -> Callable[[dict[str, Any]], str]:
    return lambda row: "" if row[key] is None else format(row[key] / unit, pattern)


def _spread(key: str, pattern: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{min(row[key]):{pattern}}-{max(row[key]):{pattern}}" if row[key] else ""


_MIB = 2.0**20
_COLUMNS: dict[str, tuple[Column, ...]] = {
    "decode": (
        ("tokens/s", _number("tokens_per_s", ".1f")),
        ("turns", _spread("tokens_per_s_turns", ".1f")),
        ("step ms", _number("step_ms", ".1f")),
        ("p10", _number("step_ms_p10", ".1f")),
        ("p90", _number("step_ms_p90", ".1f")),
        ("pass ms", _number("compression_ms", ".1f")),
        ("passes share", _number("compression_share", ".1%")),
        ("mean tokens", _number("mean_tokens", ".0f")),
        ("KV MiB", _number("kv_bytes", ".1f", _MIB)),
        ("RSS MiB", _number("rss_bytes", ".0f", _MIB)),
        ("peak", _number("rss_peak_bytes", ".0f", _MIB)),
        ("GPU peak", _number("device_peak_bytes", ".0f", _MIB)),
    ),
    "prefill": (
        ("first token s", _number("first_token_seconds", ".2f")),
        ("turns", _spread("first_token_seconds_turns", ".2f")),
        ("tokens/s", _number("tokens_per_s", ",.0f")),
        ("selecting s", _number("compression_seconds", ".2f")),
        ("KV MiB after", _number("kv_bytes", ".1f", _MIB)),
        ("transient MiB", _number("transient_bytes", ".0f", _MIB)),
        ("GPU peak", _number("device_peak_bytes", ".0f", _MIB)),
    ),
    "memory": (
        ("KV MiB", _number("kv_bytes", ".1f", _MIB)),
        ("per sequence", _number("kv_bytes_per_sequence", ".2f", _MIB)),
        ("sequences that fit", _number("sequences_in_room", ",.0f")),
        ("process grew MiB", _number("rss_growth_bytes", ".0f", _MIB)),
        ("at most", _number("rss_peak_growth_bytes", ".0f", _MIB)),
        ("GPU peak", _number("device_peak_bytes", ".0f", _MIB)),
        ("mean tokens", _number("mean_tokens", ".0f")),
    ),
}


def table(found: dict[str, Any]) -> Table:
    """One line for each case and way; why a way did not run stands under its name."""
    turns = found["plan"]["rounds"]
    title = (
        f"{found['model']} in {found['dtype']} on {found['device']}, mean budget {found['mean_budget']:,},"
        f" interval {found['interval']}"
    )
    if found["kind"] != "memory":
        title += f", {turns} turn{'s' if turns > 1 else ''} each"
    made = Table(title=title, caption=_caption(found), title_justify="left", caption_justify="left")
    made.box, made.pad_edge = box.SIMPLE_HEAD, False
    made.add_column("batch x context", no_wrap=True)
    made.add_column("way", overflow="fold")
    columns = [column for column in _COLUMNS[found["kind"]] if any(column[1](row) for row in found["rows"])]
    for heading, _ in columns:
        made.add_column(heading, justify="right")
    before = None
    for row in found["rows"]:
        case = f"{row['batch']} x {row['context_tokens']:,}"
        note = [] if row["note"] is None else [(f"\n  {row['note']}", "dim")]
        way = Text.assemble((row["way"], "bold"), *note)
        made.add_row("" if case == before else case, way, *(shown(row) for _, shown in columns))
        before = case
    return made


def _caption(found: dict[str, Any]) -> str:
    lines = [_RATIO.format(**ratio) for ratio in found.get("ratios", [])]
    lines += [_fidelity(row) for row in found.get("fidelity", [])]
    if "room_bytes" in found:
        lines.append(f"sequences that fit in {found['room_bytes'] / 2**30:g} GiB of cache")
    return "\n".join(lines)


_RATIO = "{batch} x {context_tokens:,}: hardkv / {hardkv_to} {median:.2f} x (turns {low:.2f}-{high:.2f})"


def _fidelity(row: dict[str, Any]) -> str:
    if row["kl"] is None:
        return f"{row['way']}: KL {row['note']}"
    return f"{row['way']}: KL {row['kl']:.4f} to its own full cache, same top token {row['top1_agreement']:.3f}"
