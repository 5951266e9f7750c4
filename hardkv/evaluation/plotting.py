"""A comparison as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardkv.errors import InputError

_SUFFIXES = (".png", ".svg", ".pdf")
_PANELS = (
    ("kl", 1.0, ".4f", "KL to the full cache, nats per token\n(log scale, lower is better)"),
    ("kv_bytes", 2.0**20, ".1f", "KV cache in use, MiB"),
    ("compression_ms", 1.0, ",.0f", "one compression pass, ms"),
)
_INCHES_PER_ROW = 0.27
_SPECIAL = ("default", "config")


def check_plot(path: Path) -> None:
    """Refuse, before any work, a picture that could not be drawn.

    Raises:
        InputError: matplotlib is not installed, or the name ends in no format that is written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib, which is not installed: pip install 'hardkv[plot]'")
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(f"--plot {path}: expected a name that ends in {', '.join(_SUFFIXES)}")


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw a `report`: one line per method that ran, coloured by budget; the others are named below.

    Raises:
        InputError: no method ran.
    """
    from matplotlib.figure import Figure

    rows = [row for row in found["rows"] if row["kl"] is not None][::-1]
    if not rows:
        raise InputError(f"{path}: nothing to draw, no method ran")
    figure = Figure(figsize=(11.5, 2.1 + _INCHES_PER_ROW * len(rows)), layout="constrained")
    axes = figure.subplots(1, len(_PANELS), sharey=True, width_ratios=(2.2, 1, 1))
    colours = _colours([row["components"]["budget"]["name"] for row in rows])
    axes[0].set_xscale("log")
    for panel, (key, unit, pattern, label) in zip(axes, _PANELS, strict=True):
        _panel(panel, [(row, row[key]) for row in rows], unit, pattern, colours)
        panel.set_xlabel(label)
    _plain_ticks(axes[0].xaxis)
    axes[0].set_yticks(range(len(rows)), [_label(row) for row in rows])
    axes[0].set_ylim(-0.7, len(rows) - 0.3)
    handles = [axes[0].plot([], [], "o", color=colour, label=budget)[0] for budget, colour in colours.items()]
    axes[0].legend(handles=handles, title="budget", loc="upper right", fontsize="small")
    figure.suptitle(_title(found), x=0.01, ha="left")
    figure.supxlabel(_footnote(found["rows"]), x=0.01, ha="left", fontsize="small", color="0.4", wrap=True)
    figure.savefig(path, dpi=150)


def _panel(
    panel: Any, measured: list[tuple[dict[str, Any], float | None]], unit: float, pattern: str, colours: dict[str, Any]
) -> None:
    """One mark per row at its number, with a line to it from the left edge."""
    values = [value / unit for _, value in measured if value]
    smallest = min(values, default=1.0)
    start = smallest / 1.5 if panel.get_xscale() == "log" else 0.0
    for line, (row, value) in enumerate(measured):
        if value is None:
            continue
        colour = colours[row["components"]["budget"]["name"]]
        shown = max(value / unit, smallest)  # a logarithmic scale has no zero
        panel.hlines(line, start, shown, color=colour, alpha=0.35, linewidth=1.5)
        panel.plot(shown, line, "D" if row["method"] in _SPECIAL else "o", color=colour)
        style = {"va": "center", "fontsize": "x-small", "color": "0.3"}
        panel.annotate(format(value / unit, pattern), (shown, line), (7, 0), textcoords="offset points", **style)
    panel.margins(x=0.2)
    panel.set_xlim(left=start)
    panel.grid(axis="x", which="major", alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _label(row: Mapping[str, Any]) -> str:
    parts = row["components"]
    if row["method"] in _SPECIAL:
        return f"{row['method']} ({parts['scorer']['name']}+{parts['budget']['name']})"
    return f"{row['method']} *" if row["note"] else str(row["method"])


def _footnote(rows: list[dict[str, Any]]) -> str:
    absent = [row["method"] for row in rows if row["kl"] is None]
    off = [f"{row['method']}: {row['note']}" for row in rows if row["kl"] is not None and row["note"]]
    lines = [f"* {'; '.join(off)}"] if off else []
    return "\n".join([*lines, *([f"not run: {', '.join(absent)}"] if absent else [])])


def _colours(budgets: list[str]) -> dict[str, Any]:
    from matplotlib import colormaps

    palette = colormaps["tab10"].colors  # type: ignore[attr-defined]  # of a listed colour map
    return {budget: palette[index % len(palette)] for index, budget in enumerate(sorted(set(budgets)))}


def _title(found: Mapping[str, Any]) -> str:
    texts, rounds = len(found["texts"]), found["rounds"]
    return (
        f"{found['model']}, mean budget {found['mean_budget']:,} tokens per head"
        f" ({texts} {'text' if texts == 1 else 'texts'} of {found['prompt_tokens']:,} + {found['fed_tokens']:,} tokens,"
        f" {'one compression' if rounds == 1 else f'{rounds} compressions'}, {found['dtype']})"
    )
