"""hardkv: head-adaptive KV-cache compression for decoding, with pluggable policies."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardkv.config import HardKVConfig as HardKVConfig
    from hardkv.errors import CapacityError as CapacityError
    from hardkv.errors import ConfigError as ConfigError
    from hardkv.errors import HardKVError as HardKVError
    from hardkv.errors import InputError as InputError
    from hardkv.errors import ModelNotFoundError as ModelNotFoundError
    from hardkv.errors import PluginError as PluginError
    from hardkv.errors import UnsupportedModelError as UnsupportedModelError
    from hardkv.hf_cache import HardKVCache as HardKVCache
    from hardkv.hookspecs import hookimpl as hookimpl
    from hardkv.interfaces import Budget as Budget
    from hardkv.interfaces import CacheTier as CacheTier
    from hardkv.interfaces import Calibrator as Calibrator
    from hardkv.interfaces import Component as Component
    from hardkv.interfaces import EntryScorer as EntryScorer
    from hardkv.interfaces import ImportanceScorer as ImportanceScorer
    from hardkv.interfaces import OnlineScorer as OnlineScorer
    from hardkv.interfaces import Options as Options
    from hardkv.interfaces import Regularizer as Regularizer
    from hardkv.runtime import HardKVRuntime as HardKVRuntime
    from hardkv.types import Claims as Claims
    from hardkv.types import CostModel as CostModel
    from hardkv.types import EnteringTokens as EnteringTokens
    from hardkv.types import Layout as Layout
    from hardkv.types import Limits as Limits
    from hardkv.types import ModelGeometry as ModelGeometry
    from hardkv.types import ScoreView as ScoreView
    from hardkv.types import Selection as Selection
    from hardkv.types import TierShape as TierShape
    from hardkv.types import TokenBatch as TokenBatch

__version__ = "0.1.0"

_HOME = {
    "HardKVConfig": "config",
    "HardKVCache": "hf_cache",
    "HardKVRuntime": "runtime",
    "hookimpl": "hookspecs",
    **dict.fromkeys(
        [
            "HardKVError",
            "ConfigError",
            "PluginError",
            "CapacityError",
            "InputError",
            "ModelNotFoundError",
            "UnsupportedModelError",
        ],
        "errors",
    ),
    **dict.fromkeys(
        [
            "Component",
            "Options",
            "ImportanceScorer",
            "OnlineScorer",
            "EntryScorer",
            "Calibrator",
            "Budget",
            "Regularizer",
            "CacheTier",
        ],
        "interfaces",
    ),
    **dict.fromkeys(
        [
            "ScoreView",
            "EnteringTokens",
            "Claims",
            "Limits",
            "Selection",
            "CostModel",
            "Layout",
            "TokenBatch",
            "TierShape",
            "ModelGeometry",
        ],
        "types",
    ),
}

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import hardkv` stays fast."""
    if name not in _HOME:
        raise AttributeError(f"module 'hardkv' has no attribute '{name}'")
    return getattr(import_module(f"hardkv.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
