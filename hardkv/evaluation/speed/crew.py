"""All ways at once: each way's process, what it said last, and why it left."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import hardkv.model_adapter.packing
from hardkv.config import HardKVConfig
from hardkv.evaluation.speed.process import PeerError, PeerProcess
from hardkv.evaluation.speed.ways import Way

Say = Callable[[str], None]


class Crew:
    """Processes of ways on one saved model; one that fails is ended, and the others go on."""

    def __init__(self, ways: Iterable[Way], folder: Path, config: HardKVConfig, timeout_s: float, say: Say) -> None:
        self.ways = list(ways)
        self.folder, self.config, self.timeout_s, self.say = folder, config, timeout_s, say
        self.notes: dict[str, str] = {way.name: f"not run: {way.obstacle}" for way in self.ways if way.obstacle}
        self.versions: dict[str, dict[str, str]] = {}
        self.loaded_rss: dict[str, int | None] = {}
        self._running: dict[str, PeerProcess] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in list(self._running):
            self.end(name)

    def ask(self, way: Way, do: str, **values: Any) -> dict[str, Any] | None:
        """One request; None, and the way's note says why, when it failed now or before."""
        if way.name in self.notes:
            return None
        try:
            return self._process(way).ask(do, **values)
        except PeerError as error:
            self.notes[way.name] = f"not run: {error}"
            self.say(f"{way.name}: {self.notes[way.name]}")
            self.end(way.name)
            return None

    def end(self, name: str) -> None:
        """End a way's process, if it has one; the next request starts a new one."""
        process = self._running.pop(name, None)
        if process is not None:
            process.close()

    def _process(self, way: Way) -> PeerProcess:
        if way.name in self._running:
            return self._running[way.name]
        self.say(f"{way.name}: loading")
        threads, model = torch.get_num_threads(), self.config.model
        process = PeerProcess(way.command, self.timeout_s, {"OMP_NUM_THREADS": str(threads)})
        self._running[way.name] = process
        packs = model.pack_weights and model.dtype == "bfloat16" and torch.device(model.device).type == "cpu"
        packer = hardkv.model_adapter.packing.__file__ if packs else None
        reply = process.ask(
            "load",
            folder=str(self.folder),
            dtype=model.dtype,
            device=model.device,
            threads=threads,
            packer=packer,
            settings=way.settings,
        )
        self.versions[way.name] = reply["versions"]
        self.loaded_rss[way.name] = reply["rss_bytes"]
        return process
