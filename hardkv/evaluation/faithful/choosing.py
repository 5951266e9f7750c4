"""Which methods `hardkv eval fidelity` compares."""

from __future__ import annotations

from collections.abc import Sequence

from hardkv.config import HardKVConfig
from hardkv.errors import InputError
from hardkv.evaluation.faithful.panel import FULL, Task
from hardkv.evaluation.faithful.variants import Variant
from hardkv.evaluation.methods import Method, all_methods, choose
from hardkv.interfaces import Budget
from hardkv.registry import Registry

EVERY = "all"
SHORT = (
    "default",
    "window_max+threshold",
    "snapkv+top_k",
    "h2o+top_k",
    "tova+top_k",
    "streaming+top_k",
    "expected_attention+top_k",
)
"""The shipped default, its scorer's nearest rival under the same budget, and what peers do."""


def methods_at(registry: Registry, config: HardKVConfig, mean_tokens: int, names: Sequence[str] | None) -> list[Method]:
    """The methods that `names` select, in their order; None is `SHORT`, and `config` where it differs.

    A name as in `hardkv compare`, or any scorer and budget as `scorer+budget`; `all` is every row that command has.

    Raises:
        InputError: a name that selects none.
    """
    usual = all_methods(registry, config, mean_tokens)
    if names is None:
        names = [*SHORT[:1], *(method.name for method in usual if method.name == "config"), *SHORT[1:]]
    if EVERY in names:
        return usual
    every = {method.name: method for method in all_methods(registry, config, mean_tokens, registry.names(Budget))}
    chosen: dict[str, Method] = {}
    for name in names:
        found = [every[name]] if name in every else choose(usual, [name])
        chosen |= {method.name: method for method in found}
    return list(chosen.values())


def tasks_of(
    registry: Registry,
    config: HardKVConfig,
    sweep: tuple[Sequence[int], Sequence[int]],
    names: Sequence[str] | None,
    variants: Sequence[Variant],
) -> list[Task]:
    """Every row of the `sweep`, its rounds and its mean budgets, in order.

    Raises:
        InputError: a variant is called like a method; a variant `default` without settings is just that.
    """
    tasks = []
    for rounds in sweep[0]:
        for mean_tokens in sweep[1]:
            methods = {method.name: method for method in methods_at(registry, config, mean_tokens, names)}
            for variant in variants:
                method = variant.method(registry, mean_tokens, rounds)
                if variant.name == FULL or methods.get(variant.name, method) != method:
                    raise InputError(f"--variants: '{variant.name}' is what another row is called; rename it")
                methods[variant.name] = method
            tasks += [Task(rounds, mean_tokens, method) for method in methods.values()]
    return tasks
