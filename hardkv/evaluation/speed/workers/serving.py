"""The worker's side: a request is one line of JSON on stdin, its reply one line on stdout. Knows nothing of hardkv.

Whatever libraries print goes to stderr. A request that fails is answered by `{"error": text}`, and the next is awaited.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Reply = dict[str, Any]
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Channel:
    """The two pipes; stdout is taken away from everybody else."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any]:
        """Wait for the next request; the process ends when there is none to come."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(0)
        request: dict[str, Any] = json.loads(line)
        return request

    def reply(self, values: Reply) -> None:
        """Answer the request received last."""
        self._out.write(json.dumps(values) + "\n")
        self._out.flush()


class Peer(ABC):
    """One way to decode a batch, in a process of its own."""

    @abstractmethod
    def load(self, request: dict[str, Any]) -> Reply:
        """Load the weights in `folder`; gives `versions`."""

    @abstractmethod
    def start(self, request: dict[str, Any]) -> Reply:
        """Read `prompts` and choose each one's first token; `prefill_seconds`, `kv_bytes`."""

    @abstractmethod
    def steps(self, request: dict[str, Any]) -> Reply:
        """Decode `count` tokens of every sequence; `seconds`, `step_seconds`, what compressions took, `kv_bytes`."""

    @abstractmethod
    def stop(self, request: dict[str, Any]) -> Reply:
        """Forget the sequences."""

    @abstractmethod
    def force(self, request: dict[str, Any]) -> Reply:
        """Feed `continuations` after `prompts`; `kl` and `top1_agreement` to the same peer with every token kept."""


def serve(peer: Peer, channel: Channel) -> None:
    """Answer requests until stdin closes."""
    warnings.simplefilter("ignore")
    handlers = {"load": peer.load, "start": peer.start, "steps": peer.steps, "stop": peer.stop, "force": peer.force}
    while True:
        request = channel.receive()
        if request["do"] in ("load", "start"):
            reset_peaks()
        try:
            reply = {**handlers[request["do"]](request), **memory()}
        except Exception as error:  # whatever a stranger's library raises is its row's note
            text = str(error).strip().split("\n")[0]
            reply = {"error": f"{type(error).__name__}: {text}"}
        channel.reply(reply)


def memory() -> Reply:
    """Bytes of this process now and at most since `reset_peaks`, None where the system does not say; of CUDA too."""
    found: Reply = {"rss_bytes": _status("VmRSS"), "rss_peak_bytes": _status("VmHWM"), "device_peak_bytes": None}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found["device_peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def reset_peaks() -> None:
    """Start new peaks; of the process where Linux lets us."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def _status(name: str) -> int | None:
    if not _STATUS.exists():
        return None
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def distances(full: Sequence[Any], rows: Sequence[Any]) -> Reply:
    """`kl` and `top1_agreement` of log-probabilities `[T, vocabulary]`, one tensor per text, each counting the same."""
    pairs = list(zip(full, rows, strict=True))
    kl = [float((one.exp() * (one - other)).sum(-1).mean()) for one, other in pairs]
    same = [float((one.argmax(-1) == other.argmax(-1)).float().mean()) for one, other in pairs]
    return {"kl": sum(kl) / len(kl), "top1_agreement": sum(same) / len(same)}


class StepClock:
    """Wall time of a block of steps, and of each."""

    def __init__(self) -> None:
        self._marks = [time.perf_counter()]

    def mark(self) -> None:
        """A step is over."""
        self._marks.append(time.perf_counter())

    def reply(self) -> Reply:
        """`seconds` up to the last mark, and `step_seconds`."""
        steps = [after - before for before, after in zip(self._marks, self._marks[1:], strict=False)]
        return {"seconds": self._marks[-1] - self._marks[0], "step_seconds": steps}
