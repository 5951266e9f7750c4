"""One call of each `launch_*` for each kind of kernel that it can give, at sizes of an 8-billion-parameter model."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import hardkv_kernels
from tests.aot.harness import Compiled, compile_launch

LAYERS, ROWS, HEADS, GROUP, LANES = 36, 32, 8, 4, 33
PAGES, PAGE_SLOTS, TABLE_WIDTH, RING_ROWS, TOKENS = 1024, 16, 64, 32, 1200
OWNERS = ROWS * HEADS
HEAD_DIM = 128
HEAD_DIMS = (64, 80, 96, 128, 256)
TARGETS = (80, 90)


@dataclass(frozen=True)
class Case:
    """One call of an op's `launch_*`.

    `head_dim` is 0 where there is none; `wide` are the kernel's arguments that are read or written 16 bytes at a time.
    """

    op: str
    variant: str
    dtype: torch.dtype
    head_dim: int
    arguments: Callable[[torch.dtype, int], tuple[Any, ...]]
    wide: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = (self.op, self.variant, str(self.dtype).removeprefix("torch."), str(self.head_dim))
        return "-".join(part for part in parts if part)

    def compile(self, target: int) -> list[Compiled]:
        """All kernels of this call, compiled for `target`."""
        launch = vars(importlib.import_module(MODULES.get(self.op, f"hardkv_kernels.{self.op}")))[f"launch_{self.op}"]
        dtype = str(self.dtype).removeprefix("torch.")
        arguments = self.arguments(self.dtype, self.head_dim)
        return compile_launch(lambda: launch(*arguments), self.op, self.variant, dtype, self.head_dim, target)


MODULES = {"open_slots": "hardkv_kernels.append"}
"""Where an op lives that shares another's file."""


def _zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def _pool(dtype: torch.dtype, head_dim: int) -> Tensor:
    return _zeros(PAGES, PAGE_SLOTS, head_dim, dtype=dtype)


def _slots(dtype: torch.dtype) -> Tensor:
    return _zeros(PAGES, PAGE_SLOTS, dtype=dtype)


def _ragged_decode(
    logits: bool, softcap: float | None, sinks: bool, dtype: torch.dtype, head_dim: int
) -> tuple[Any, ...]:
    return (
        _zeros(ROWS, HEADS, GROUP, head_dim, dtype=dtype),
        _pool(dtype, head_dim),
        _pool(dtype, head_dim),
        _slots(torch.float32),
        _zeros(LANES, HEADS, TABLE_WIDTH, dtype=torch.int32),
        _zeros(ROWS),
        _zeros(OWNERS + 1, dtype=torch.int32),
        _zeros(PAGES),
        0,
        0,
        PAGES,
        head_dim**-0.5,
        softcap,
        _zeros(HEADS, GROUP, dtype=torch.float32) if sinks else None,
        _zeros(PAGES, GROUP, PAGE_SLOTS, dtype=torch.float32) if logits else None,
        False,
    )


def _merge_states(dtype: torch.dtype, head_dim: int) -> tuple[Any, ...]:
    return _zeros(3, OWNERS * GROUP, head_dim, dtype=dtype), _zeros(3, OWNERS * GROUP, dtype=torch.float32)


def _score_update(reduction: str, dtype: torch.dtype, head_dim: int) -> tuple[Any, ...]:
    logits, lse = _zeros(PAGES, GROUP, PAGE_SLOTS, dtype=dtype), _zeros(OWNERS, GROUP, dtype=dtype)
    return _slots(dtype), logits, _zeros(PAGES), lse, 0, 0, PAGES, reduction, 4.0, 0.98, 1e-6


def _window_scores(reduction: str, capped: bool, dtype: torch.dtype, head_dim: int) -> tuple[Any, ...]:
    return (
        _zeros(1, HEADS, GROUP, RING_ROWS, head_dim, dtype=dtype),
        _zeros(1, RING_ROWS),
        _zeros(1, HEADS, TOKENS, head_dim, dtype=dtype),
        _zeros(1, HEADS, TOKENS),
        _zeros(1, HEADS, TOKENS, dtype=torch.bool),
        head_dim**-0.5,
        30.0 if capped else None,
        _zeros(HEADS, GROUP, dtype=torch.float32) if capped else None,
        reduction,
        4.0,
        0.98,
        1e-6,
        _zeros(1, HEADS, RING_ROWS, dtype=torch.float32) if reduction == "votes" else None,
    )


def _topp_threshold(dtype: torch.dtype, head_dim: int) -> tuple[Any, ...]:
    return _zeros(HEADS, RING_ROWS, TOKENS, dtype=dtype), 0.95


def _threshold_budget(dtype: torch.dtype, head_dim: int) -> tuple[Any, ...]:
    heads = LAYERS * HEADS
    limits = (_zeros(1, heads), _zeros(1, heads), _zeros(1, heads), _zeros(1))
    return _zeros(1, heads, TOKENS, dtype=dtype), *limits


def _open_slots(ring: bool, dtype: torch.dtype, head_dim: int) -> tuple[Any, ...]:
    return (
        _zeros(LAYERS, LANES, HEADS, TABLE_WIDTH, dtype=torch.int32),
        _zeros(ROWS),
        _zeros(LANES),
        _zeros(LANES),
        _slots(dtype),
        _slots(torch.int32),
        _zeros(LANES, RING_ROWS) if ring else None,
    )


def _append(ring: bool, dtype: torch.dtype, head_dim: int) -> tuple[Any, ...]:
    return (
        _zeros(ROWS, HEADS, head_dim, dtype=dtype),
        _zeros(ROWS, HEADS, head_dim, dtype=dtype),
        _zeros(OWNERS),
        _pool(dtype, head_dim),
        _pool(dtype, head_dim),
        _zeros(ROWS, HEADS, GROUP, head_dim, dtype=dtype) if ring else None,
        _zeros(LANES, RING_ROWS, HEADS, GROUP, head_dim, dtype=dtype) if ring else None,
        _zeros(ROWS),
        _zeros(ROWS),
    )


def _rewrite(dtype: torch.dtype, head_dim: int) -> tuple[Any, ...]:
    flags, slots = _zeros(OWNERS, TOKENS, dtype=torch.bool), _zeros(OWNERS, TOKENS)
    pools = (_pool(dtype, head_dim), _pool(dtype, head_dim), _slots(torch.int32), _slots(torch.float32))
    return slots, flags, flags, slots, *pools


def _cases() -> Iterator[Case]:
    def each(
        op: str,
        variant: str,
        make: Callable[[torch.dtype, int], tuple[Any, ...]],
        wide: tuple[str, ...] = (),
        dtypes: Iterable[torch.dtype] = (torch.float16, torch.bfloat16),
        head_dims: Iterable[int] = (HEAD_DIM,),
    ) -> Iterator[Case]:
        for head_dim in head_dims:
            for dtype in dtypes:
                yield Case(op, variant, dtype, head_dim, make, wide)

    # Each kernel and variant in both half precisions; other head dims where loads of K and V depend on them.
    halves, single, brain = (torch.float16, torch.bfloat16), (torch.float32,), (torch.bfloat16,)
    read, others = ("p_keys", "p_values"), [head_dim for head_dim in HEAD_DIMS if head_dim != HEAD_DIM]
    logits = partial(_ragged_decode, True, None, False)
    yield from each("ragged_decode", "logits", logits, read, halves, HEAD_DIMS)
    yield from each("ragged_decode", "logits", logits, read, single)
    yield from each("ragged_decode", "", partial(_ragged_decode, False, None, False), read)
    yield from each("ragged_decode", "logits, softcap, sinks", partial(_ragged_decode, True, 30.0, True), read)
    yield from each("merge_states", "", _merge_states, dtypes=(*halves, *single))
    pools = ("p_pool_keys", "p_pool_values")
    appended = (*read, *pools, "p_query", "p_ring")
    yield from each("append", "ring", partial(_append, True), appended, (*halves, *single))
    yield from each("append", "ring", partial(_append, True), appended, brain, others)
    yield from each("append", "", partial(_append, False), (*read, *pools))
    yield from each("rewrite", "", _rewrite, pools, (*halves, *single))
    yield from each("rewrite", "", _rewrite, pools, brain, others)
    for reduction in ("max", "mean", "power", "votes"):
        yield from each("window_scores", reduction, partial(_window_scores, reduction, False), read[:1])
    yield from each("window_scores", "max", partial(_window_scores, "max", False), read[:1], single)
    yield from each("window_scores", "max, softcap, sinks", partial(_window_scores, "max", True), read[:1])
    for reduction in ("power", "max"):
        yield from each("score_update", reduction, partial(_score_update, reduction), dtypes=single, head_dims=(0,))
    yield from each("topp_threshold", "", _topp_threshold, dtypes=single, head_dims=(0,))
    yield from each("threshold_budget", "", _threshold_budget, dtypes=single, head_dims=(0,))
    yield from each("open_slots", "", partial(_open_slots, False), dtypes=single, head_dims=(0,))
    yield from each("open_slots", "ring", partial(_open_slots, True), dtypes=single, head_dims=(0,))


CASES = tuple(_cases())


def modules() -> list[ModuleType]:
    """Every module of the package."""
    found = pkgutil.walk_packages(hardkv_kernels.__path__, "hardkv_kernels.")
    return [importlib.import_module(info.name) for info in found]


def launches() -> dict[str, tuple[Any, Any]]:
    """Every op of the package that has a `launch_*`: the operator and its launch, by name."""
    return {
        name.removeprefix("launch_"): (vars(module)[name.removeprefix("launch_")], launch)
        for module in modules()
        for name, launch in vars(module).items()
        if name.startswith("launch_") and name.removeprefix("launch_") in vars(module)
    }


def registered() -> set[str]:
    """Their names."""
    return set(launches())


def kernels() -> set[str]:
    """Every function of the package that Triton compiles and that is launched, not called by another."""
    return {name for module in modules() for name, value in vars(module).items() if name.endswith("_kernel") and value}
