"""Compression passes of some sequences beside decode steps of the others.

A sequence that is being compressed takes no part in the steps meanwhile. Its lane's pages and its row of the block
tables are its own, so a pass on a side stream and a step on the main one never touch the same memory, and no table
needs a second copy. The order between the streams is kept by events; the host waits for neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hardkv.cache import CascadeCache
from hardkv.compression import Decision
from hardkv.errors import HardKVError
from hardkv.tiers.cascade import Cascade


@dataclass
class _Pass:
    cascade: Cascade
    decision: Decision | None = None


class Overlap:
    """The passes under way. Where there is no CUDA they run at once, in the same two halves."""

    def __init__(self, cache: CascadeCache) -> None:
        self.cache = cache
        self.device = cache.geometry.device
        self._stream: Any = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._passes: list[_Pass] = []
        self._mark: Any = None

    def __contains__(self, cascade: Cascade) -> bool:
        return any(one.cascade is cascade for one in self._passes)

    def add(self, cascade: Cascade) -> None:
        """Start with a sequence from the next `advance` on."""
        self._passes.append(_Pass(cascade))

    def mark(self) -> None:
        """Everything enqueued so far comes before the halves that `advance` starts next."""
        if self._stream is not None:
            self._mark = torch.cuda.current_stream(self.device).record_event()

    @torch.inference_mode()
    def advance(self, wait: bool) -> list[tuple[Cascade, HardKVError | None]]:
        """Start each pass's next half if it can go on; gives the sequences that are done, with what went wrong.

        `wait`: until every pass is done, since nothing else is left to do.
        """
        done: list[tuple[Cascade, HardKVError | None]] = []
        going = list(self._passes)
        while going:
            for one in list(going):
                error: HardKVError | None = None
                try:
                    ended = self._advance(one, wait)
                except HardKVError as raised:
                    ended, error = True, raised
                if ended:
                    self._join()
                    self._passes.remove(one)
                    done.append((one.cascade, error))
            going = list(self._passes) if wait else []
        return done

    def abandon(self) -> None:
        """Forget the passes; what they have enqueued comes before whatever follows on the main stream."""
        self._passes.clear()
        self._join()

    def _advance(self, one: _Pass, wait: bool) -> bool:
        with self.cache.watch.phase("compression"), torch.cuda.stream(self._stream):
            if one.decision is None:
                self._follow_mark()
                one.decision = self.cache.compressor.decide(one.cascade)
                return False
            if not wait and not one.decision.ready:
                return False
            self._follow_mark()
            self.cache.carry_out(one.decision)
        return True

    def _follow_mark(self) -> None:
        if self._stream is not None and self._mark is not None:
            self._stream.wait_event(self._mark)

    def _join(self) -> None:
        """Let the main stream go on only after what the passes have enqueued."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
