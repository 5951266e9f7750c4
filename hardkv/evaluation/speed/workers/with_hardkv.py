"""Decodes with hardkv's runtime; the requests for steps are answered from inside its loop, by an observer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from serving import (  # type: ignore[import-not-found]  # beside this file
    Channel,
    Peer,
    Reply,
    StepClock,
    distances,
    memory,
    serve,
)

from hardkv import __version__
from hardkv.cache import CascadeCache
from hardkv.config import HardKVConfig, resolve
from hardkv.errors import CapacityError
from hardkv.model_adapter import load_model
from hardkv.registry import load_registry
from hardkv.runtime import HardKVRuntime
from hardkv.tiers.cascade import Cascade


class _Stopped(Exception):
    """The batch is to be forgotten."""


class _Gate:
    """Lets the runtime take as many steps as were asked for, then answers and waits for the next request."""

    def __init__(self, channel: Channel, batch: int) -> None:
        self.channel, self.batch = channel, batch
        self.kept: list[float] = []
        self._placed = self._tokens = self._quota = 0
        self._row = -1
        self._started = time.perf_counter()
        self._clock = StepClock()
        self._spent, self._passes = 0.0, 0

    def on_compression(self, index: int, cascade: Cascade, cache: CascadeCache) -> None:
        self.kept += cascade.kept_after_compression[-1:]
        self._placed += 1
        if self._placed == self.batch:
            seconds = time.perf_counter() - self._started
            self._spent = cache.watch.seconds["prefill_compression"]
            reply = {"prefill_seconds": seconds, "compression_seconds": self._spent, "passes": cache.compressions}
            self._wait({**reply, **self._held(cache)}, cache)

    def on_step(self, index: int, cascade: Cascade, cache: CascadeCache) -> None:
        if self._placed < self.batch:
            raise CapacityError(f"only {self._placed} of {self.batch} sequences fit at once")
        if index <= self._row:
            self._clock.mark()
        self._row = index
        self._tokens += 1
        if self._tokens == self._quota:
            passes, spent = cache.compressions - self._passes, cache.watch.seconds["compression"] - self._spent
            reply = {**self._clock.reply(), "compression_seconds": spent, "passes": passes}
            self._wait({**reply, **self._held(cache)}, cache)

    def _held(self, cache: CascadeCache) -> Reply:
        mean = sum(self.kept) / len(self.kept) if self.kept else None
        return {"kv_bytes": cache.kv_bytes, "kv_bytes_reserved": cache.reserved_bytes, "mean_tokens": mean, **memory()}

    def _wait(self, reply: Reply, cache: CascadeCache) -> None:
        self.channel.reply(reply)
        request = self.channel.receive()
        if request["do"] != "steps":
            raise _Stopped
        self._quota, self._tokens, self._row = request["count"] * self.batch, 0, self.batch
        self._spent, self._passes = cache.watch.seconds["compression"], cache.compressions
        self._clock = StepClock()


class HardKVPeer(Peer):  # type: ignore[misc]  # not found by mypy, see above
    """The runtime with one configuration."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def load(self, request: dict[str, Any]) -> Reply:
        torch.set_num_threads(request["threads"])
        settings = request["settings"]
        folder = settings["plugins_folder"]
        self.config = HardKVConfig.model_validate(settings["config"])
        self.registry = load_registry(self.config.plugins, None if folder is None else Path(folder))
        self.loaded = load_model(
            request["folder"], request["dtype"], request["device"], pack_weights=request["packer"] is not None
        )
        return {"versions": {"hardkv": __version__, "torch": torch.__version__}}

    def start(self, request: dict[str, Any]) -> Reply:
        """Answers only when the batch is stopped; until then, the gate does."""
        runtime = self._runtime(self.config)
        prompts = request["prompts"]
        gate = _Gate(self.channel, len(prompts))
        try:
            for generation in runtime.generate(
                prompts, max_new_tokens=request["new_tokens"], temperature=0.0, ignore_eos=True, observer=gate
            ):
                if generation.error is not None:
                    raise RuntimeError(generation.error)
        except _Stopped:
            return {}
        finally:
            runtime.reset()
        raise RuntimeError(f"all {request['new_tokens']} tokens were generated before the batch was stopped")

    def steps(self, request: dict[str, Any]) -> Reply:
        raise RuntimeError("no batch is running")

    def stop(self, request: dict[str, Any]) -> Reply:
        return {}

    def force(self, request: dict[str, Any]) -> Reply:
        found, means = [], []
        for config in (self.config.model_copy(update={"compression": False}), self.config):
            runtime = self._runtime(config)
            rows = runtime.teacher_force(request["prompts"], request["continuations"])
            means.append(runtime.stats().mean_tokens_after_compression)
            runtime.reset()
            found.append([row[1:] for row in rows])
        return {**distances(*found), "mean_tokens": means[-1]}

    def _runtime(self, config: HardKVConfig) -> HardKVRuntime:
        return HardKVRuntime(config, resolve(config, self.registry), self.loaded)


if __name__ == "__main__":
    CHANNEL = Channel()
    serve(HardKVPeer(CHANNEL), CHANNEL)
