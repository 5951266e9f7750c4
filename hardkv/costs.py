"""Measures what reading and moving KV bytes costs on this device, for the memory-time rule."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

_PROBE_BYTES = 8 << 20


@dataclass(frozen=True)
class DeviceCosts:
    """Seconds per byte attended, seconds per byte moved, seconds to start a move."""

    read_seconds_per_byte: float
    copy_seconds_per_byte: float
    launch_seconds: float


def measure_costs(device: torch.device, dtype: torch.dtype) -> DeviceCosts:
    """Time an attention-like read and a scattered copy of 8 MiB, and an empty copy; takes some 50 ms."""
    pages, slots, head_dim = _PROBE_BYTES // (32 * 64 * dtype.itemsize), 32, 64
    content = torch.zeros(pages, slots, head_dim, dtype=dtype, device=device)
    query = torch.zeros(pages, 4, head_dim, dtype=dtype, device=device)
    order = torch.randperm(pages, device=device)
    none = order[:0]

    def read() -> None:
        torch.bmm(query, content.transpose(1, 2))

    def copy() -> None:
        content[order] = content[order.flip(0)]

    def launch() -> None:
        content[none] = content[none]

    # Rounded, so that timing noise rarely changes what is compacted: runs should repeat.
    return DeviceCosts(
        read_seconds_per_byte=_rounded(_median_seconds(read, device) / content.nbytes),
        copy_seconds_per_byte=_rounded(_median_seconds(copy, device) / content.nbytes),
        launch_seconds=_rounded(_median_seconds(launch, device)),
    )


def _rounded(seconds: float) -> float:
    """To the nearest power of two."""
    return float(2.0 ** round(math.log2(seconds)))


def _median_seconds(action: object, device: torch.device, repeats: int = 5) -> float:
    assert callable(action)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]
