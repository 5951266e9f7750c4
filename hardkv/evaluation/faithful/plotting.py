"""The frontier as a picture: KL over the mean budget for each number of rounds, attention mass by layer below it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardkv.errors import InputError

# Colours that stay apart for the colour-blind (Okabe and Ito), without the yellow that is too light for a line.
_COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#6B6B6B")
_EMPHASIS = "#D55E00"
_MARKERS = "os^DvPX"
_DASHES = ("-", "--", ":", "-.")
_LEADER = {"arrowstyle": "-", "alpha": 0.4, "linewidth": 0.6, "relpos": (0.0, 0.5), "shrinkA": 1.0}
_INCHES_PER_LABEL, _INCHES_PER_PANEL, _LEAST_INCHES = 0.155, 5.2, 3.1
_LEAST_KL = 1e-6
"""A logarithmic scale has no zero."""


@dataclass(frozen=True)
class _Line:
    """One method in one panel."""

    name: str
    points: list[tuple[float, float]]


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw a result: one line for each method, labelled where it ends.

    Raises:
        InputError: no method ran, or the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = [row for row in found["rows"] if row.get("kl") is not None]
    if not rows:
        raise InputError(f"{path}: nothing to draw, no method ran")
    rounds = list(dict.fromkeys(row["rounds"] for row in rows))
    styles = _styles(list(dict.fromkeys(row["method"] for row in rows)))
    panels = [[_frontier(rows, number) for number in rounds]]
    layered = [_by_layer(rows, number, found["layers"]) for number in rounds]
    if any(layered):
        panels.append(layered)
    height = max(_LEAST_INCHES, _INCHES_PER_LABEL * len(styles) + 0.6)
    size = (_INCHES_PER_PANEL * len(rounds) + 0.4, (height + 0.5) * len(panels) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), len(rounds), squeeze=False, sharey="row")
    for line, (row_of_axes, row_of_panels) in enumerate(zip(axes, panels, strict=True)):
        _limits(row_of_axes, [one for lines in row_of_panels for one in lines], logarithmic=line == 0)
        for number, panel, lines in zip(rounds, row_of_axes, row_of_panels, strict=True):
            _draw_lines(panel, lines, styles, height)
            (_dress_frontier if line == 0 else _dress_layers)(panel, rows, number)
    axes[0][0].set_ylabel("KL to the full cache, nats per token\n(log scale, lower is better)")
    if len(panels) > 1:
        axes[1][0].set_ylabel("attention mass kept\n(share, higher is better)")
    texts = len(found["texts"])
    title = f"{found['model']}, {found['dtype']}, {texts} {'text' if texts == 1 else 'texts'}"
    figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise InputError(f"--plot {path}: cannot be written: {error.strerror}") from None


def _frontier(rows: Sequence[Mapping[str, Any]], rounds: int) -> list[_Line]:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["rounds"] == rounds:
            kept = row["mean_budget"] if row["mean_tokens"] is None else row["mean_tokens"]
            points.setdefault(row["method"], []).append((kept, max(row["kl"], _LEAST_KL)))
    return [_Line(name, sorted(line)) for name, line in points.items()]


def _by_layer(rows: Sequence[Mapping[str, Any]], rounds: int, layers: Sequence[int]) -> list[_Line]:
    """Of each method at the smallest budget, over the model's layers that are compressed."""
    mine = [row for row in rows if row["rounds"] == rounds and row.get("attention_mass_kept")]
    least = min((row["mean_budget"] for row in mine), default=0)
    return [
        _Line(row["method"], list(zip(layers, row["attention_mass_kept"], strict=True)))
        for row in mine
        if row["mean_budget"] == least
    ]


def _limits(axes: Sequence[Any], lines: Sequence[_Line], logarithmic: bool) -> None:
    values = [y for line in lines for _, y in line.points]
    low, high = min(values), max(values)
    if logarithmic:
        for panel in axes:
            panel.set_xscale("log")
            panel.set_yscale("log")
        room = 1.12 * max(high / low, 1.2) ** 0.05
        axes[0].set_ylim(low / room, high * room)
    else:
        room = max(0.05 * (high - low), 0.005)
        axes[0].set_ylim(low - room, high + room)


def _draw_lines(panel: Any, lines: Sequence[_Line], styles: Mapping[str, dict[str, Any]], height: float) -> None:
    for line in lines:
        xs, ys = zip(*line.points, strict=True)
        marker = {"markersize": 3.5} if len(xs) < 12 else {"marker": None}
        panel.plot(xs, ys, **{**styles[line.name], **marker})
    ends = {line.name: _share(panel, line.points[-1][1]) for line in lines}
    for name, place in _apart(ends, _INCHES_PER_LABEL / height).items():
        panel.annotate(
            name,
            next(line.points[-1] for line in lines if line.name == name),
            (1.06, place),
            textcoords="axes fraction",
            va="center",
            fontsize="x-small",
            fontweight="bold" if styles[name]["color"] == _EMPHASIS else "normal",
            color=styles[name]["color"],
            arrowprops={**_LEADER, "color": styles[name]["color"]},
            annotation_clip=False,
        )
    panel.grid(which="major", alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _share(panel: Any, value: float) -> float:
    """Where on the axis a value lies, 0 at the bottom and 1 at the top."""
    low, high = panel.get_ylim()
    if panel.get_yscale() == "log":
        low, high, value = math.log(low), math.log(high), math.log(value)
    return float((value - low) / (high - low))


def _apart(places: Mapping[str, float], gap: float) -> dict[str, float]:
    """Move labels so that none is nearer than `gap` to the next, in their order, and as a whole as little as can be."""
    order = sorted(places, key=lambda name: places[name])
    moved: list[float] = []
    for name in order:
        moved.append(max(places[name], moved[-1] + gap) if moved else places[name])
    drift = sum(after - places[name] for after, name in zip(moved, order, strict=True)) / len(order)
    shift = min(drift, moved[0])
    over = max(0.0, moved[-1] - shift - 1.0)
    return {name: after - shift - over for name, after in zip(order, moved, strict=True)}


def _dress_frontier(panel: Any, rows: Sequence[Mapping[str, Any]], rounds: int) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    budgets = sorted({row["mean_budget"] for row in rows})
    panel.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlim(budgets[0] / 1.12, budgets[-1] * 1.12)
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("mean tokens kept per head (log scale)")
    panel.set_title(_title(rows, rounds), fontsize="small", loc="left")


def _dress_layers(panel: Any, rows: Sequence[Mapping[str, Any]], rounds: int) -> None:
    least = min(row["mean_budget"] for row in rows if row["rounds"] == rounds)
    panel.set_xlabel("layer")
    panel.set_title(f"at {least:,} tokens", fontsize="small", loc="left")


def _title(rows: Sequence[Mapping[str, Any]], rounds: int) -> str:
    row = next(row for row in rows if row["rounds"] == rounds)
    when = "compressed once" if rounds == 1 else f"{rounds} rounds"
    return f"{row['prompt_tokens']:,} tokens + {row['fed_tokens']:,} fed, {when}"


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    styles: dict[str, dict[str, Any]] = {}
    for name in names:
        if name == "default":
            styles[name] = {"color": _EMPHASIS, "linewidth": 2.6, "marker": "o", "zorder": 3}
            continue
        number = len(styles) - ("default" in styles)
        dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
        styles[name] = {"color": colour, "linewidth": 1.2, "marker": marker, "linestyle": dash}
    return styles
