"""Which methods there are to compare: every registered component, in combinations that share one mean budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hardkv.config import HardKVConfig
from hardkv.errors import HardKVError, InputError, did_you_mean
from hardkv.interfaces import Budget, CacheTier, Calibrator, Component, ImportanceScorer, Regularizer
from hardkv.registry import SLOTS, Registry

Specs = dict[str, dict[str, Any]]
"""Component of each slot: its name and options."""

_CONDENSED_PART = 12
"""A condenser that holds tokens is given one slot for so many tokens of the budget, which they are taken from."""


@dataclass(frozen=True)
class Method:
    """One row of a comparison."""

    name: str
    components: Specs
    condensed_slots: int = 0
    """Slots per head of a condenser that holds tokens; they are part of the mean budget."""
    solve: str | None = None
    """Option of the budget that must be solved for the mean, where the budget takes no target."""
    obstacle: str | None = None
    """Why it cannot run."""
    cache: dict[str, Any] = field(default_factory=dict)
    """Keys of the configuration's `cache` section that are others in this row."""

    @property
    def labels(self) -> set[str]:
        """What selects this method: its name, or a component that the name holds."""
        own = {"scorer", "budget"} if "+" not in self.name else set()
        return {self.name, *self.name.split("+"), *(self.components[slot]["name"] for slot in own)}


def all_methods(
    registry: Registry, config: HardKVConfig, mean_tokens: int, budgets: Sequence[str] = ("top_k",)
) -> list[Method]:
    """List every method once.

    `default`, as shipped; `config`, where its components differ from that; each scorer under each of `budgets`; the
    default's scorer under each budget; top-p of SnapKV's scores under each calibrator; the default with each condenser,
    and with each regularizer that a plugin brings. A component that `config` names has the options it gives there.

    Raises:
        ConfigError: one of `budgets` is not known.
    """
    for budget in budgets:
        registry.get(Budget, budget)
    shipped = _specs(HardKVConfig())
    own = _specs(config)
    named: list[tuple[str, Specs]] = [("default", shipped)]
    if own != shipped:
        named.append(("config", own))
    named += [(_name(registry, specs), specs) for specs in _combinations(registry, shipped, own, budgets)]
    methods: dict[tuple[str, ...], Method] = {}
    for name, specs in named:
        key = ("config",) if name == "config" else tuple(specs[slot]["name"] for slot in SLOTS.values())
        if key not in methods:
            methods[key] = aimed(registry, config, Method(name, specs), mean_tokens)
    return list(methods.values())


def choose(methods: Sequence[Method], names: Iterable[str]) -> list[Method]:
    """Keep the methods that one of `names` selects, by name or component.

    Raises:
        InputError: a name that selects none.
    """
    wanted = list(names)
    known = list(dict.fromkeys(label for method in methods for label in (method.name, *sorted(method.labels))))
    for name in wanted:
        if name not in known:
            every = ", ".join(method.name for method in methods)
            raise InputError(f"no method is called '{name}'.{did_you_mean(name, known)} Known: {every}")
    return [method for method in methods if method.labels & set(wanted)]


def _combinations(registry: Registry, shipped: Specs, own: Specs, budgets: Sequence[str]) -> Iterator[Specs]:
    def spec(interface: type[Component], name: str) -> Specs:
        slot = SLOTS[interface]
        return {slot: own[slot] if own[slot]["name"] == name else {"name": name}}

    scorers, every_budget = registry.names(ImportanceScorer), registry.names(Budget)
    for budget in budgets:
        for scorer in scorers:
            yield {**shipped, **spec(ImportanceScorer, scorer), **spec(Budget, budget)}
    for budget in every_budget:
        yield {**shipped, **spec(Budget, budget)}
    for calibrator in registry.names(Calibrator):
        snapkv = {**spec(ImportanceScorer, "snapkv"), **spec(Budget, "top_p")}
        yield {**shipped, **snapkv, **spec(Calibrator, calibrator)}
    for condenser in registry.names(CacheTier):
        yield {**shipped, **spec(CacheTier, condenser)}
    for entry in registry.all():
        if entry.slot == SLOTS[Regularizer] and entry.plugin != "builtin":
            yield {**shipped, **spec(Regularizer, entry.name)}


def _specs(config: HardKVConfig) -> Specs:
    return {slot: getattr(config, slot).model_dump() for slot in SLOTS.values()}


def _name(registry: Registry, specs: Specs) -> str:
    """Scorer and budget; the calibrator where top-p depends on it; condenser and regularizer where they are others."""
    shipped, names = _specs(HardKVConfig()), {slot: spec["name"] for slot, spec in specs.items()}
    changed = [names[slot] for slot in ("condenser", "regularizer") if names[slot] != shipped[slot]["name"]]
    calibrates = registry.get(ImportanceScorer, names["scorer"]).space != "probability"
    calibrated = [names["calibrator"]] if calibrates and names["budget"] == "top_p" else []
    return "+".join([names["scorer"], names["budget"], *calibrated, *changed])


def aimed(registry: Registry, config: HardKVConfig, method: Method, mean_tokens: int) -> Method:
    """The method with its budget set to the mean, or with what keeps it from that."""
    missing = [text for interface in SLOTS for text in _missing(registry, interface, method)]
    if missing:
        return replace(method, obstacle="; ".join(missing))
    try:
        condenser = registry.build(CacheTier, method.components["condenser"])
    except HardKVError as error:
        return replace(method, obstacle=str(error))
    slots = 0
    if condenser.holds_tokens:
        slots = config.cache.condensed_slots or max(1, mean_tokens // _CONDENSED_PART)
    budget = dict(method.components["budget"])
    fields = registry.get(Budget, budget["name"]).Config.model_fields
    solve = None
    if "mean_tokens" in fields:
        budget.pop("mean_share", None)
        budget["mean_tokens"] = mean_tokens - slots
    else:
        shares = _shares(registry.get(Budget, budget["name"]))
        if len(shares) != 1:
            why = f"budget '{budget['name']}' has no option mean_tokens, nor one share to solve for the mean"
            return replace(method, obstacle=why)
        solve = shares[0]
    return replace(method, components={**method.components, "budget": budget}, condensed_slots=slots, solve=solve)


def _missing(registry: Registry, interface: type[Component], method: Method) -> list[str]:
    slot = SLOTS[interface]
    spec = method.components[slot]
    component = registry.get(interface, spec["name"])
    given = {*spec, "mean_tokens", *(_shares(component) if issubclass(component, Budget) else ())}
    needed = [
        name for name, field in component.Config.model_fields.items() if field.is_required() and name not in given
    ]
    return [
        f"needs {slot}.{name}; give it with --config: {slot}: {{name: {spec['name']}, {name}: ...}}" for name in needed
    ]


def _shares(budget: type[Budget]) -> list[str]:
    """Options that are a share between 0 and 1."""
    properties = budget.Config.model_json_schema().get("properties", {})
    return [
        name
        for name, schema in properties.items()
        if schema.get("type") == "number"
        and schema.get("minimum", schema.get("exclusiveMinimum")) == 0
        and schema.get("maximum", schema.get("exclusiveMaximum")) == 1
    ]
