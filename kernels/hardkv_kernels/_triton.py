"""Triton where it is installed; stand-ins where it is not, so that the package imports on any machine."""

from __future__ import annotations

import functools
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheels for this platform, or a CPU-only installation
    triton = None
    tl = None


def jit(function: Any) -> Any:
    """`triton.jit`; without Triton the function itself, which nothing then calls."""
    return function if triton is None else triton.jit(function)


def interprets() -> bool:
    """Whether kernels run in Triton's interpreter, whose bfloat16 arithmetic is wrong unless done in float32."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def programs_for(device: Any, per_multiprocessor: int) -> int:
    """How many programs a persistent grid has: so many for each multiprocessor of a CUDA device, else a handful."""
    if device.type != "cuda":
        return 5
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * per_multiprocessor


def on_device(launch: Any) -> Any:
    """`launch` on the device of its first argument, a CUDA tensor: Triton launches on the current one."""

    @functools.wraps(launch)
    def guarded(first: torch.Tensor, *rest: Any) -> Any:
        with torch.cuda.device(first.device):
            return launch(first, *rest)

    return guarded


__all__ = ["interprets", "jit", "on_device", "programs_for", "tl", "triton"]
