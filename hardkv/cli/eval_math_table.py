"""The table of `hardkv eval math`."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from hardkv.cli.session import readable_bytes


def math_table(found: dict[str, Any]) -> Table:
    """Give the figures of each cache, side by side."""
    caches = found["caches"]
    first = next(iter(found["settings"].values()))
    generation, model = first["generation"], first["model"]
    title = (
        f"{model['id']} in {model['dtype']} on {found['data']}: {len(found['problems'])}"
        f" {'problem' if len(found['problems']) == 1 else 'problems'},"
        f" {found['samples_per_problem']} answers each, temperature {generation['temperature']}, up to"
        f" {generation['max_new_tokens']:,} tokens"
    )
    table = Table(
        title=title,
        caption=_caption(found),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("")
    for cache in caches:
        table.add_column(f"{cache} cache", justify="right")
    rows = [_figures(summary, found["samples_per_problem"]) for summary in caches.values()]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    return table


def _figures(summary: dict[str, Any], samples: int) -> dict[str, str]:
    figures = {
        "answers": f"{summary['samples']} to {summary['problems']} problems",
        "accuracy": _with_error(summary["accuracy"], summary["accuracy_error"]),
    }
    if samples > 1:
        figures[f"pass@{samples}"] = _shown(summary[f"pass_at_{samples}"], ".1%")
    for name, key in (("all", "answer_tokens"), ("right ones", "correct_tokens")):
        lengths = summary[key]
        figures[f"tokens, {name}"] = (
            f"{_shown(lengths['mean'], ',.1f')} mean, {_shown(lengths['median'], ',.0f')} median"
        )
    peak = summary["kv_bytes_peak"]
    return {
        **figures,
        "cut off at the limit": _shown(summary["truncated"], ".1%"),
        "without an answer": _shown(summary["unanswered"], ".1%"),
        "could not be scored": str(len(summary["scoring_failures"])),
        "mean budget": _shown(summary["mean_budget"], ",.1f"),
        "tokens kept at the end": _shown(summary["tokens_kept_share"], ".1%"),
        "KV bytes, peak": "-" if peak is None else readable_bytes(peak),
        "tokens/s": _shown(summary["tokens_per_second"], ",.1f"),
    }


def _caption(found: dict[str, Any]) -> str:
    difference = found["difference"]
    lines = []
    if difference is not None and difference["pairs"]:
        lines.append(
            f"Difference in accuracy, compressed less full, over {difference['pairs']} pairs:"
            f" {_with_error(difference['accuracy'], difference['accuracy_error'], '+.1%')}."
        )
    compressed = found["caches"].get("compressed")
    if compressed is not None and compressed["samples"] and compressed["mean_budget"] is None:
        lines.append("Nothing was compressed: no answer grew beyond the budget; lower --mean-tokens.")
    if not found["complete"]:
        lines.append("Not all answers are there; the same command goes on.")
    lines.append(
        "±: standard error over problems. Everything but 'right ones' is over all answers. Mean budget: tokens per head"
        " after a compression. KV bytes: of all sequences at the same time."
    )
    return "\n".join(lines)


def _with_error(value: float | None, error: float | None, pattern: str = ".1%") -> str:
    return _shown(value, pattern) + ("" if error is None else f" ± {error:.1%}")


def _shown(value: float | None, pattern: str) -> str:
    return "-" if value is None else format(value, pattern)
