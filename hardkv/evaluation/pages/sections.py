"""What each kind of result shows; a kind that nobody wrote a section for is shown as the tables it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hardkv.evaluation.pages.charts import Bar, bars, lines
from hardkv.evaluation.pages.markup import facts, folded, join, named, paragraph, table, text

Found = Mapping[str, Any]
_HEAD = ("kind", "command", "complete", "machine", "versions", "peer_versions")
_LOWER_IS_BETTER = "lower is better"
_MOST_LINES = 13
"""Names that have room beside a chart."""
_MEASURES = ("kl", "accuracy", "tokens_per_s", "share_of_full_cache")
"""Columns that an unknown table is drawn by, the first that it has."""


def section(found: Found) -> str:
    """The body of one result: its charts and tables, then what it was made with."""
    write = _KINDS.get(str(found.get("kind")), _generic)
    return join([_notice(found), write(found), _made(found)])


def _notice(found: Found) -> str:
    return paragraph("Broken off before it was complete.") if found.get("complete") is False else ""


def _made(found: Found) -> str:
    """Command, machine, versions; the settings are folded."""
    versions = found.get("versions")
    peers = found.get("peer_versions") or {}
    top: dict[str, Any] = {"machine": found.get("machine")}
    top |= {"versions": _versions(versions)} if isinstance(versions, Mapping) else {}
    top |= {f"{name} ran with": _versions(used) for name, used in peers.items() if isinstance(used, Mapping)}
    command = f"<pre>{text(str(found['command']))}</pre>" if "command" in found else ""
    settings = {key: value for key, value in found.items() if key not in _HEAD and not _is_rows(value)}
    return join(
        [command, facts({key: value for key, value in top.items() if value}), folded("Settings", facts(settings))]
    )


def _versions(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{package} {version}" for package, version in found.items())


def _compare(found: Found) -> str:
    rows = [row for row in found["rows"] if row.get("kl") is not None]
    chart = bars(
        f"KL to the full cache, nats per token ({_LOWER_IS_BETTER})",
        [Bar(row["method"], row["kl"], 1 if row["method"] in ("default", "config") else 0) for row in rows],
        ".4f",
    )
    columns = ("method", "kl", "top1_agreement", "mean_tokens", "kv_bytes", "kv_bytes_share", "compression_ms", "note")
    return chart + table(found["rows"], columns)


def _fidelity(found: Found) -> str:
    rows = found["rows"]
    parts = []
    for rounds in dict.fromkeys(row["rounds"] for row in rows):
        parts.append(_frontier([row for row in rows if row["rounds"] == rounds and row.get("kl") is not None], rounds))
    columns = ("rounds", "mean_budget", "method", "kl", "kl_standard_error", "top1_agreement", "perplexity")
    layered = ("attention_mass_kept", "attention_output_error")
    rest = ("first_divergence_median", "same_tokens", "mean_tokens", "kv_bytes", "compressions", "note")
    means = [{**row, **{key: _mean(row.get(key)) for key in layered}} for row in rows]
    words = "Attention mass kept and output error are means over layers; the file has them layer by layer."
    return join([*parts, table(means, [*columns, *layered, *rest]), paragraph(words)])


def _frontier(rows: Sequence[Mapping[str, Any]], rounds: int) -> str:
    """KL over the mean budget, one line for each method; bars where lines would be points, or too many."""
    when = "one compression" if rounds == 1 else f"{rounds} rounds"
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault(row["method"], []).append((row["mean_budget"], row["kl"]))
    up = f"nats per token ({_LOWER_IS_BETTER})"
    if len(series) <= _MOST_LINES:
        chart = lines(f"KL over the mean budget, {when}", series, "mean tokens kept per head", up)
        if chart:
            return chart
    charts = []
    for budget in dict.fromkeys(row["mean_budget"] for row in rows):
        group = sorted((row for row in rows if row["mean_budget"] == budget), key=lambda row: float(row["kl"]))
        items = [Bar(row["method"], row["kl"], 1 if row["method"] == "default" else 0) for row in group]
        charts.append(bars(f"KL at {budget:,} tokens, {when}, {up}", items, ".4f"))
    return join(charts)


def _mean(values: Sequence[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def _decode(found: Found) -> str:
    parts = [_bars_of(found, "tokens_per_s", "tokens/s of the batch, compressions included (line: all turns)")]
    parts.append(_bars_of(found, "kv_bytes", "KV cache in use, MiB", 2.0**20))
    if found.get("ratios"):
        parts += ["<h3>hardkv to the others, turn by turn</h3>", table(found["ratios"])]
    if found.get("fidelity"):
        measured = [row for row in found["fidelity"] if row.get("kl") is not None]
        title = f"KL to its own full cache, nats per token ({_LOWER_IS_BETTER})"
        parts += ["<h3>Fidelity</h3>", bars(title, [Bar(row["way"], row["kl"]) for row in measured], ".4f")]
        parts.append(table(found["fidelity"]))
    return join([*parts, _measured(found)])


def _prefill(found: Found) -> str:
    chart = _bars_of(found, "first_token_seconds", f"time to the first token, s ({_LOWER_IS_BETTER}; line: all turns)")
    moment = _bars_of(found, "transient_bytes", "held for a moment, MiB", 2.0**20)
    return join([chart, moment, _by_context(found, "first_token_seconds", "s"), _measured(found)])


def _memory(found: Found) -> str:
    chart = _bars_of(found, "kv_bytes", "KV cache in use, MiB", 2.0**20)
    room = text(found.get("room_bytes"))
    fit = _bars_of(found, "sequences_in_room", f"sequences that fit in {room} bytes")
    return join([chart, fit, _by_context(found, "kv_bytes", "MiB", 2.0**20), _measured(found)])


def _measured(found: Found) -> str:
    first = ("way", "batch", "context_tokens", "note")
    rest = [key for key in found["rows"][0] if key not in first]
    return join(["<h3>Everything measured</h3>", table(found["rows"], [*first, *rest])])


def _bars_of(found: Found, key: str, title: str, unit: float = 1.0) -> str:
    ways = list(dict.fromkeys(row["way"] for row in found["rows"]))
    items = []
    for row in found["rows"]:
        if row.get(key) is not None:
            turns = [value / unit for value in row.get(f"{key}_turns", ())]
            low, high = (min(turns), max(turns)) if turns else (None, None)
            label = f"{row['way']}  {row['batch']} x {row['context_tokens']:,}"
            items.append(Bar(label, row[key] / unit, ways.index(row["way"]), low, high))
    return bars(title, items)


def _by_context(found: Found, key: str, up: str, unit: float = 1.0) -> str:
    """Lines over the context, of the largest batch."""
    batch = max(row["batch"] for row in found["rows"])
    series: dict[str, list[tuple[float, float]]] = {}
    for row in found["rows"]:
        if row["batch"] == batch and row.get(key) is not None:
            series.setdefault(row["way"], []).append((row["context_tokens"], row[key] / unit))
    return lines(f"{key.replace('_', ' ')}, batch {batch}", series, "tokens of context", up)


def _generic(found: Found) -> str:
    """Every list of records as a table, with a chart where it has a measure that is known."""
    parts = []
    for key, value in found.items():
        rows = _rows(value) if key not in _HEAD else []
        if rows:
            parts += [f"<h3>{named(key)}</h3>", _chart(rows), table(rows)]
    return join(parts)


def _chart(rows: Sequence[Mapping[str, Any]]) -> str:
    measure = next((name for name in _MEASURES if any(_number(row.get(name)) for row in rows)), None)
    if measure is None or len(rows) > 60:
        return ""
    labels = [key for key in rows[0] if isinstance(rows[0][key], str) and key != "note"][:2]
    return bars(
        f"{measure.replace('_', ' ')} ({_LOWER_IS_BETTER})" if measure == "kl" else measure.replace("_", " "),
        [Bar(" ".join(str(row.get(key)) for key in labels), row[measure]) for row in rows if _number(row.get(measure))],
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_rows(value: Any) -> bool:
    return bool(_rows(value))


def _rows(value: Any) -> list[Mapping[str, Any]]:
    """Records: a list of them, or a mapping from names to them."""
    if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
        return list(value)
    if isinstance(value, Mapping) and len(value) > 1 and all(isinstance(row, Mapping) for row in value.values()):
        keys = [set(row) for row in value.values()]
        if set.intersection(*keys):
            return [{"name": name, **row} for name, row in value.items()]
    return []


_KINDS: dict[str, Callable[[Found], str]] = {
    "compare": _compare,
    "fidelity": _fidelity,
    "decode": _decode,
    "prefill": _prefill,
    "memory": _memory,
}
