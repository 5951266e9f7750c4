"""The configuration: its settings, how a file becomes one, and the components that it names."""

from __future__ import annotations

from hardkv.config.loading import LoadedConfig, load_config
from hardkv.config.rendering import config_schema, default_yaml
from hardkv.config.resolving import Components, limits_at, resolve
from hardkv.config.settings import (
    CacheSettings,
    ComponentSpec,
    GenerationSettings,
    HardKVConfig,
    ModelSettings,
)

__all__ = [
    "CacheSettings",
    "ComponentSpec",
    "Components",
    "GenerationSettings",
    "HardKVConfig",
    "LoadedConfig",
    "ModelSettings",
    "config_schema",
    "default_yaml",
    "limits_at",
    "load_config",
    "resolve",
]
