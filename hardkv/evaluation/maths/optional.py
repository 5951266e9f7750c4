"""Libraries that only this evaluation needs."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from hardkv.errors import InputError


def require(module: str, purpose: str) -> None:
    """Check that an optional library is installed, without importing it.

    Raises:
        InputError: it is not; says how to install it.
    """
    package = module.partition(".")[0]
    if find_spec(package) is None:
        raise InputError(f"{purpose} needs {package.replace('_', '-')}: pip install 'hardkv[math]'")


def needed(module: str, purpose: str) -> Any:
    """Import an optional library; raises as `require`."""
    require(module, purpose)
    return importlib.import_module(module)
