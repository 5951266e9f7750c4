"""A trace for the terminal: summary, heat map, occupancy, and what single heads keep; readable without colours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hardkv.evaluation.inspection.binning import Shares, marked, shares
from hardkv.evaluation.inspection.trace import Trace

_SHADES = "·░▒▓█"
_BARS = "▁▂▃▄▅▆▇█"
_MOST_ROWS = 24
_NUMBERED_CELL = 9
_TIERS = (
    ("dense", "dense_slots"),
    ("sparse", "sparse_shown_slots"),
    ("masked", "sparse_masked_slots"),
    ("condensed", "condensed_slots"),
)


def summary(trace: Trace) -> dict[str, str]:
    """Names and values of the whole run."""
    last, ranked = trace.passes[-1], trace.ranked_heads
    lean, greedy = ranked[0], ranked[-1]
    end, held = trace.steps[-1], _mean_masked(trace)
    mean, selections = trace.mean_kept(), sum(each.selected for each in trace.passes)
    found = {
        "model": f"{trace.model} in {trace.dtype}",
        "tokens": f"{trace.prompt_tokens:,} of prompt, {len(trace.tokens) - trace.prompt_tokens:,} generated",
        "passes": f"{len(trace.passes)}, the prompt's included; {selections} selected, the others kept everything",
        "mean kept": f"{mean:,.1f} tokens per head after the last pass, density {mean / last.tokens_seen:.3f}",
        "leanest head": _head(lean),
        "greediest head": _head(greedy),
        "held, masked": f"{held:,.1f} tokens per head after the last pass, which a later one may show again",
        "KV cache": f"{end.kv_bytes / 2**20:,.2f} MiB at the end, {end.pages:,} pages of {trace.page_slots} slots",
    }
    sliding = len(trace.windows) - len(trace.full_layers)
    if sliding:
        found["sliding layers"] = f"{sliding} of {len(trace.windows)}: their window stays, nothing is selected there"
    return found


def heat_map(trace: Trace, width: int) -> RenderableType:
    """Tokens kept after the last pass, a row for each layer and a column for each KV head, on a logarithmic scale."""
    last = trace.passes[-1]
    counts = np.array(last.kept, dtype=float)
    edges = np.geomspace(max(counts.min(), 1.0), max(counts.max(), 2.0), len(_SHADES) + 1)
    numbers = width >= 8 + _NUMBERED_CELL * trace.heads
    lines = [Text("Tokens kept per layer and KV head after the last pass", style="bold")]
    step = _NUMBERED_CELL if numbers else 2
    lines.append(Text("layer".ljust(8) + "".join(str(head).ljust(step) for head in _labels(trace.heads, numbers))))
    rows = iter(last.kept)
    for layer, window in enumerate(trace.windows):
        if window is not None:
            lines.append(Text(f"{layer:>5}   sliding window of {window:,}", style="dim"))
            continue
        cells = "".join(_cell(count, edges, numbers) for count in next(rows))
        lines.append(Text(f"{layer:>5}   {cells.rstrip()}"))
    bounds = [f"{mark}{mark} {edges[i]:,.0f}-{edges[i + 1]:,.0f}" for i, mark in enumerate(_SHADES)]
    lines.append(Text("scale   " + "   ".join(bounds)))
    return Group(*lines)


def occupancy(trace: Trace, width: int) -> RenderableType:
    """How full each tier is over the decode steps, as the mean per compressed head, and the bytes."""
    cells = len(trace.full_layers) * trace.heads
    columns = max(10, min(width - 44, len(trace.steps)))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title_style="bold")
    table.title = f"Slots per head over {trace.steps[-1].step:,} decode steps"
    for heading in ("tier", "over time", "least", "most", "end"):
        table.add_column(heading, justify="left" if heading in ("tier", "over time") else "right", no_wrap=True)
    for name, field in _TIERS:
        values = [getattr(step, field) / cells for step in trace.steps]
        if max(values):
            table.add_row(name, _sparkline(values, columns), *(f"{value:,.1f}" for value in _range(values)))
    mebibytes = [step.kv_bytes / 2**20 for step in trace.steps]
    table.add_row("KV MiB", _sparkline(mebibytes, columns), *(f"{value:,.2f}" for value in _range(mebibytes)))
    return table


def strip_chart(trace: Trace, layer: int, head: int, width: int) -> RenderableType:
    """What one head keeps: positions from left to right, a row for each pass, shaded by the share that is kept.

    Raises:
        InputError: as in `Trace.numbered`.
    """
    index = trace.numbered(layer, head)
    total = trace.passes[-1].tokens_seen
    bins = min(max(width - 24, 10), total)
    lines = [Text(f"Layer {layer}, KV head {head}: positions 0 to {total - 1:,}, pass by pass", style="bold")]
    lines.append(Text("seen".rjust(7) + "kept".rjust(7)))
    for number in _chosen(len(trace.passes)):
        each = trace.passes[number]
        kept = shares(marked(each.shown[index][head], total), bins)
        seen = shares(np.arange(total) < each.tokens_seen, bins)
        row = Text(f"{each.tokens_seen:>7,}{each.kept[index][head]:>7,}  ")
        row.append("".join(_shade(share / part) if part else " " for share, part in zip(kept, seen, strict=True)))
        lines.append(row)
    lines.append(Text(" " * 16 + _ruler(trace, total, bins), style="dim"))
    lines.append(Text("share kept   · none   ░ to a quarter   ▒ to a half   ▓ to three quarters   █ above   ", end=""))
    lines.append(Text(f"S {trace.sinks} sinks   W the newest {trace.local_window}, after the last pass"))
    if len(trace.passes) > _MOST_ROWS:
        lines.append(Text(f"{_MOST_ROWS} of {len(trace.passes)} passes are shown", style="dim"))
    return Group(*lines)


def _head(ranked: tuple[int, int, int]) -> str:
    count, layer, head = ranked
    return f"layer {layer}, KV head {head}: {count:,} tokens"


def _mean_masked(trace: Trace) -> float:
    ranges = [each for layer in trace.passes[-1].masked for each in layer]
    return sum(sum(each[1::2]) - sum(each[::2]) for each in ranges) / len(ranges)


def _labels(heads: int, numbers: bool) -> list[str]:
    return [str(head) if numbers or head % 5 == 0 else "" for head in range(heads)]


def _cell(count: int, edges: Shares, numbers: bool) -> str:
    level = int(np.clip(np.searchsorted(edges, count, side="right") - 1, 0, len(_SHADES) - 1))
    block = _SHADES[level] * 2
    return f"{block} {count:<{_NUMBERED_CELL - 3},}" if numbers else block


def _shade(share: float) -> str:
    return _SHADES[int(np.ceil(share * (len(_SHADES) - 1)))]


def _sparkline(values: Sequence[float], columns: int) -> str:
    """The mean of each part, from the least to the most."""
    parts = [float(part.mean()) for part in np.array_split(np.array(values), min(columns, len(values)))]
    low, high = min(parts), max(parts)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((part - low) * scale)] for part in parts)


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), max(values), values[-1]


def _chosen(passes: int) -> list[int]:
    """Passes to show, the first and the last among them."""
    return sorted({round(number) for number in np.linspace(0, passes - 1, min(passes, _MOST_ROWS))})


def _ruler(trace: Trace, total: int, bins: int) -> str:
    column = np.arange(total)
    sinks = shares(column < trace.sinks, bins) > 0
    window = shares(column >= total - trace.local_window, bins) > 0
    return "".join("S" if sink else "W" if newest else " " for sink, newest in zip(sinks, window, strict=True))
