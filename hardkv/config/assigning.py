"""A configuration file with single keys changed on top, as `--set cache.sinks=8` and model arguments do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hardkv.config.loading import LoadedConfig, load_config
from hardkv.config.presets import with_preset
from hardkv.config.reading import read_yaml
from hardkv.config.resolving import resolve
from hardkv.config.settings import ComponentSpec, HardKVConfig
from hardkv.errors import ConfigError
from hardkv.faults import faults
from hardkv.registry import load_registry

Assignment = tuple[str, Any]


def read_value(text: str) -> Any:
    """Read a value as it would stand in a YAML file.

    Raises:
        yaml.YAMLError: it is none.
    """
    try:
        # JSON first: `1e-5` is a number there and in YAML 1.2, but not to this YAML reader.
        return json.loads(text)
    except ValueError:
        return yaml.safe_load(text)


def load_assigned(file: Path | None, assignments: Sequence[Assignment], said: str) -> LoadedConfig:
    """Load `file`, or the defaults, with `assignments` on top; checked as a file with those values would be.

    `said`: where the assignments come from, for messages.

    Raises:
        ConfigError, PluginError: as in `load_config`.
    """
    if not assignments:
        return load_config({} if file is None else file)
    values = {} if file is None else read_yaml(file)
    # A name clears the options of the component it replaces, so it comes before the options that are set.
    # The preset comes before both: it says which component that is.
    for path, value in sorted(assignments, key=lambda pair: (pair[0].count("."), not pair[0].endswith(".name"))):
        _assign(values, path, value, said)
    try:
        config = HardKVConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(sentence for _, sentence in faults(error, HardKVConfig))) from None
    registry = load_registry(config.plugins, None if file is None else file.parent)
    return LoadedConfig(config, registry, resolve(config, registry))


def _assign(values: dict[str, Any], path: str, value: Any, said: str) -> None:
    *sections, key = path.split(".")
    section = values
    for depth, name in enumerate(sections):
        inner = section.get(name)
        if inner is None:
            inner = {} if depth else _default_component(values, name)
        if not isinstance(inner, dict):
            raise ConfigError(f"{said} {path}: '{'.'.join(sections[: depth + 1])}' holds {inner!r}, no keys")
        section[name] = section = dict(inner)
    if (
        len(sections) == 1
        and key == "name"
        and section.get("name") != value
        and _default_component(values, sections[0])
    ):
        section.clear()
    section[key] = value


def _default_component(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Give what a component's slot holds where nothing is said, empty for any other section."""
    field = HardKVConfig.model_fields.get(name)
    if field is None or not isinstance(field.default, ComponentSpec):
        return {}
    spec: dict[str, Any] = with_preset({"preset": values.get("preset")}).get(name, field.default.model_dump())
    return dict(spec)
