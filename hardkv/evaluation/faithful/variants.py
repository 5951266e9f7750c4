"""Variants of the shipped default, read from a file of dotted settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hardkv.config import HardKVConfig
from hardkv.config.assigning import Assignment, load_assigned
from hardkv.config.reading import read_yaml
from hardkv.errors import ConfigError, InputError
from hardkv.evaluation.methods import Method, aimed
from hardkv.interfaces import Budget
from hardkv.registry import SLOTS, Registry

_COMPONENTS = tuple(SLOTS.values())
_TARGETS = ("budget.mean_tokens", "budget.mean_share")
_NOT_IN_CACHE = ("cache.max_sequences", "cache.pool_bytes", "cache.prefill_chunk_tokens")


@dataclass(frozen=True)
class Variant:
    """The shipped default with some settings changed."""

    name: str
    config: HardKVConfig
    cache: dict[str, Any]
    """Keys of the `cache` section that it changes."""

    def method(self, registry: Registry, mean_tokens: int, rounds: int) -> Method:
        """The row of a table, with its budget set to the mean, or with what keeps it from that."""
        components = {slot: getattr(self.config, slot).model_dump() for slot in _COMPONENTS}
        method = aimed(registry, self.config, Method(self.name, components, cache=self.cache), mean_tokens)
        cache = self.config.cache
        if mean_tokens <= cache.sinks + cache.local_window:
            why = f"cache.sinks + cache.local_window ({cache.sinks} + {cache.local_window}) are the whole mean budget"
            return replace(method, obstacle=why)
        if rounds == 1 and set(self.cache) == {"interval"} and components == _shipped():
            return replace(method, obstacle="cache.interval makes no difference to a single compression")
        return method


def read_variants(
    path: Path, registry: Registry, config_file: Path | None, assignments: Sequence[Assignment], mean_tokens: int
) -> list[Variant]:
    """Read names and their settings; `config_file` and `assignments` give plugins and the cache that all rows share.

    `mean_tokens`: any target, for budgets that are refused without one.

    Raises:
        ConfigError: no such file, a name that is there twice, an unknown key, a wrong value; names the variant.
        InputError: a setting that no variant may change.
    """
    shared = [pair for pair in assignments if pair[0].split(".")[0] not in _COMPONENTS]
    base = [*shared, *_shipped().items()]
    variants = []
    for name, changes in read_yaml(path).items():
        said = f"--variants {path}: '{name}'"
        found = _checked(said, {} if changes is None else changes)
        if "budget.name" in found and _takes_mean(said, registry, found["budget.name"]):
            found["budget.mean_tokens"] = mean_tokens
        try:
            ready = load_assigned(config_file, [*base, *found.items()], said)
        except ConfigError as error:
            text = str(error)
            raise ConfigError(text if text.startswith(said) else f"{said}: {text}") from None
        cache = {key.split(".")[1] for key in found if key.startswith("cache.")}
        dump = ready.config.cache.model_dump()
        variants.append(Variant(str(name), ready.config, {key: dump[key] for key in sorted(cache)}))
    return variants


def _checked(said: str, changes: Any) -> dict[str, Any]:
    if not isinstance(changes, Mapping):
        raise InputError(f"{said}: expected settings such as cache.local_window: 64, got {changes!r}")
    for key in changes:
        section = str(key).split(".")[0]
        if "." not in str(key) or section not in ("cache", *_COMPONENTS):
            known = ", ".join(f"{name}." for name in ("cache", *_COMPONENTS))
            raise InputError(f"{said}: {key}: a variant changes keys that begin with one of {known}")
        if key in _TARGETS:
            raise InputError(f"{said}: {key}: the mean comes from --mean-budgets; leave it out")
        if key in _NOT_IN_CACHE:
            raise InputError(f"{said}: {key}: is the same in every row; set it with --set")
    return dict(changes)


def _takes_mean(said: str, registry: Registry, name: Any) -> bool:
    try:
        return "mean_tokens" in registry.get(Budget, name).Config.model_fields
    except ConfigError as error:
        raise ConfigError(f"{said}: budget.name: {error}") from None


def _shipped() -> dict[str, dict[str, Any]]:
    return {slot: getattr(HardKVConfig(), slot).model_dump() for slot in _COMPONENTS}
