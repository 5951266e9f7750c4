"""What the five contracts share: properties that become tests, and the lines that reproduce a failure."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from hardkv.errors import PluginError
from hardkv.interfaces import Component

# All but `explain`, which would name lines of ours.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink)


def require(condition: bool | Tensor, message: str) -> None:
    """Raise an `AssertionError` with `message` unless the condition holds."""
    if not bool(condition):
        raise AssertionError(message)


def require_same(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-3) -> None:
    """Raise an `AssertionError` unless two tensors agree; 0.0 asks for every bit, NaN equals NaN.

    The tolerance is relative, and absolute in units of the largest finite value expected: that is what rounding leaves
    where sums are taken in another order.
    """
    finite = expected[torch.isfinite(expected)].double()
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    try:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 1e-2 * scale, equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"{what}\n{error}") from None


def always(contract: type[Contract]) -> bool:
    """For a property that every component has."""
    return True


@dataclass(frozen=True)
class Property:
    """One property: a function that checks it on a case, and where the cases come from."""

    check: Callable[..., None]
    """`check(component, case)`, or `check(component, case, contract)`; raises AssertionError."""
    cases: Callable[[], st.SearchStrategy[Any]]
    applies: Callable[[type[Contract]], bool] = always
    most_examples: int | None = None
    """For a check that is slow, or whose outcome hardly depends on the case."""

    @property
    def name(self) -> str:
        return self.check.__name__.removeprefix("check_")

    def run(self, contract: type[Contract], case: Any) -> None:
        """Check the contract's component on one case."""
        arguments = [contract] if self.reads_contract else []
        self.check(contract.component, case, *arguments)

    @property
    def reads_contract(self) -> bool:
        return len(inspect.signature(self.check).parameters) == 3


class Contract:
    """Base of the five: each property in `properties` becomes a test of every subclass that names a `component`."""

    __test__ = False

    component: ClassVar[Any]
    interface: ClassVar[type[Component]]
    properties: ClassVar[tuple[Property, ...]] = ()
    max_examples: ClassVar[int | None] = None
    """Cases tried for each property; None: as the Hypothesis profile says."""
    capture_elsewhere: ClassVar[bool] = True
    """False for a component that makes a `torch.Generator` or holds tensors: see `assert_capture_safe`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make the tests anew for this class: Hypothesis refuses one that several classes inherit."""
        super().__init_subclass__(**kwargs)
        component = getattr(cls, "component", None)
        if component is None:
            if cls.__name__.startswith("Test"):
                raise PluginError(f"{cls.__name__} names no component: write `component = MyClass(MyClass.Config())`")
            return
        if not isinstance(component, cls.interface):
            raise PluginError(
                f"{cls.__name__}.component must be an instance of {cls.interface.__name__} (got {component!r})"
            )
        cls.__test__ = True
        for prop in cls.properties:
            setattr(cls, f"test_{prop.name}", _as_test(cls, prop) if prop.applies(cls) else None)


def _as_test(contract: type[Contract], prop: Property) -> Callable[..., None]:
    """A test method that draws cases and prints how to reproduce a failure."""
    wanted = contract.max_examples or settings().max_examples
    examples = min(wanted, prop.most_examples or wanted)

    def test(self: object, case: Any) -> None:
        try:
            prop.run(contract, case)
        except Exception:
            note(f"To reproduce this, run:\n\n{snippet(contract, prop, case)}\n")
            raise

    test.__name__ = f"test_{prop.name}"
    test.__qualname__ = f"{contract.__qualname__}.{test.__name__}"
    test.__module__ = contract.__module__
    test.__doc__ = prop.check.__doc__
    # What hardly depends on the case is not worth shrinking, which takes hundreds of runs.
    phases = _PHASES[:3] if prop.most_examples else _PHASES
    return settings(deadline=None, max_examples=examples, phases=phases)(given(case=prop.cases())(test))


def snippet(contract: type[Contract], prop: Property, case: Any) -> str:
    """Python that runs one check on one case again."""
    imports, component = _rebuilt(contract)
    if prop.reads_contract:
        imports.add(_import_of(contract))
    imports |= {_import_of(type(case)), _import_of(prop.check)}
    last = f", {contract.__name__}" if prop.reads_contract else ""
    call = f"{prop.check.__name__}(\n    {component},\n    {case!r}{last},\n)"
    return "\n".join([*sorted(imports), "", call])


def _rebuilt(contract: type[Contract]) -> tuple[set[str], str]:
    """Imports and an expression that give the component: from its options, else from the contract's class."""
    component = contract.component
    kind, config = type(component), component.config
    parameters = list(inspect.signature(kind.__init__).parameters)
    if not _can_import(kind) or parameters != ["self", "config"] or type(config) is not kind.Config:
        return {_import_of(contract)}, f"{contract.__qualname__}.component"
    options = ", ".join(f"{name}={getattr(config, name)!r}" for name in type(config).model_fields)
    return {_import_of(kind)}, f"{kind.__qualname__}({kind.__qualname__}.Config({options}))"


def _import_of(thing: Any) -> str:
    """The import that makes a class or function known under its name."""
    if not _can_import(thing):
        return f"# {thing.__qualname__} cannot be imported: move it to the top of its module to run this."
    return f"from {thing.__module__} import {thing.__qualname__.split('.')[0]}"


def _can_import(thing: Any) -> bool:
    found: Any = sys.modules.get(thing.__module__)
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is thing
