"""Compiles what `launch_*` functions launch, for GPUs that need not be there, and reads what became of it.

Triton's own launcher does the work: its driver is replaced by one that names a target, and each launch stops after it
has compiled. So argument types, specialisation on alignment and values, and options are those of a real launch with
these arguments. Nothing runs, so the arguments may be zeros on the CPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

SHARED_LIMITS = {80: 166_912, 90: 232_448}
"""Bytes of shared memory that one program may have, by compute capability."""
MULTIPROCESSORS = {80: 108, 90: 132}
WIDE_BYTES = 16
"""The widest load of one thread, which reads of K and V ought to be."""

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_LOCAL_ACCESS = re.compile(r"\b(?:LDL|STL)\b")

_REGISTER = re.compile(r"%[a-z]+\d+")
_PARAMETER = re.compile(r"ld\.param\S*\s+(%\w+), \[\w+_param_(\d+)\]")
_DEFINITION = re.compile(r"\s*(?:@!?%p\d+\s+)?(?!ld|st\.|cp\.)[a-z]\S*\s+(\{[^}]*\}|%[\w|%]+),(.*);")
_LOAD = re.compile(r"\bld\.global\S*?(?:\.v(?P<vector>\d))?\.[a-z](?P<bits>\d+)\s.*\[\s*(?P<address>%rd\d+)")
_STORE = re.compile(r"\bst\.global\S*?(?:\.v(?P<vector>\d))?\.[a-z](?P<bits>\d+)\s+\[\s*(?P<address>%rd\d+)")
_ASYNC_LOAD = re.compile(
    r"\bcp\.async\.c[ag]\.shared\.global\S*\s+\[[^\]]*\],\s*\[\s*(?P<address>%rd\d+)[^\]]*\],\s*(?P<bytes>0x[0-9a-f]+|\d+)"
)


@dataclass(frozen=True)
class Row:
    """What the compiler made of one kernel; `spills` counts instructions that touch local memory."""

    op: str
    variant: str
    kernel: str
    dtype: str
    head_dim: int
    target: int
    num_warps: int
    num_stages: int
    registers: int
    shared_bytes: int
    stack_bytes: int
    spills: int

    @property
    def key(self) -> tuple[str | int, ...]:
        """What the project chooses, without what a version of the compiler makes of it."""
        return tuple(asdict(self).values())[:8]


@dataclass(frozen=True)
class Access:
    """One load from global memory or store to it: bytes per thread, and the kernel's arguments it goes to.

    `barriers` counts the barriers above it in the kernel's text.
    """

    width_bytes: int
    arguments: frozenset[str]
    stores: bool
    barriers: int


@dataclass(frozen=True)
class Compiled:
    """A row of the table, with how its kernel reaches global memory."""

    row: Row
    accesses: tuple[Access, ...]


class _Driver:
    """Stands in for the CUDA driver; the device's number is its compute capability."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _compiling(capability: int) -> Iterator[list[Any]]:
    """Launches within compile for that capability, launch nothing, and are listed with what was compiled."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    launch, compiled = JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        compiled.append(kernel)
        return kernel

    def programs(device: Any, per_multiprocessor: int) -> int:
        return MULTIPROCESSORS[capability] * per_multiprocessor

    users = [module for name, module in sys.modules.items() if name.startswith("hardkv_kernels.")]
    # Triton 3.9 warns unless it is said whether multiply and add may be fused; this is its default.
    fusion = os.environ.get("TRITON_DEFAULT_FP_FUSION", "1")
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"TRITON_DEFAULT_FP_FUSION": fusion}))
        stack.enter_context(patch.object(JITFunction, "run", compile_only))
        stack.enter_context(patch.object(driver, "_active", _Driver(capability)))
        for user in users:
            if "programs_for" in vars(user):
                stack.enter_context(patch.object(user, "programs_for", programs))
        yield compiled


def compile_launch(
    launch: Callable[[], object], op: str, variant: str, dtype: str, head_dim: int, target: int
) -> list[Compiled]:
    """Everything that `launch` launches, compiled for `target`, each kernel once."""
    with _compiling(target) as kernels:
        launch()
    unique = {kernel.metadata.name: kernel for kernel in kernels}
    return [_read(kernel, (op, variant, name, dtype, head_dim, target)) for name, kernel in unique.items()]


def _read(kernel: Any, identity: tuple[str, str, str, str, int, int]) -> Compiled:
    import triton

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])

        def dump(what: str) -> str:
            command = [triton.knobs.nvidia.cuobjdump.path, what, str(cubin)]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        found = _RESOURCES.search(dump("--dump-resource-usage"))
        assert found is not None
        registers, stack, local = map(int, found.groups())
        # Registers spill to the stack; without one there is nothing to look for in the assembly, which takes longest.
        spills = len(_LOCAL_ACCESS.findall(dump("-sass"))) if stack + local else 0
    options = kernel.metadata
    row = Row(
        *identity,
        num_warps=options.num_warps,
        num_stages=options.num_stages,
        registers=registers,
        shared_bytes=options.shared,
        stack_bytes=stack + local,
        spills=spills,
    )
    return Compiled(row, tuple(global_accesses(kernel.asm["ptx"], kernel.src.signature)))


def global_accesses(ptx: str, signature: dict[str, str]) -> Iterator[Access]:
    """Every load and store of global memory in a kernel's text, with the pointers that its address derives from.

    `signature` gives the type of each argument, in order; constants are not in the text. An address is followed back
    through arithmetic, not through memory: a value that was loaded is an offset.
    """
    lines = ptx.splitlines()
    given = [(name, kind) for name, kind in signature.items() if kind != "constexpr"]
    parameters = {match[1]: given[int(match[2])] for line in lines if (match := _PARAMETER.search(line))}
    roots = {register: name for register, (name, kind) in parameters.items() if kind.startswith("*")}
    sources: dict[str, set[str]] = {}
    for line in lines:
        if match := _DEFINITION.match(line):
            for register in _REGISTER.findall(match[1]):
                sources.setdefault(register, set()).update(_REGISTER.findall(match[2]))
    barriers = 0
    for line in lines:
        barriers += "bar.sync" in line
        stored = _STORE.search(line)
        if match := stored or _LOAD.search(line):
            width = int(match["vector"] or 1) * int(match["bits"]) // 8
        elif match := _ASYNC_LOAD.search(line):
            width = int(match["bytes"], 0)
        else:
            continue
        reached: set[str] = set()
        frontier = {match["address"]}
        while frontier:
            reached |= frontier
            frontier = set().union(*(sources.get(register, ()) for register in frontier)) - reached
        arguments = frozenset(roots[register] for register in reached & roots.keys())
        yield Access(width, arguments, stored is not None, barriers)
