"""Every built-in component against the contract of its interface; the registry says which there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from hardkv.errors import PluginError
from hardkv.interfaces import CacheTier, Component
from hardkv.memory import PagePool
from hardkv.policies.budgets.static_heads import StaticHeads
from hardkv.policies.scorers.kvzap import KVzap
from hardkv.policies.scorers.streaming import Streaming
from hardkv.registry import Registered, load_registry
from hardkv.testing import (
    BudgetContract,
    CalibratorContract,
    RegularizerContract,
    ScorerContract,
    TierContract,
)
from hardkv.testing.contracts import Contract
from hardkv.testing.held import Held
from hardkv.tiers.dense import DenseTier
from hardkv.tiers.merge import Merge
from hardkv.tiers.sparse import SparseTier
from hardkv.types import Claims, EnteringTokens, Limits, TierShape

EXAMPLES = 10
CONTRACTS: dict[str, type[Contract]] = {
    "scorer": ScorerContract,
    "calibrator": CalibratorContract,
    "budget": BudgetContract,
    "regularizer": RegularizerContract,
    "condenser": TierContract,
}
Row = tuple[dict[str, Any], dict[str, Any]]
"""Options to build a component with, and attributes of its contract."""


def row(contract: Mapping[str, Any] | None = None, **options: Any) -> Row:
    return options, dict(contract or {})


def holds_what_it_reads(tier: CacheTier, layer: int, admitted: Held) -> Held:
    assert isinstance(tier, Merge)
    return tier.read(layer)


# For every built-in the configurations to test. A budget's `looser` is given as options of the same budget.
ROWS: dict[str, list[Row]] = {
    "scorer attention_power": [row(), row(power=6.0, decay=0.9, value_weight=False)],
    "scorer attention": [row(), row(reduce="max")],
    "scorer window_max": [row(), row(online=False)],
    "scorer snapkv": [row(rows=3), row(pool="logit", kernel=3)],
    "scorer rkv": [row(tile=4, kernel=3)],
    "scorer h2o": [row(), row(age_normalised=True)],
    "scorer tova": [row()],
    "scorer streaming": [row()],
    "scorer key_norm": [row()],
    "scorer random": [row({"heads_permute": False, "capture_elsewhere": False}, seed=7)],
    "scorer output_drop": [row(), row(norm=4.0, recency=0.3)],
    "scorer expected_attention": [row({"causal": False}), row({"causal": False}, covariance=False, value_norm=False)],
    "scorer value_aware": [row(), row(form="critical")],
    "scorer scissorhands": [row(), row(history=2)],
    "scorer quest": [row(page=4)],
    "scorer keydiff": [row()],
    "scorer lagkv": [row(sinks=1, lag=4)],
    # These two read a file made for one model's shape: see the classes below, which follow the shape of each case.
    "scorer kvpress": [],  # where the library is installed, tests/bridge holds it to its contract
    "scorer kvzap": [],
    "budget static_heads": [],
    "calibrator exact": [row()],
    "calibrator temperature": [row(), row(per_row=True)],
    "calibrator softmax": [row({"scale_free": False})],
    "budget threshold": [row({"looser": {"mean_tokens": 12}}, mean_tokens=8), row(mean_share=0.4, floor_share=0.0)],
    "budget top_p": [
        row({"looser": {"p": 0.97, "floor_tokens": 2}}, p=0.9, floor_tokens=2),
        row({"looser": {"floor_tokens": 1, "cap_tokens": 9}}, floor_tokens=1, cap_tokens=6),
    ],
    "budget top_k": [row({"looser": {"mean_tokens": 12}}, mean_tokens=8)],
    "budget ada": [row({"looser": {"mean_tokens": 12}}, mean_tokens=8)],
    "budget pyramid": [row({"looser": {"mean_tokens": 12}}, mean_tokens=8)],
    "budget bytes": [row(total=2**20)],
    "regularizer auto": [row()],
    "regularizer sparse_load": [row()],
    "regularizer rewrite": [row(mode="union")],
    "regularizer flatten_max": [row()],
    "regularizer flatten_sum": [row()],
    "condenser evict": [row()],
    "condenser nearest_merge": [row()],
    "condenser merge": [row({"held": staticmethod(holds_what_it_reads)})],
}


def contract_of(entry: Registered, given: Row, title: str) -> type[Contract]:
    """The contract of one configuration of a built-in."""
    options, attributes = given

    def build(settings: Mapping[str, Any]) -> Component:
        return entry.component(entry.component.Config(**settings))

    body: dict[str, Any] = {**attributes, "component": build(options), "max_examples": EXAMPLES, "__module__": __name__}
    if "looser" in body:
        body["looser"] = build(body["looser"])
    return type(title, (CONTRACTS[entry.slot],), body)


def builtin_contracts() -> dict[str, type[Contract]]:
    found = {}
    for entry in load_registry().all():
        if entry.plugin == "builtin":
            for index, given in enumerate(ROWS.get(f"{entry.slot} {entry.name}", [])):
                title = f"Test_{entry.slot}_{entry.name}_{index}"
                found[title] = contract_of(entry, given, title)
    return found


globals().update(builtin_contracts())


def test_every_builtin_has_a_row() -> None:
    names = {f"{entry.slot} {entry.name}" for entry in load_registry().all() if entry.plugin == "builtin"}
    missing, left_over = sorted(names - set(ROWS)), sorted(set(ROWS) - names)
    assert not missing, f"add a row to ROWS, `[row()]` if no option is needed, for: {', '.join(missing)}"
    assert not left_over, f"ROWS names what is not registered: {', '.join(left_over)}"


class AnyShapeKVzap(KVzap):
    """`kvzap` with networks made up for whatever shape a case has."""

    def __init__(self) -> None:
        self._networks = {}

    def enter(self, tokens: EnteringTokens) -> Tensor:
        assert tokens.hidden_states is not None
        heads, width = tokens.keys.shape[1], tokens.hidden_states.shape[-1]
        rng = torch.Generator().manual_seed(tokens.layer)
        inner = (torch.randn(3, width, generator=rng), torch.randn(3, generator=rng))
        outer = (torch.randn(heads, 3, generator=rng), torch.randn(heads, generator=rng))
        self._networks[tokens.layer] = [inner, outer]
        return super().enter(tokens)


class TestKVzap(ScorerContract):
    component = AnyShapeKVzap()
    heads_permute = False  # a head has weights of its own
    capture_elsewhere = False  # the weights are made up on the CPU
    max_examples = EXAMPLES


class AnyShapeStaticHeads(StaticHeads):
    """`static_heads` with a pattern for whatever shape a case has: every other head keeps all."""

    def __init__(self) -> None:
        self.config = StaticHeads.Config(pattern="made up", recent_tokens=3)

    def counts(self, claims: Claims, limits: Limits) -> Tensor:
        layers, heads, _ = claims.value.shape
        self._full = (torch.arange(layers)[:, None] + torch.arange(heads)) % 2 == 0
        self._full_share = 0.5
        return super().counts(claims, limits)


class TestStaticHeads(BudgetContract):
    component = AnyShapeStaticHeads()
    max_examples = EXAMPLES


def new_pool(shape: TierShape) -> PagePool:
    return PagePool(256, 2, shape.layers, shape.heads, shape.head_dim, shape.dtype, shape.device, False)


SMALL = TierShape(1, 1, 4, 4, torch.float32, torch.device("cpu"))


class TestDense(TierContract):
    component = DenseTier(new_pool(SMALL), 0, 4)
    owns_buffers = False
    max_examples = EXAMPLES

    @classmethod
    def make(cls, shape: TierShape) -> CacheTier:
        return DenseTier(new_pool(shape), 0, shape.slots)


class TestSparse(TierContract):
    component = SparseTier(new_pool(SMALL), 0)
    owns_buffers = False
    max_examples = EXAMPLES

    @classmethod
    def make(cls, shape: TierShape) -> CacheTier:
        return SparseTier(new_pool(shape), 0)


def bad_contract(**body: Any) -> Callable[[], object]:
    return lambda: type("TestMine", (ScorerContract,), body)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bad_contract(), r"TestMine names no component: write `component = MyClass\(MyClass.Config\(\)\)`"),
        (bad_contract(component=Streaming), r"TestMine.component must be an instance of ImportanceScorer \(got <class"),
    ],
)
def test_a_contract_without_an_instance_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        make()


def test_a_contract_is_no_test_until_it_has_a_component() -> None:
    between: Any = type("Between", (ScorerContract,), {"causal": False})
    mine: Any = type("TestMine", (between,), {"component": Streaming()})
    assert [kind.__test__ for kind in (ScorerContract, between, mine)] == [False, False, True]
    assert mine.test_heads_permute is not between.__dict__.get("test_heads_permute")
    assert mine.test_causal is None  # it asks for no queries
