"""A configuration file with the command line's changes on top."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardkv.errors import ConfigError, InputError

if TYPE_CHECKING:
    from hardkv.config import LoadedConfig

Assignment = tuple[str, Any]


def parse_assignments(texts: Sequence[str] | None) -> list[Assignment]:
    """Split each `key.path=value` and read the value as YAML.

    Raises:
        InputError: no key, no `=`, or a value that is not YAML.
    """
    return [_parse(text) for text in texts or ()]


def read_configuration(file: Path | None, assignments: Sequence[Assignment]) -> LoadedConfig:
    """Load `file`, or the defaults, with `assignments` on top; checked as a file with those values would be.

    Raises:
        ConfigError, PluginError: as in `load_config`.
    """
    from pydantic import ValidationError

    from hardkv.config import HardKVConfig, LoadedConfig, load_config, resolve
    from hardkv.config.reading import read_yaml
    from hardkv.faults import faults
    from hardkv.registry import load_registry

    if not assignments:
        return load_config({} if file is None else file)
    values = {} if file is None else read_yaml(file)
    # A name clears the options of the component it replaces, so it comes before the options that are set.
    for path, value in sorted(assignments, key=lambda pair: (pair[0].count("."), not pair[0].endswith(".name"))):
        _assign(values, path, value)
    try:
        config = HardKVConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(sentence for _, sentence in faults(error, HardKVConfig))) from None
    registry = load_registry(config.plugins, None if file is None else file.parent)
    return LoadedConfig(config, registry, resolve(config, registry))


def _parse(text: str) -> Assignment:
    import yaml

    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"--set {text!r}: expected KEY.PATH=VALUE, such as cache.sinks=8")
    try:
        # JSON first: `1e-5` is a number there and in YAML 1.2, but not to this YAML reader.
        return ".".join(keys), json.loads(value)
    except ValueError:
        pass
    try:
        return ".".join(keys), yaml.safe_load(value)
    except yaml.YAMLError:
        raise InputError(f"--set {'.'.join(keys)}: {value!r} is not a YAML value") from None


def _assign(values: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    section = values
    for depth, name in enumerate(sections):
        inner = section.get(name)
        if inner is None:
            inner = {} if depth else _default_component(name)
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {path}: '{'.'.join(sections[: depth + 1])}' holds {inner!r}, no keys")
        section[name] = section = dict(inner)
    if len(sections) == 1 and key == "name" and section.get("name") != value and _default_component(sections[0]):
        section.clear()
    section[key] = value


def _default_component(name: str) -> dict[str, Any]:
    """Give the default of a component's slot, empty for any other section."""
    from hardkv.config import ComponentSpec, HardKVConfig

    field = HardKVConfig.model_fields.get(name)
    return field.default.model_dump() if field is not None and isinstance(field.default, ComponentSpec) else {}
