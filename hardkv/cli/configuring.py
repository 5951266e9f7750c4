"""A configuration file with the command line's changes on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardkv.errors import InputError

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
    from hardkv.config.assigning import load_assigned

    return load_assigned(file, assignments, "--set")


def _parse(text: str) -> Assignment:
    import yaml

    from hardkv.config.assigning import read_value

    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"--set {text!r}: expected KEY.PATH=VALUE, such as cache.sinks=8")
    try:
        return ".".join(keys), read_value(value)
    except yaml.YAMLError:
        raise InputError(f"--set {'.'.join(keys)}: {value!r} is not a YAML value") from None
