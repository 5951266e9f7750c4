"""What `preset` stands for: settings that a configuration starts from, and overrides where it says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

PresetName = Literal["quality", "balanced", "fast"]

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "quality": {"budget": {"name": "threshold", "mean_tokens": 2048, "floor_share": 0.2}},
        "balanced": {},
        "fast": {
            "budget": {"name": "threshold", "mean_tokens": 512, "floor_share": 0.2},
            "cache": {"interval": 256},
        },
    }
)
"""By name, what differs from the defaults of the settings, which are `balanced`; docs/benchmarks.md has the figures."""


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with what their `preset` says wherever they are silent.

    A component that `values` name otherwise than the preset keeps none of its options.
    """
    chosen = values.get("preset")
    merged = dict(values)
    for section, settings in (PRESETS.get(chosen, {}) if isinstance(chosen, str) else {}).items():
        given = values.get(section, {})
        if isinstance(given, Mapping) and given.get("name", settings.get("name")) == settings.get("name"):
            merged[section] = {**settings, **given}
    return merged
