"""Part d: thousands of steps of the whole loop, with compressions, joins and leaves.

No step may wait for the device, memory may not grow, and a captured loop gives the tokens of an eager one.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_check.models import admit, prepare, random_model, request, runtime_of, step
from benchmarks.gpu_check.plan import EndurancePlan
from benchmarks.gpu_check.reporting import Part
from benchmarks.gpu_check.timing import free_memory
from hardkv import HardKVRuntime
from hardkv.decode_loop import DecodeLoop
from hardkv.graph import Graphs
from hardkv.model_adapter import LoadedModel
from hardkv.scheduler import Request

_GROWTH_BYTES = 1 << 20
_TEMPERATURE = 0.8
"""Drawn tokens differ more than the likeliest ones, which soon repeat in a random model."""


def run(part: Part, plan: EndurancePlan, device: torch.device) -> None:
    """Three runs of the same requests: captured, eager, and captured with passes beside the steps."""
    loaded = random_model(plan.model, device)
    part.attempt("does a wait get noticed", lambda: refuses(device))
    runs: dict[str, dict[int, list[int]]] = {}
    for name, captures, overlaps, share in (
        ("captured, passes beside the steps", True, True, 0.3),
        ("captured", True, False, 0.4),
        ("eager", False, False, 0.95),
    ):
        limit = max(part.left, 5.0) * share

        def go(name: str = name, captures: bool = captures, overlaps: bool = overlaps, limit: float = limit) -> None:
            runs[name] = decode(part, plan, device, loaded, name, captures, overlaps, limit)

        part.attempt(name, go)
        free_memory(device)
    if "captured" in runs and "eager" in runs:
        part.attempt("the same tokens", lambda: same(part, runs["captured"], runs["eager"]))


def refuses(device: torch.device) -> None:
    """What is to notice a wait for the device does notice one."""
    try:
        with torch.inference_mode(), refusing_waits(device):
            torch.ones(1, device=device).item()
    except RuntimeError:
        return
    raise RuntimeError("reading a number from the device was not refused: waits in a step would go unnoticed")


class _RefusedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Stands in for the device's own watch on a CPU: refuses what would make the host wait for a device."""

    # Where autograd is off for good (inference mode), `item` arrives as itself.
    names = ("item", "is_nonzero", "_local_scalar_dense", "nonzero", "masked_select", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name in self.names:
            raise RuntimeError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def refusing_waits(device: torch.device) -> Iterator[None]:
    """Within the block whatever makes the host wait for the device raises."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with _RefusedOperators():  # type: ignore[no-untyped-call]  # torch does not annotate it
        yield


def watch(loop: DecodeLoop, device: torch.device) -> dict[str, int]:
    """Let every step of a loop that needs no capture raise where it waits for the device; counts them.

    On a CPU, where tables are uploaded without a stream, only what would be captured is watched.
    """
    counts = {"watched": 0, "captured": 0}
    step, body = loop.step, loop._body

    def refused(action: Callable[[], Any]) -> Any:
        with refusing_waits(device):
            answer = action()
        counts["watched"] += 1
        return answer

    def watched_step(batch: Sequence[Any], rules: Sequence[Any]) -> Any:
        draws, remembers = any(rule.draws for rule in rules), any(rule.remembers for rule in rules)
        if loop.graphs.lacks((loop.graphs.rows_for(len(batch)), draws, remembers)):
            counts["captured"] += 1
            return step(batch, rules)
        return refused(lambda: step(batch, rules))

    if device.type == "cuda":
        vars(loop)["step"] = watched_step
    else:
        vars(loop)["_body"] = lambda draws, remembers: refused(lambda: body(draws, remembers))
    return counts


def requests(plan: EndurancePlan) -> list[Request]:
    """Prompts of several lengths; the last ones wait until an earlier one has ended."""
    made = []
    each = plan.steps // 2
    for index in range(2 * plan.sequences):
        generator = torch.Generator().manual_seed(index)
        tokens = plan.prompt - 7 * (index % plan.sequences)
        ids = torch.randint(plan.model.vocabulary, (tokens,), generator=generator).tolist()
        made.append(request(index, ids, each + 13 * (index % 3), temperature=_TEMPERATURE))
    return made


@torch.inference_mode()
def decode(
    part: Part,
    plan: EndurancePlan,
    device: torch.device,
    loaded: LoadedModel,
    name: str,
    captures: bool,
    overlaps: bool,
    limit: float,
) -> dict[int, list[int]]:
    """Decode up to `plan.steps` steps, `limit` seconds at most; gives each request's tokens."""
    runtime = built(loaded, plan, device, captures, overlaps)
    # An eager run is there for its tokens.
    is_watched = captures or device.type != "cuda"
    counts = watch(runtime._loop, device) if is_watched else {"watched": 0, "captured": 0}
    asked = requests(plan)
    scheduler = prepare(runtime, max(one.max_tokens for one in asked), plan.sequences, slack=True)
    waiting = deque(asked)
    seconds: list[float] = []
    memory: dict[int, list[int]] = {}
    last = time.perf_counter() + limit
    while len(seconds) < plan.steps and (waiting or scheduler.running):
        # One sequence joins every so many steps, so that they are not all due at once.
        turn = len(seconds) >= (len(asked) - len(waiting)) * plan.interval // plan.sequences
        if waiting and turn and runtime._cache.has_room(waiting[0].max_tokens):
            admit(scheduler, waiting.popleft())
        started = time.perf_counter()
        step(scheduler)
        seconds.append(time.perf_counter() - started)
        # Where no pass is under way, and after every sequence has been compressed once. A graph for another size of
        # batch takes memory of its own, so that only samples with the same number of graphs are compared.
        if device.type == "cuda" and len(seconds) > 2 * plan.interval and not scheduler.overlap._passes:
            memory.setdefault(counts["captured"], []).append(torch.cuda.memory_allocated(device))
        if time.perf_counter() > last:
            part.note(f"{name}: stopped after {len(seconds)} of {plan.steps} steps, for lack of time")
            break
    compressions = runtime._cache.compressions
    growth = max((max(samples) - samples[0] for samples in memory.values()), default=0)
    part.row(
        run=name,
        steps=len(seconds),
        median_step_ms=1e3 * statistics.median(seconds),
        compressions=compressions,
        steps_watched=counts["watched"],
        captures=counts["captured"],
        growth_bytes=growth,
        tokens=sum(len(one.generated) for one in asked),
    )
    if growth > _GROWTH_BYTES:
        part.fail(f"{name}: allocated memory grew by {growth:,} bytes after the first rounds")
    if compressions < 2 * plan.sequences and len(seconds) >= plan.steps:
        part.fail(f"{name}: only {compressions} compressions")
    if is_watched and counts["watched"] < len(seconds) // 2:
        part.fail(f"{name}: only {counts['watched']} of {len(seconds)} steps were watched")
    for running in scheduler.running:
        runtime._cache.close(running.cascade)
    scheduler.running.clear()
    runtime.reset()
    return {one.index: list(one.generated) for one in asked}


def built(
    loaded: LoadedModel, plan: EndurancePlan, device: torch.device, captures: bool, overlaps: bool
) -> HardKVRuntime:
    """A runtime that captures or not; batches are padded either way, so that both do the same arithmetic."""
    cache = {
        "interval": plan.interval,
        "query_rows": plan.interval,
        "local_window": plan.local_window,
        "page_slots": plan.page_slots,
    }
    runtime = runtime_of(
        loaded,
        plan.model,
        device,
        cache,
        budget={"name": "threshold", "mean_tokens": plan.mean_tokens},
        # `auto` goes by measured times, which differ from one runtime to the next.
        regularizer={"name": "rewrite"},
    )
    runtime._loop.graphs = Graphs(device, pads=True)
    runtime._loop.graphs.captures = captures and device.type == "cuda"
    runtime._overlaps = overlaps
    if device.type != "cuda":
        runtime._cache.layer_regions = False
    return runtime


def same(part: Part, captured: dict[int, list[int]], eager: dict[int, list[int]]) -> None:
    """Token for token, as far as both came."""
    compared = 0
    for index, tokens in captured.items():
        other = eager[index]
        common = min(len(tokens), len(other))
        different = [place for place in range(common) if tokens[place] != other[place]]
        if different:
            part.fail(
                f"request {index}: captured and eager differ in {len(different)} of {common} tokens, first at "
                f"{different[0]}"
            )
        compared += common
    part.fact("tokens_compared", compared)
    distinct = len({token for tokens in captured.values() for token in tokens})
    part.fact("distinct_tokens", distinct)
    if not compared:
        part.fail("no tokens to compare")
