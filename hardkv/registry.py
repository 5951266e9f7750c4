"""Loads plugins, and looks up and builds components by interface and name."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pluggy
from pydantic import ValidationError

from hardkv import builtins, hookspecs
from hardkv.errors import ConfigError, HardKVError, PluginError, did_you_mean
from hardkv.faults import faults, shown, source_file
from hardkv.interfaces import Budget, CacheTier, Calibrator, Component, ImportanceScorer, Options, Regularizer
from hardkv.plugin_modules import Plugin, installed_plugins, named_plugin

HOOK = hookspecs.hardkv_components.__name__

SLOTS: dict[type[Component], str] = {
    ImportanceScorer: "scorer",
    Calibrator: "calibrator",
    Budget: "budget",
    Regularizer: "regularizer",
    CacheTier: "condenser",
}
"""Interface of each slot of the configuration."""

C = TypeVar("C", bound=Component)


@dataclass(frozen=True)
class Registered:
    """One component that the configuration can name."""

    slot: str
    name: str
    component: type[Component]
    plugin: str
    """`builtin`, or the name of the plugin it came from."""
    summary: str


class Registry:
    """Components by interface and name; `load_registry` makes one."""

    def __init__(self, entries: Iterable[Registered] = ()) -> None:
        self._entries: dict[tuple[str, str], Registered] = {}
        for entry in entries:
            self._add(entry)

    def names(self, interface: type[Component]) -> list[str]:
        """Give the names that `interface`'s slot of the configuration may hold, in order of registration."""
        slot = _slot(interface)
        return [name for known, name in self._entries if known == slot]

    def get(self, interface: type[C], name: str) -> type[C]:
        """Give the class registered under `name`; raises `ConfigError` for an unknown one."""
        slot = _slot(interface)
        entry = self._entries.get((slot, name))
        if entry is None:
            known = self.names(interface)
            elsewhere = [found.slot for found in self._entries.values() if found.name == name]
            hint = f" '{name}' is a {elsewhere[0]}." if elsewhere else did_you_mean(name, known)
            raise ConfigError(f"unknown {slot} '{name}'.{hint} Known: {', '.join(known) or 'none'} [{slot}.name]")
        if not issubclass(entry.component, interface):
            raise ConfigError(f"{slot} '{name}' is no {interface.__name__}")
        return entry.component

    def build(self, interface: type[C], spec: Mapping[str, Any]) -> C:
        """Build a fresh instance from `{"name": ..., **options}`; raises `ConfigError` with every faulty option."""
        slot = _slot(interface)
        if "name" not in spec:
            raise ConfigError(f"{slot}.name: missing. Known: {', '.join(self.names(interface))}")
        component = self.get(interface, str(spec["name"]))
        options = {key: value for key, value in spec.items() if key != "name"}
        try:
            config = component.Config.model_validate(options)
        except ValidationError as error:
            label = f"{slot} '{component.name}'"
            found = [
                f"{label}: {sentence} [{slot}.{path}]" if path else f"{label}: {sentence} [{slot}]"
                for path, sentence in faults(error, component.Config)
            ]
            raise ConfigError("\n".join(found)) from None
        try:
            return component(config)
        except HardKVError:
            raise
        except Exception as error:
            place = source_file(component) or component.__module__
            raise PluginError(
                f"{slot} '{component.name}' ({place}) could not be built from {config!r}: {error}"
            ) from error

    def all(self) -> list[Registered]:
        """Give every component, slot by slot, in order of registration."""
        slots = list(SLOTS.values())
        return sorted(self._entries.values(), key=lambda entry: slots.index(entry.slot))

    def _add(self, entry: Registered) -> None:
        key = (entry.slot, entry.name)
        if key in self._entries:
            first = self._entries[key]
            same = first.component.__qualname__ == entry.component.__qualname__
            cure = "Load one alone, if they are the same, or rename one" if same else "Rename one"
            raise PluginError(
                f"two components are called {entry.slot} '{entry.name}': {_place(first)} and {_place(entry)}. {cure}"
            )
        self._entries[key] = entry


def load_registry(plugins: Iterable[str] = (), base_folder: Path | None = None) -> Registry:
    """Give a fresh registry of built-ins, installed plugins and the named `plugins`.

    Local plugin files are looked for in `base_folder`, then in the current folder. Raises `PluginError`.
    """
    folders = list(dict.fromkeys([folder.resolve() for folder in (base_folder, Path()) if folder is not None]))
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    found = [Plugin(name="builtin", target=builtins, origin="hardkv"), *installed_plugins()]
    found += [named_plugin(name, folders) for name in plugins]
    unique: dict[str, Plugin] = {}
    for plugin in found:
        unique.setdefault(plugin.key, plugin)
    return Registry(
        _checked(component, plugin) for plugin in unique.values() for component in _offered(manager, plugin)
    )


def _offered(manager: pluggy.PluginManager, plugin: Plugin) -> list[Any]:
    """Register `plugin` and call its hook."""
    label = f"plugin '{plugin.name}' ({plugin.origin})"
    example = f"write `@hardkv.hookimpl` above `def {HOOK}(): return [YourComponent]`"
    try:
        manager.register(plugin.target, name=plugin.key)
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginError(f"{label}: {str(error).splitlines()[-1]}; {example}") from error
    hooks = {caller.name for caller in manager.get_hookcallers(plugin.target) or []}
    for name in sorted(hooks - {HOOK}):
        raise PluginError(f"{label}: unknown hook '{name}'.{did_you_mean(name, [HOOK])} The only hook is '{HOOK}'")
    if not hooks:
        if inspect.isroutine(getattr(plugin.target, HOOK, None)):
            raise PluginError(f"{label}: {HOOK} lacks its marker; {example}")
        near = did_you_mean(HOOK, [name for name in dir(plugin.target) if name.startswith("hardkv")])
        raise PluginError(
            f"{label}: has no hook '{HOOK}'.{near.replace('Did you mean', 'Is it')} To cure it, {example}"
        )
    caller = manager.subset_hook_caller(HOOK, [other for other in manager.get_plugins() if other is not plugin.target])
    try:
        results = caller()
    except Exception as error:
        raise PluginError(f"{label}: {HOOK} raised {type(error).__name__}: {error}; repair it") from error
    components = results[0] if results else None  # pluggy leaves out a None
    if not isinstance(components, list | tuple):
        raise PluginError(f"{label}: {HOOK} must return a list of classes (got {shown(components)})")
    return list(components)


def _checked(component: Any, plugin: Plugin) -> Registered:
    """Refuse a class that can never be built, while its author still sees which plugin is meant."""
    label = f"plugin '{plugin.name}' ({plugin.origin})"
    if isinstance(component, Component):
        raise PluginError(f"{label}: {HOOK} gave an instance; give the class {type(component).__name__} itself")
    bases = [base for base in SLOTS if inspect.isclass(component) and issubclass(component, base)]
    if len(bases) != 1:
        choice = ", ".join(base.__name__ for base in SLOTS)
        shape = "several interfaces" if bases else "none of the interfaces"
        what = component.__name__ if inspect.isclass(component) else shown(component)
        raise PluginError(f"{label}: {what} implements {shape}; subclass exactly one of {choice}")
    title = component.__name__
    name = getattr(component, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        came = f"got {name!r}" if name is not None else "it has none"
        raise PluginError(
            f'{label}: {title} needs a name in lower_case ({came}); write `name = "my_{SLOTS[bases[0]]}"` in the class'
        )
    config = component.Config
    if not (inspect.isclass(config) and issubclass(config, Options)):
        raise PluginError(f"{label}: {title}.Config is no Options; write `class Config(hardkv.Options):`")
    if "name" in config.model_fields:
        raise PluginError(f"{label}: {title}.Config has an option 'name', which is the component's own; rename it")
    missing = sorted(component.__abstractmethods__)
    if missing:
        raise PluginError(f"{label}: {title} does not implement {', '.join(missing)} of {bases[0].__name__}; add it")
    summary = component.summary or (component.__doc__ or "").strip().split("\n")[0]
    return Registered(SLOTS[bases[0]], name, component, plugin.name, summary)


def _slot(interface: type[Component]) -> str:
    for base, slot in SLOTS.items():
        if issubclass(interface, base):
            return slot
    raise TypeError(f"{interface.__name__} is none of {', '.join(base.__name__ for base in SLOTS)}")


def _place(entry: Registered) -> str:
    file = getattr(sys.modules.get(entry.component.__module__), "__file__", None)
    return f"{entry.component.__module__}.{entry.component.__qualname__} ({file}, plugin '{entry.plugin}')"
