"""A measurement of speed or memory as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardkv.errors import InputError

Panel = tuple[str, float, str, str]
"""Key of a row, its unit, how a number is written, and the axis's name."""
PANELS: dict[str, tuple[Panel, ...]] = {
    "decode": (
        ("tokens_per_s", 1.0, ",.1f", "tokens/s of the batch\n(bar: median turn; line: slowest to fastest)"),
        ("kv_bytes", 2.0**20, ",.4g", "KV cache in use, MiB"),
        ("rss_peak_bytes", 2.0**20, ",.4g", "process at its highest, MiB"),
    ),
    "prefill": (
        ("first_token_seconds", 1.0, ",.2f", "time to the first token, s\n(bar: median turn; line: all turns)"),
        ("kv_bytes", 2.0**20, ",.4g", "KV cache after it, MiB"),
        ("transient_bytes", 2.0**20, ",.4g", "held for a moment, MiB"),
    ),
    "memory": (
        ("kv_bytes", 2.0**20, ",.4g", "KV cache in use, MiB"),
        ("rss_growth_bytes", 2.0**20, ",.4g", "growth of the process, MiB"),
        ("sequences_in_room", 1.0, ",.0f", "sequences that fit"),
    ),
}
_INCHES_PER_ROW = 0.32


def draw(found: Mapping[str, Any], path: Path) -> None:
    """One bar for each case and way that ran, coloured by way; the others are named below.

    Raises:
        InputError: no way ran.
    """
    from matplotlib.figure import Figure

    rows = [row for row in found["rows"] if row["note"] is None][::-1]
    if not rows:
        raise InputError(f"{path}: nothing to draw, no way ran")
    panels = PANELS[found["kind"]]
    figure = Figure(figsize=(12, 1.9 + _INCHES_PER_ROW * len(rows)), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, width_ratios=(1.7, 1, 1))
    colours = _colours([row["way"] for row in found["rows"]])
    for axis, panel in zip(axes, panels, strict=True):
        _bars(axis, panel, rows, colours)
    labels = [f"{row['way']}  {row['batch']} x {row['context_tokens']:,}" for row in rows]
    axes[0].set_yticks(range(len(rows)), labels)
    absent = dict.fromkeys(row["way"] for row in found["rows"] if row["note"] is not None)
    figure.suptitle(_title(found), x=0.01, ha="left")
    if absent:
        text = f"not run: {', '.join(absent)}"
        figure.supxlabel(text, x=0.01, ha="left", fontsize="small", color="0.4", wrap=True)
    figure.savefig(path, dpi=150)


def _bars(axis: Any, panel: Panel, rows: list[dict[str, Any]], colours: dict[str, Any]) -> None:
    key, unit, pattern, label = panel
    for line, row in enumerate(rows):
        if row[key] is None:
            continue
        value = row[key] / unit
        axis.barh(line, value, color=colours[row["way"]], height=0.7)
        turns = row.get(f"{key}_turns")
        end = value
        if turns:
            axis.hlines(line, min(turns) / unit, max(turns) / unit, color="0.2", linewidth=1.5)
            end = max(turns) / unit
        style = {"va": "center", "fontsize": "x-small", "color": "0.3"}
        axis.annotate(format(value, pattern), (end, line), (5, 0), textcoords="offset points", **style)
    axis.set_xlabel(label)
    axis.margins(x=0.2)
    axis.set_xlim(left=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.25)
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)


def _colours(ways: list[str]) -> dict[str, Any]:
    from matplotlib import colormaps

    palette = colormaps["tab10"].colors  # type: ignore[attr-defined]  # of a listed colour map
    return {way: palette[index % len(palette)] for index, way in enumerate(dict.fromkeys(ways))}


def _title(found: Mapping[str, Any]) -> str:
    return (
        f"hardkv bench {found['kind']}: {found['model']} in {found['dtype']} on {found['device']}, mean budget"
        f" {found['mean_budget']:,} tokens per head, interval {found['interval']}"
    )
