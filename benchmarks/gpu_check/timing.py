"""Times of work on the device: medians of graph replays by CUDA events; of plain runs where there is no CUDA."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch


def median_ms(body: Callable[[], object], device: torch.device, repeats: int, seconds: float) -> tuple[float, int]:
    """Median milliseconds of `body` and how many runs it is of: `repeats`, fewer where they take over `seconds`."""
    if device.type != "cuda":
        return _on_the_host(body, repeats)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate it
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            body()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    times = [_replayed(graph) for _ in range(2)][1:]
    count = max(3, min(repeats, int(seconds * 1e3 / max(times[0], 1e-3))))
    times = [_replayed(graph) for _ in range(count)]
    del graph
    return statistics.median(times), count


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # nor this
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _on_the_host(body: Callable[[], object], repeats: int) -> tuple[float, int]:
    body()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        body()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), repeats


def free_memory(device: torch.device) -> None:
    """Give back what nobody refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
