"""load_config: a file, a mapping or a HardKVConfig becomes a checked configuration with its components."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hardkv.config.reading import read_yaml
from hardkv.config.resolving import Components, resolve
from hardkv.config.settings import HardKVConfig
from hardkv.errors import ConfigError
from hardkv.faults import faults
from hardkv.registry import Registry, load_registry


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration that can run: every name resolved, every option checked."""

    config: HardKVConfig
    registry: Registry
    components: Components


def load_config(source: str | Path | Mapping[str, Any] | HardKVConfig) -> LoadedConfig:
    """Check a YAML file, a mapping or a config, and build its components.

    Raises `ConfigError` listing every fault with its path, and `PluginError` for a plugin that cannot be loaded.
    """
    folder: Path | None = None
    label = "config"
    if isinstance(source, HardKVConfig):
        # `model_copy(update=...)` checks nothing
        config = _validated(source.model_dump(), label)
    elif isinstance(source, Mapping):
        config = _validated(dict(source), label)
    elif isinstance(source, str | Path):
        path = Path(source).expanduser()
        label, folder = str(path), path.parent
        config = _validated(read_yaml(path), label)
    else:
        raise ConfigError(
            f"expected the path of a YAML file, a mapping or a HardKVConfig (got a {type(source).__name__})"
        )
    registry = load_registry(config.plugins, folder)
    try:
        components = resolve(config, registry)
    except ConfigError as error:
        raise _reported(label, str(error).split("\n")) from None
    return LoadedConfig(config=config, registry=registry, components=components)


def _validated(values: dict[str, Any], label: str) -> HardKVConfig:
    try:
        return HardKVConfig.model_validate(values)
    except ValidationError as error:
        raise _reported(label, [sentence for _, sentence in faults(error, HardKVConfig)]) from None


def _reported(label: str, sentences: list[str]) -> ConfigError:
    if len(sentences) == 1:
        return ConfigError(f"{label}: {sentences[0]}")
    return ConfigError(f"{label} has {len(sentences)} faults:\n" + "\n".join(f"  {line}" for line in sentences))
