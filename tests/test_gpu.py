"""What only a CUDA device can show: captured graphs follow what changes in place, and give what an eager loop gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hardkv import HardKVRuntime
from hardkv.graph import Graphs
from hardkv.model_adapter import LoadedModel
from hardkv.scheduler import Scheduler
from tests.test_runtime import BASE, CACHE, prompt
from tests.tiny_models import tiny_model, tiny_tokenizer

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = [
    pytest.mark.gpu,
    # Torch warns that its watch for waits is a prototype, and of much else that depends on the machine.
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device; torch sees none here"),
]
SETTINGS: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
METHODS: dict[str, dict[str, Any]] = {
    "online": {},
    "window": {"scorer": {"name": "snapkv", "rows": 16}},
    "votes": {"scorer": {"name": "attention"}, "budget": {"name": "top_p", "p": 0.8, "floor_tokens": 16}},
    "masks": {"scorer": {"name": "window_max", "online": False}, "regularizer": {"name": "sparse_load"}},
    "temperature": {"scorer": {"name": "rkv"}, "calibrator": {"name": "temperature"}},
    "merge": {"condenser": {"name": "merge"}, "cache": {**CACHE, "condensed_slots": 8}},
    "all kept": {"compression": False},
}


def runtime_on(device: torch.device, family: str, method: dict[str, Any], captures: bool) -> HardKVRuntime:
    """A tiny model on a device, its steps captured or not; batches are padded either way."""
    model: Any = tiny_model(family)
    loaded = LoadedModel(model.to(device), tiny_tokenizer())
    model_settings = {"dtype": "float32", "device": str(device)}
    settings = {**BASE, "model": model_settings, "regularizer": {"name": "rewrite"}, **method}
    runtime = HardKVRuntime.from_config(settings, loaded=loaded)
    runtime._loop.graphs = Graphs(device, pads=True)
    runtime._loop.graphs.captures = captures
    return runtime


def scheduler_of(runtime: HardKVRuntime, prompts: list[list[int]], admitted: int) -> tuple[Scheduler, list[Any]]:
    """The first prompts prefilled, no step done; with the requests of the others."""
    requests, _ = runtime._requests(prompts, dict(SETTINGS))
    runtime._prepare(requests)
    runtime._loop.prepare()
    scheduler = Scheduler(runtime._loop, 2048, None, False)
    for request in requests[:admitted]:
        list(scheduler._admit(request))
    return scheduler, requests[admitted:]


@contextmanager
def no_waits() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def decoded(family: str, captures: bool, poison: bool = False) -> list[Tensor]:
    """Logits of steps between which sequences join, leave and are compressed."""
    runtime = runtime_on(DEVICE, family, {}, captures)
    scheduler, later = scheduler_of(runtime, [prompt(90 + i, 50 + 9 * i) for i in range(4)], 3)
    cache, loop, running = runtime._cache, runtime._loop, scheduler.running
    found = []
    for step in range(45):
        if step == 10:
            list(scheduler._admit(later[0]))
        if step in (18, 30):
            cache.close(running.pop(1).cascade)
        for one in running:
            if one.cascade.dense.full:
                cache.compress(one.cascade)
        if poison:
            for tensor in (cache.pool.keys, cache.pool.values, cache.pool.statistic):
                tensor[cache.pool.nobody_page] = float("nan")
            for ring in cache.sliding._rings.values():
                ring._of(cache.step.nobody, ring.keys).fill_(float("nan"))
        _, logits = loop.step([one.cascade for one in running], [one.rules for one in running])
        found.append(logits.clone())
    assert cache.compressions >= 6
    assert not captures or len(loop.graphs) == 2  # for four rows and for two
    return found


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_replay_follows_what_changes_in_place(family: str) -> None:
    """Join, leave, compression between replays, rows of nobody that hold NaN: bit by bit what an eager step gives."""
    eager = decoded(family, captures=False)
    for poison in (False, True):
        captured = decoded(family, True, poison)
        for step, (one, other) in enumerate(zip(eager, captured, strict=True)):
            assert torch.isfinite(one).all()
            assert torch.equal(other, one), f"step {step}: off by up to {float((other - one).abs().max()):.3g}"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("name", METHODS)
def test_captured_eager_and_reference_loops_choose_the_same_tokens(name: str, family: str) -> None:
    prompts = [prompt(40 + index, length) for index, length in enumerate((130, 60, 97))]
    ways = {
        "captured": runtime_on(DEVICE, family, METHODS[name], captures=DEVICE.type == "cuda"),
        "eager": runtime_on(DEVICE, family, METHODS[name], captures=False),
        "reference": runtime_on(torch.device("cpu"), family, METHODS[name], captures=False),
    }
    found = {way: runtime.generate(prompts, **SETTINGS) for way, runtime in ways.items()}
    for way in ("eager", "reference"):
        for one, other in zip(found["captured"], found[way], strict=True):
            assert other.token_ids == one.token_ids, way
            assert other.stats.compressions == one.stats.compressions
    assert name == "all kept" or all(one.stats.compressions >= 3 for one in found["captured"])


@torch.inference_mode()
def test_a_captured_step_never_waits_for_the_device() -> None:
    runtime = runtime_on(DEVICE, "llama", {}, captures=True)
    scheduler, _ = scheduler_of(runtime, [prompt(95, 70), prompt(96, 50)], 2)
    with pytest.raises(RuntimeError, match="synchronizing"), no_waits():
        torch.ones(1, device=DEVICE).item()
    cascades, rules = [one.cascade for one in scheduler.running], [one.rules for one in scheduler.running]
    runtime._loop.step(cascades, rules)
    with no_waits():
        for _ in range(5):
            runtime._loop.step(cascades, rules)
    runtime._cache.compress(cascades[0])
    with no_waits():
        for _ in range(5):
            runtime._loop.step(cascades, rules)
