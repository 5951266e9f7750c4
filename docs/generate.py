"""Writes the parts of the documentation that code knows better: settings, their bounds and reasons, the methods.

mkdocs calls `on_page_markdown` for each page; a line `<!-- generated: WHAT -->` is replaced by what `WHAT` gives.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from hardkv.config import HardKVConfig, default_yaml
from hardkv.registry import Registered, load_registry

_MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_KINDS = {
    "boolean": "`true`, `false`",
    "integer": "whole number",
    "null": "`null`",
    "string": "text",
}
_BOUNDS = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "exclusiveMaximum": "below {}"}


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill in the generated parts of one page."""
    return _MARK.sub(lambda mark: PARTS[mark[1]](), markdown)


def _default_yaml() -> str:
    return f"```yaml\n{default_yaml(load_registry())}```"


def _settings() -> str:
    parts = []
    plain: list[str] = []
    for key, field in HardKVConfig.model_fields.items():
        value = field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel) and key in ("model", "cache", "generation"):
            parts.append(f"### `{key}`\n\n{field.description}\n\n{_options_table(type(value), f'{key}.')}")
        else:
            plain.append(key)
    return "\n\n".join(["### Top level", _options_table(HardKVConfig, "", plain), *parts])


def _catalogue(slot: str) -> Callable[[], str]:
    def write() -> str:
        entries = [entry for entry in load_registry().all() if entry.slot == slot and entry.plugin == "builtin"]
        return "\n\n".join(_method(entry) for entry in entries)

    return write


def _method(entry: Registered) -> str:
    text = inspect.cleandoc(entry.component.__doc__ or entry.summary)
    parts = [f"### `{entry.name}` {{ #{entry.slot}-{entry.name} }}", text]
    if entry.component.Config.model_fields:
        parts.append(_options_table(entry.component.Config, f"{entry.slot}."))
    return "\n\n".join(parts)


def _options_table(model: type[BaseModel], prefix: str, keys: list[str] | None = None) -> str:
    properties = model.model_json_schema()["properties"]
    lines = ["| key | default | allowed | what and why |", "|---|---|---|---|"]
    for key, field in model.model_fields.items():
        if keys is not None and key not in keys:
            continue
        default = "required" if field.is_required() else f"`{_shown(field.get_default(call_default_factory=True))}`"
        cells = [f"`{prefix}{key}`", default, _allowed(properties[key]), field.description or ""]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump()
        return "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return json.dumps(value).strip('"')


def _allowed(schema: dict[str, Any]) -> str:
    """Say in words what a property's JSON Schema lets through."""
    if "anyOf" in schema:
        return " or ".join(_allowed(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema or "allOf" in schema:
        return "a component: its name and options"
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return "list of " + _allowed(schema.get("items", {}))
    bounds = [words.format(schema[key]) for key, words in _BOUNDS.items() if key in schema]
    return " ".join([_KINDS.get(kind, kind), *bounds])


PARTS: dict[str, Callable[[], str]] = {
    "default_yaml": _default_yaml,
    "settings": _settings,
    **{f"{slot}s": _catalogue(slot) for slot in ("scorer", "calibrator", "budget", "regularizer", "condenser")},
}
