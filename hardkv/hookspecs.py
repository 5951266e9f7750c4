"""The one hook that built-ins and plugins implement, and its markers."""

from __future__ import annotations

import pluggy

from hardkv.interfaces import Component

PROJECT = "hardkv"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def hardkv_components() -> list[type[Component]]:  # type: ignore[empty-body]  # pluggy reads only its signature
    """Give the classes of every component that this plugin offers."""
