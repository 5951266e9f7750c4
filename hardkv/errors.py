"""Every error that a user or a plugin can cause."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HardKVError(Exception):
    """Base of all errors that hardkv raises on purpose."""


class ConfigError(HardKVError):
    """A configuration that cannot be used; the message names the path, what came and what is allowed."""


class PluginError(HardKVError):
    """A plugin that could not be loaded or that broke its interface's contract."""


class CapacityError(HardKVError):
    """A sequence or a write that does not fit in the memory that the cache may use."""


class UnsupportedModelError(HardKVError):
    """A model whose attention hardkv does not know how to serve."""


class ModelNotFoundError(HardKVError):
    """A model id, folder or file that does not lead to a loadable model."""


class InputError(HardKVError, ValueError):
    """A prompt or a generation argument that cannot be used."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Give `" Did you mean 'x'?"` for a near miss, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
