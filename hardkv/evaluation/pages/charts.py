"""Charts as inline SVG: they scale, need no script, and take their colours from the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, _LABELS, _RIGHT, _ROW, _TOP = 760, 240, 110, 24, 30
_PLOT_HEIGHT, _LEFT = 260, 70
COLOURS = 8
"""Classes `c0` to `c7` of the page's style."""


@dataclass(frozen=True)
class Bar:
    """One bar; `low` and `high` are drawn as a line over it."""

    label: str
    value: float
    colour: int = 0
    low: float | None = None
    high: float | None = None


def bars(title: str, items: Sequence[Bar], pattern: str = ",.4g") -> str:
    """Horizontal bars from zero; nothing for no items."""
    if not items:
        return ""
    most = max(max(item.value, item.high or 0.0) for item in items) or 1.0
    room = WIDTH - _LABELS - _RIGHT
    lines = []
    for number, item in enumerate(items):
        top, wide = _TOP + number * _ROW, max(0.0, item.value) / most * room
        lines.append(f'<text x="{_LABELS - 8}" y="{top + 15}" text-anchor="end">{escape(item.label)}</text>')
        rect = f'x="{_LABELS}" y="{top + 3}" width="{wide:.1f}" height="{_ROW - 7}"'
        lines.append(f'<rect class="c{item.colour % COLOURS}" {rect}/>')
        end = wide
        if item.low is not None and item.high is not None:
            start, end = (value / most * room for value in (item.low, item.high))
            at = f'x1="{_LABELS + start:.1f}" x2="{_LABELS + end:.1f}" y1="{top + 11}" y2="{top + 11}"'
            lines.append(f'<line class="range" {at}/>')
        shown = escape(format(item.value, pattern))
        lines.append(f'<text class="value" x="{_LABELS + max(wide, end) + 6:.1f}" y="{top + 15}">{shown}</text>')
    return _svg(title, lines, _TOP + len(items) * _ROW + 6)


def lines(title: str, series: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str) -> str:
    """Lines over a logarithmic axis of tokens, from zero up; nothing where no series has two points."""
    points = [point for line in series.values() for point in line]
    xs, most = sorted({x for x, _ in points}), max((y for _, y in points), default=0.0) or 1.0
    if len(xs) < 2:
        return ""
    low, span = math.log(xs[0]), math.log(xs[-1]) - math.log(xs[0])
    wide, bottom = WIDTH - _LEFT - 190, _TOP + _PLOT_HEIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (math.log(x) - low) / span * wide, bottom - y / most * _PLOT_HEIGHT

    drawn = []
    for step in range(5):
        value = most * step / 4
        _, y = place(xs[0], value)
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text class="value" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,.3g}</text>')
    for tick in xs:
        x, _ = place(tick, 0)
        drawn.append(f'<text class="value" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:,.0f}</text>')
    for number, (name, line) in enumerate(series.items()):
        colour = number % COLOURS
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in sorted(line)))
        drawn.append(f'<polyline class="s{colour}" points="{path}"/>')
        key = _TOP + 14 + number * 20
        drawn.append(f'<rect class="c{colour}" x="{_LEFT + wide + 16}" y="{key - 9}" width="10" height="10"/>')
        drawn.append(f'<text x="{_LEFT + wide + 32}" y="{key}">{escape(name)}</text>')
    drawn.append(f'<text class="value" x="{_LEFT + wide / 2}" y="{bottom + 38}" text-anchor="middle">')
    drawn.append(f"{escape(across)}</text>")
    return _svg(f"{title}, {up}", drawn, bottom + 46)


def _svg(title: str, inner: Sequence[str], height: float) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
    return f'<figure>{head}<text class="title" x="8" y="18">{escape(title)}</text>{"".join(inner)}</svg></figure>'
