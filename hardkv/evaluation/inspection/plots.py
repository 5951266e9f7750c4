"""A trace as a picture: budgets, occupancy, and what a few heads keep over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hardkv.evaluation.inspection.binning import marked, shares
from hardkv.evaluation.inspection.trace import Trace

_COLUMNS = 900
_TIERS = (
    ("dense_slots", "dense", "#4c78a8"),
    ("sparse_shown_slots", "sparse", "#72b7b2"),
    ("sparse_masked_slots", "sparse, masked", "#e4c979"),
    ("condensed_slots", "condensed", "#b279a2"),
)
_KEPT, _MASKED, _DROPPED = ((0.16, 0.35, 0.62), (0.90, 0.72, 0.30), (0.85, 0.85, 0.87))


def draw(trace: Trace, path: Path, heads: Sequence[tuple[int, int]] = ()) -> None:
    """Draw a trace; `heads` are `(model layer, KV head)`, default: the greediest, the leanest, two in between.

    Raises:
        InputError: as in `Trace.numbered`.
    """
    from matplotlib.figure import Figure

    chosen = list(heads) or _typical(trace)
    rows = max(len(trace.windows) * 0.16, 3.0)
    figure = Figure(figsize=(12.5, rows + 1.5 + 1.15 * len(chosen)), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(rows + 1.0, 1.15 * len(chosen) + 0.5))
    upper, lower = parts
    budgets, spread, filling = upper.subplots(1, 3, width_ratios=(1.1, 0.8, 2.4))
    _heat_map(upper, budgets, trace)
    _per_layer(spread, trace)
    _occupancy(filling, trace)
    panels = lower.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (layer, head) in zip(panels, chosen, strict=True):
        _strip(panel, trace, layer, head)
    panels[-1].set_xlabel("position")
    _legend(lower)
    figure.suptitle(_title(trace), x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _typical(trace: Trace) -> list[tuple[int, int]]:
    ranked = trace.ranked_heads[::-1]
    places = dict.fromkeys(round(place) for place in np.linspace(0, len(ranked) - 1, min(4, len(ranked))))
    return [ranked[place][1:] for place in places]


def _heat_map(figure: Any, panel: Any, trace: Trace) -> None:
    """Layers from top to bottom, KV heads from left to right; sliding layers stay grey."""
    from matplotlib.colors import LogNorm

    counts = np.full((len(trace.windows), trace.heads), np.nan)
    counts[trace.full_layers] = trace.passes[-1].kept
    low, high = max(float(np.nanmin(counts)), 1.0), float(np.nanmax(counts))
    panel.set_facecolor("0.85")
    image = panel.imshow(counts, aspect="auto", cmap="viridis", norm=LogNorm(low, max(high, low + 1)))
    bar = figure.colorbar(image, ax=panel, label="tokens kept (log scale)")
    bar.minorticks_off()
    ticks = [round(tick) for tick in np.geomspace(low, max(high, low + 1), 5)]
    bar.set_ticks(ticks, labels=[f"{tick:,}" for tick in ticks])
    panel.set(title="after the last pass", xlabel="KV head", ylabel="layer")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.yaxis.get_major_locator().set_params(integer=True)


def _per_layer(panel: Any, trace: Trace) -> None:
    """From the leanest head of each layer to the greediest, with their mean."""
    layers, counts = np.array(trace.full_layers), np.array(trace.passes[-1].kept)
    panel.hlines(layers, counts.min(1), counts.max(1), color="#4c78a8", alpha=0.4, linewidth=3)
    panel.plot(counts.mean(1), layers, "o", color="#4c78a8", markersize=3)
    panel.axvline(counts.mean(), color="0.4", linewidth=0.8, linestyle="--")
    panel.set_ylim(len(trace.windows) - 0.5, -0.5)
    panel.set(title="leanest, mean, greediest", xlabel="tokens kept (log scale)", xscale="log")
    _plain_ticks(panel.xaxis)
    panel.yaxis.get_major_locator().set_params(integer=True)
    panel.spines[["top", "right"]].set_visible(False)


def _plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _occupancy(panel: Any, trace: Trace) -> None:
    """Slots per head of each tier, stacked, over the decode steps; dashed: every token kept."""
    cells = len(trace.full_layers) * trace.heads
    steps = [step.step for step in trace.steps]
    parts = [[getattr(step, field) / cells for step in trace.steps] for field, _, _ in _TIERS]
    present = [index for index, part in enumerate(parts) if max(part)]
    panel.stackplot(
        steps,
        *(parts[index] for index in present),
        labels=[_TIERS[index][1] for index in present],
        colors=[_TIERS[index][2] for index in present],
    )
    top = max(sum(column) for column in zip(*parts, strict=True))
    kept = trace.steps[-1].kv_bytes / 2**20
    seen = trace.steps[-1].tokens_seen
    panel.set_title(f"slots per head; at the end {seen:,} tokens seen, KV cache {kept:,.1f} MiB")
    panel.set(xlabel="decode step", ylabel="mean slots per head", xlim=(0, max(steps[-1], 1)), ylim=(0, 1.25 * top))
    panel.legend(loc="upper left", ncols=len(present), fontsize="small", frameon=False)
    panel.spines[["top", "right"]].set_visible(False)


def _strip(panel: Any, trace: Trace, layer: int, head: int) -> None:
    """One row per pass: kept, masked and dropped positions; what was not seen yet stays white."""
    index, total = trace.numbered(layer, head), trace.passes[-1].tokens_seen
    image = np.stack([_row(trace, number, index, head, total) for number in range(len(trace.passes))])
    panel.imshow(image, aspect="auto", interpolation="nearest", extent=(0, total, len(image) - 0.5, -0.5))
    kept = trace.passes[-1].kept[index][head]
    panel.set_title(f"layer {layer}, KV head {head}: {kept:,} tokens kept at the end", loc="left", fontsize="medium")
    panel.set_ylabel("pass")
    panel.yaxis.get_major_locator().set_params(integer=True)


def _row(trace: Trace, number: int, index: int, head: int, total: int) -> npt.NDArray[np.float64]:
    each = trace.passes[number]
    parts = (
        (_KEPT, marked(each.shown[index][head], total)),
        (_MASKED, marked(each.masked[index][head], total)),
        (_DROPPED, np.arange(total) < each.tokens_seen),
    )
    row = np.ones((min(_COLUMNS, total), 3))
    for colour, marks in reversed(parts):
        share = shares(marks, _COLUMNS)[:, None]
        row = row * (1 - share) + np.array(colour) * share
    return row


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    named = ((_KEPT, "kept"), (_MASKED, "held, masked"), (_DROPPED, "dropped"))
    handles = [Patch(color=colour, label=label) for colour, label in named]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, fontsize="small", frameon=False)


def _title(trace: Trace) -> str:
    mean = trace.mean_kept()
    return (
        f"{trace.model} in {trace.dtype}: {trace.prompt_tokens:,} prompt tokens,"
        f" {len(trace.tokens) - trace.prompt_tokens:,} generated; {mean:,.0f} kept per head,"
        f" density {mean / trace.passes[-1].tokens_seen:.3f}"
    )
