"""Pydantic's complaints as one line each: path, what is allowed, what came."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from hardkv.errors import did_you_mean
from hardkv.interfaces import Component

_LONGEST_VALUE = 60


def shown(value: Any) -> str:
    """Give `value` as Python would write it, cut to a length that fits a message."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def source_file(component: type) -> str | None:
    """Give the file of a plugin's class; None for one of hardkv's own."""
    module = component.__module__
    return None if module.startswith("hardkv.") else getattr(sys.modules.get(module), "__file__", None)


def named(kind: str, component: Component) -> str:
    """Speak of a component as `scorer 'recency' (/plugins/recency.py)`."""
    file = source_file(type(component))
    return f"{kind} '{component.name}'" if file is None else f"{kind} '{component.name}' ({file})"


def repair(component: Component, error: BaseException) -> str:
    """Say which line of a plugin's file an error came through, as an ending of a sentence; empty for hardkv's own."""
    file = source_file(type(component))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if file is None:
        return ""
    return f"; repair line {lines[-1]} of {file}" if lines else f"; repair {file}"


def joined(path: Sequence[str | int]) -> str:
    """Give a config path such as `generation.stop[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def faults(error: ValidationError, root: type[BaseModel]) -> list[tuple[str, str]]:
    """Give `(path, sentence)` for every fault of `error`, raised by `root`; the sentence starts with the path."""
    found = []
    for item in error.errors(include_url=False):
        path = item["loc"]
        if item["type"] in ("extra_forbidden", "invalid_key"):
            path = (*path[:-1], str(path[-1]))
            sentence = _unknown_key(path, root, item["input"])
        elif item["type"] == "missing":
            sentence = f"{joined(path)}: missing; it has no default"
        elif item["type"] == "value_error":
            # our own validators and those of plugins write whole sentences
            sentence = str(item["ctx"]["error"])
            if path and not sentence.startswith(f"{joined(path)}."):
                sentence = f"{joined(path)}: {sentence}"
        elif item["type"] == "model_type":
            sentence = _no_mapping(path, root, item["input"])
        else:
            allowed = item["msg"].replace("valid tuple", "list")
            sentence = f"{joined(path)}: {allowed} (got {shown(item['input'])})"
            if item["type"] == "literal_error":
                choices = re.findall(r"'([^']*)'", item["ctx"]["expected"])
                hint = did_you_mean(str(item["input"]), choices)
                sentence += f".{hint}" if hint else ""
        found.append((joined(path), sentence))
    return found


def _unknown_key(path: Sequence[str | int], root: type[BaseModel], value: Any) -> str:
    key = str(path[-1])
    known = list(_model_at(root, path[:-1]).model_fields)
    sections = [name for name in root.model_fields if key in _model_at(root, [name]).model_fields and name != path[0]]
    hint = f" '{key}' belongs under '{sections[0]}'." if sections else did_you_mean(key, known)
    allowed = f"Known: {', '.join(known)}" if known else "It has no options"
    return f"{joined(path)}: unknown key (got {shown(value)}).{hint} {allowed}"


def _no_mapping(path: Sequence[str | int], root: type[BaseModel], value: Any) -> str:
    known = list(_model_at(root, path).model_fields)
    hint = f"; write `{joined(path)}: {{name: {value}}}`" if known == ["name"] and isinstance(value, str) else ""
    return f"{joined(path)}: expected a mapping with keys such as {', '.join(known)} (got {shown(value)}){hint}"


def _model_at(root: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel]:
    model = root
    for part in path:
        field = model.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return BaseModel
        model = annotation
    return model
