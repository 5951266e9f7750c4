"""Capture and replay of the decode step, one CUDA graph per padded batch bucket; eager where there is no CUDA."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from hardkv.errors import UnsupportedModelError

Answer = tuple[Tensor, Tensor]
_WARM_UPS = 2


def bucket_of(rows: int) -> int:
    """The number of rows that a batch is padded to before capture: 1, 2, 4, 8, then multiples of 8."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


class Graphs:
    """Graphs by key, all in one memory pool. Where there is no CUDA a key's body simply runs.

    `pads`: whether batches are padded to buckets, as graphs need it.
    """

    def __init__(self, device: torch.device, pads: bool | None = None) -> None:
        self.device = device
        self.captures = device.type == "cuda"
        self.pads = self.captures if pads is None else pads
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Answer]] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def rows_for(self, rows: int) -> int:
        """How many rows a step of so many sequences has."""
        return bucket_of(rows) if self.pads else rows

    def lacks(self, key: Hashable) -> bool:
        """Whether `capture` must come before `run`."""
        return self.captures and key not in self._graphs

    def capture(self, key: Hashable, body: Callable[[], Answer]) -> None:
        """Record `body` after warm-up runs, which have their effects: let the rows be nobody's."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch does not annotate it
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                body()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=self._pool, stream=stream):
                answer = body()
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"the decode step cannot be captured in a CUDA graph: {error}. A model whose forward pass reads values "
                "from the device (dynamic RoPE, some mixtures of experts) cannot be served there"
            ) from error
        self._graphs[key] = (graph, answer)

    def run(self, key: Hashable, body: Callable[[], Answer]) -> Answer:
        """Give what `body` answers; from a graph, its content holds until the next run."""
        if not self.captures:
            return body()
        graph, answer = self._graphs[key]
        graph.replay()
        return answer

    def drop(self, key: Hashable) -> None:
        """Forget one graph."""
        self._graphs.pop(key, None)

    def clear(self) -> None:
        """Forget every graph: the buffers that they refer to are gone."""
        self._graphs.clear()
        self._pool = None
