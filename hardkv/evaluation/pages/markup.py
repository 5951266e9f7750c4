"""Small pieces of HTML. Every text that comes from outside goes through `text`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_LONG_ROWS = 40
_LONG_TEXT = 160
_LONG_CELL = 40


def text(value: Any) -> str:
    """A value as HTML text: numbers short, nothing for None, structures as JSON."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, list) and all(isinstance(one, int | float) for one in value):
        return ", ".join(text(one) for one in value)
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(shown) > _LONG_TEXT and not isinstance(value, str):
        return f"<details><summary>{escape(shown[:60])} ...</summary><code>{escape(shown)}</code></details>"
    return escape(shown)


def named(key: str) -> str:
    """A key as a heading: `kv_bytes` is `kv bytes`."""
    return escape(key.replace("_", " "))


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """A table of rows; all keys that any row has a value for, or `columns`. A long one is folded."""
    keys = list(dict.fromkeys(key for row in rows for key in row)) if columns is None else list(columns)
    keys = [key for key in keys if any(row.get(key) not in (None, [], {}) for row in rows)]
    head = "".join(f"<th>{named(key)}</th>" for key in keys)
    body = "".join("<tr>" + "".join(_cell(row.get(key)) for key in keys) + "</tr>" for row in rows)
    made = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return folded(f"{len(rows)} rows", made) if len(rows) > _LONG_ROWS else made


def facts(values: Mapping[str, Any]) -> str:
    """Names and values, one below the other."""
    lines = "".join(f"<dt>{named(key)}</dt><dd>{text(value)}</dd>" for key, value in values.items())
    return f"<dl>{lines}</dl>"


def folded(summary: str, inner: str) -> str:
    """Something that is shown when it is asked for."""
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>"


def paragraph(words: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(words)}</p>"


def join(parts: Iterable[str]) -> str:
    """Parts below each other; empty ones vanish."""
    return "\n".join(part for part in parts if part)


def _cell(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    kind = "number" if number else "long" if isinstance(value, str) and len(value) > _LONG_CELL else ""
    return f'<td class="{kind}">{text(value)}</td>' if kind else f"<td>{text(value)}</td>"
