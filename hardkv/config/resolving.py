"""Builds the five components that a configuration names, and refuses combinations that cannot work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hardkv.config.settings import CacheSettings, ComponentSpec, HardKVConfig
from hardkv.errors import ConfigError
from hardkv.interfaces import Budget, CacheTier, Calibrator, ImportanceScorer, Regularizer
from hardkv.registry import Registry
from hardkv.types import Limits, ModelGeometry


@dataclass(frozen=True)
class Components:
    """The five stages of a compression pass."""

    scorer: ImportanceScorer
    calibrator: Calibrator
    budget: Budget
    regularizer: Regularizer
    condenser: CacheTier

    @property
    def calibrates(self) -> bool:
        """Whether scores go through the calibrator: not when they are probabilities, or when only order counts."""
        return self.scorer.space != "probability" and self.budget.needs_probabilities

    @property
    def needs_queries(self) -> bool:
        """Whether a ring of the last `cache.query_rows` queries must be kept while decoding."""
        reference = self.calibrates and self.calibrator.needs_reference
        asked = self.scorer.needs_queries or self.holds_hidden_states or self.condenser.needs_queries
        return asked or reference

    @property
    def holds_hidden_states(self) -> bool:
        """Whether the ring holds hidden states as well: not for a scorer that sees them as tokens enter."""
        return self.scorer.needs_hidden_states and not self.scorer.scores_on_entry

    def check_model(self, geometry: ModelGeometry) -> None:
        """Let every component refuse the model.

        Raises:
            ConfigError, UnsupportedModelError, PluginError: naming the component.
        """
        for component in (self.scorer, self.calibrator, self.budget, self.regularizer, self.condenser):
            component.check_model(geometry)


def resolve(config: HardKVConfig, registry: Registry) -> Components:
    """Build fresh components; raises one `ConfigError` that lists every fault, a line each."""
    faults: list[str] = []

    def build(interface: Any, spec: ComponentSpec) -> Any:
        try:
            return registry.build(interface, spec.model_dump())
        except ConfigError as error:
            faults.extend(str(error).split("\n"))
            return None

    built = {
        "scorer": build(ImportanceScorer, config.scorer),
        "calibrator": build(Calibrator, config.calibrator),
        "budget": build(Budget, config.budget),
        "regularizer": build(Regularizer, config.regularizer),
        "condenser": build(CacheTier, config.condenser),
    }
    if not faults:
        components = Components(**built)
        faults = [
            *_budget_faults(config.cache, components.budget),
            *_scorer_faults(config.cache, components.scorer),
            *_condenser_faults(config.cache, components.condenser),
        ]
    if faults:
        raise ConfigError("\n".join(faults))
    return components


def limits_at(
    cache: CacheSettings, budget: Budget, seen_tokens: int, total_layers: int = 1, share_tokens: int | None = None
) -> Limits:
    """Give the bounds for a sequence that has seen `seen_tokens`, deriving what the configuration leaves null.

    With a target, `lower` is the target and `upper` four times it, room for greedy heads, or what the budget says;
    without one, `lower` is what is protected, and `upper` all that was seen. A share of bytes is a target as well.
    """
    target = budget.target_tokens(seen_tokens) if share_tokens is None else share_tokens
    most = budget.most_tokens(seen_tokens)
    if most is None:
        most = 4 * target if target else seen_tokens
    protected = cache.sinks + cache.local_window
    lower = cache.lower if cache.lower is not None else max(protected, target or 0)
    upper = cache.upper if cache.upper is not None else max(lower, most)
    return Limits(
        sinks=cache.sinks,
        local_window=cache.local_window,
        lower=min(lower, upper),
        upper=upper,
        seen_tokens=seen_tokens,
        total_layers=total_layers,
        share_tokens=share_tokens,
    )


def _budget_faults(cache: CacheSettings, budget: Budget) -> list[str]:
    found = []
    options = budget.config.model_dump()
    label = "budget.mean_tokens" if "mean_tokens" in options else f"the target of budget '{budget.name}'"
    counts = {label: _fixed_target(budget), "budget.cap_tokens": options.get("cap_tokens")}
    protected = cache.sinks + cache.local_window
    for label, tokens in counts.items():
        if tokens is not None and protected >= tokens:
            found.append(
                f"{label} ({tokens}) must be above cache.sinks + cache.local_window ({cache.sinks} +"
                f" {cache.local_window}): protected tokens count, and alone would spend it"
            )
    floor, cap = options.get("floor_tokens"), options.get("cap_tokens")
    if floor is not None and cap is not None and floor > cap:
        found.append(f"budget.floor_tokens ({floor}) must not be above budget.cap_tokens ({cap})")
    for label, tokens in {**counts, "budget.floor_tokens": floor}.items():
        if tokens is not None and cache.upper is not None and tokens > cache.upper:
            found.append(f"{label} ({tokens}) must not be above cache.upper ({cache.upper}), which no head exceeds")
    return found


def _fixed_target(budget: Budget) -> int | None:
    """Give the target in tokens, or None where there is none or it grows with the sequence."""
    target = budget.target_tokens(2**30)
    return target if target == budget.target_tokens(2**31) else None


def _scorer_faults(cache: CacheSettings, scorer: ImportanceScorer) -> list[str]:
    rows = scorer.config.model_dump().get("rows")
    if scorer.needs_queries and rows is not None and rows > cache.query_rows:
        return [
            f"scorer.rows ({rows}) must not be above cache.query_rows ({cache.query_rows}), the queries that are held"
        ]
    return []


def _condenser_faults(cache: CacheSettings, condenser: CacheTier) -> list[str]:
    slots = cache.condensed_slots
    if condenser.holds_tokens and slots == 0:
        return [f"condenser '{condenser.name}' needs room: set cache.condensed_slots above 0 (got 0)"]
    if not condenser.holds_tokens and slots > 0:
        return [
            f"cache.condensed_slots ({slots}) must be 0 with condenser '{condenser.name}', which keeps nothing;"
            " or choose a condenser that does, such as merge"
        ]
    return []
