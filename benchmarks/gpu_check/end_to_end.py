"""Part c: tokens per second of a whole model, against the full cache, uniform budgets and transformers' static cache.

Weights are random, in the shape of Qwen3-8B. One sequence is prefilled for real; the others are opened with random K
and V of the same number of slots in each head. Steps and compressions are then the scheduler's own.
"""

from __future__ import annotations

import inspect
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import StaticCache

from benchmarks.gpu_check.models import admit, fill, prepare, random_model, request, runtime_of, step
from benchmarks.gpu_check.plan import EndToEndPlan
from benchmarks.gpu_check.reporting import Part
from benchmarks.gpu_check.timing import free_memory
from hardkv.admission import Admission
from hardkv.config import load_config
from hardkv.memory import Pages
from hardkv.model_adapter import LoadedModel
from hardkv.scheduler import Scheduler
from hardkv.types import ModelGeometry

WANTED_FULL, WANTED_UNIFORM = 2.5, 0.97
OURS, FULL, STATIC = "default", "full cache", "transformers, static cache"
_AGREEING_PROMPT, _AGREEING_STEPS = 50, 40
_FILLED_PROMPT = 64
"""Tokens of the real prompt where no sequence's own prefill is wanted: it shows the cache each layer's settings."""


def methods(plan: EndToEndPlan) -> dict[str, dict[str, Any]]:
    """Settings of each cache that is compared; ours is the default method."""
    uniform = {"name": "top_k", "mean_tokens": plan.mean_tokens}
    return {
        OURS: {"budget": {"name": "threshold", "mean_tokens": plan.mean_tokens}},
        "uniform top-k": {"budget": uniform},
        "uniform top-k, snapkv": {
            "scorer": {"name": "snapkv", "rows": min(32, plan.interval), "kernel": 7},
            "budget": uniform,
        },
        FULL: {"compression": False},
    }


def run(part: Part, plan: EndToEndPlan, device: torch.device) -> None:
    """Every cache at every context, the longest first."""
    loaded = random_model(plan.model, device)
    part.fact("parameters", sum(weight.numel() for weight in loaded.model.parameters()))
    part.note(
        "random weights, keys of each layer scaled by a factor from 0.25 to 4; one sequence of "
        f"`{OURS}` is prefilled for real, the other sequences and caches are filled "
        "with random K, V, statistic and query ring, the slots of each head being those of the real one (full cache: "
        "all). Timed steps include whatever compressions fall due, as the scheduler does them. `prefill_s` includes "
        "the compilation of kernels that come first there"
    )
    part.note(f"`{STATIC}` runs eagerly (sdpa, no graph), the median of {plan.static_steps} steps of a full batch")
    part.attempt("the same as transformers", lambda: agrees(part, plan, device, loaded))
    free_memory(device)
    contexts = sorted(plan.contexts, reverse=True)
    for done, context in enumerate(contexts):
        share = max(part.left, 0.0) / (len(contexts) - done)
        if done and share < 15.0 and device.type == "cuda":
            part.note(f"no time for a context of {context}")
            continue
        one_context(part, plan, device, loaded, context, share)


@torch.inference_mode()
def agrees(part: Part, plan: EndToEndPlan, device: torch.device, loaded: LoadedModel) -> None:
    """With nothing dropped, steps of the captured loop give transformers' own log-probabilities."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(plan.model.vocabulary, (_AGREEING_PROMPT + _AGREEING_STEPS,), generator=generator)
    runtime = runtime_of(loaded, plan.model, device, cache_settings(plan), compression=False)
    given = ids.tolist()
    found = runtime.teacher_force([given[:_AGREEING_PROMPT]], [given[_AGREEING_PROMPT:]])[0]
    runtime.reset()
    rows = slice(_AGREEING_PROMPT - 1, _AGREEING_PROMPT + _AGREEING_STEPS - 1)
    logits = loaded.model(input_ids=ids[None].to(device), use_cache=False).logits[0, rows]
    difference = (found - torch.log_softmax(logits.float(), -1).cpu()).abs()
    part.fact("logprob_difference_to_transformers", {"mean": float(difference.mean()), "max": float(difference.max())})
    # Some 36 layers that round to 16 bits in another order; a wrong cache is off by more than 1.
    allowed = 0.3 if plan.model.dtype.itemsize == 2 else 1e-3
    if not float(difference.mean()) <= allowed:
        part.fail(f"log-probabilities differ from transformers' by {float(difference.mean()):.3g} in the mean")


def one_context(
    part: Part, plan: EndToEndPlan, device: torch.device, loaded: LoadedModel, context: int, seconds: float
) -> None:
    """All caches at one context, and the targets."""
    end = time.perf_counter() + max(seconds, 5.0)
    speeds: dict[str, float] = {}
    lengths: dict[str, Pages] = {}
    for name, settings in methods(plan).items():

        def go(name: str = name, settings: dict[str, Any] = settings) -> None:
            # The full cache is the slowest by far: the others leave it, and the static cache, most of the time.
            limit = (end - time.perf_counter()) * (0.7 if name == FULL else 0.35)
            speeds[name] = measured(part, plan, device, loaded, context, name, settings, lengths, limit)

        part.attempt(f"{name} at {context}", go)
        free_memory(device)

    def static() -> None:
        speeds[STATIC] = static_cache(part, plan, device, loaded, context, end - time.perf_counter())

    part.attempt(f"{STATIC} at {context}", static)
    free_memory(device)
    if OURS not in speeds:
        return
    ours = speeds[OURS]
    if FULL in speeds:
        part.target(f"tokens/s of the default, times the full cache at {context}", ours / speeds[FULL], WANTED_FULL)
    uniform = [speed for name, speed in speeds.items() if name.startswith("uniform")]
    if uniform:
        label = f"tokens/s of the default, times the faster uniform top-k at {context}"
        part.target(label, ours / max(uniform), WANTED_UNIFORM)


@torch.inference_mode()
def measured(
    part: Part,
    plan: EndToEndPlan,
    device: torch.device,
    loaded: LoadedModel,
    context: int,
    name: str,
    settings: dict[str, Any],
    lengths: dict[str, Pages],
    limit: float,
) -> float:
    """Tokens per second of one cache, its compressions included."""
    runtime = runtime_of(loaded, plan.model, device, cache_settings(plan), **settings)
    total = plan.total_tokens(context)
    scheduler = prepare(runtime, total, plan.sequences, slack=name != FULL)
    started = time.perf_counter()
    prefill_seconds = fill_all(part, plan, scheduler, context, name, lengths)
    filled_seconds = time.perf_counter() - started
    before = [int(scheduler.running[0].cascade.sparse.lengths.min()), int(scheduler.running[0].cascade.sparse.longest)]
    found = drive(plan, scheduler, device, limit - filled_seconds)
    after = np.stack([running.cascade.sparse.lengths for running in scheduler.running])
    tokens_per_s = found.tokens / found.seconds
    if found.steps < plan.steps:
        part.note(f"{name} at {context}: {found.steps} of {plan.steps} steps, for lack of time")
    elif device.type == "cuda" and found.compressions < 2 * plan.sequences and name != FULL:
        part.fail(f"{name} at {context}: only {found.compressions} compressions of {plan.sequences} sequences")
    means = [mean for one in scheduler.running for mean in one.cascade.kept_after_compression]
    part.row(
        context=context,
        cache=name,
        tokens_per_s=tokens_per_s,
        step_ms=found.median_step_ms,
        slowest_step_ms=found.slowest_step_ms,
        compression_share=found.compression_share,
        compressions=found.compressions,
        steps=found.steps,
        kv_gib=found.kv_bytes / 2**30,
        mean_kept=None if not means else float(np.mean(means)),
        sparse_slots_at_first=f"{before[0]} to {before[1]}",
        sparse_slots_at_last=f"{int(after.min())} to {int(after.max())}",
        prefill_s=prefill_seconds,
    )
    for running in list(scheduler.running):
        runtime._cache.close(running.cascade)
    scheduler.running.clear()
    runtime.reset()
    return tokens_per_s


def fill_all(
    part: Part, plan: EndToEndPlan, scheduler: Scheduler, context: int, name: str, lengths: dict[str, Pages]
) -> float | None:
    """Bring all sequences to `context` tokens, each at another place of its round; gives the seconds of a prefill."""
    generator = torch.Generator().manual_seed(0)
    window, vocabulary = plan.local_window, plan.model.vocabulary
    new_tokens = plan.total_tokens(context) - context
    real = context if name == OURS else min(_FILLED_PROMPT, context)
    ids = torch.randint(vocabulary, (real,), generator=generator).tolist()
    started = time.perf_counter()
    cascade = admit(scheduler, request(0, ids, new_tokens))
    seconds: float | None = time.perf_counter() - started
    first = 1
    if name == OURS:
        lengths[OURS] = cascade.sparse.lengths.copy()
        kept = float(cascade.kept_tokens().float().mean())
        part.fact(f"mean_kept_of_the_real_prefill_at_{context}", kept)
        if not abs(kept - plan.mean_tokens) <= 0.02 * plan.mean_tokens + plan.page_slots:
            part.fail(f"the real prefill of {context} kept {kept:.1f} slots per head, wanted {plan.mean_tokens}")
    else:
        first, seconds = 0, None
        scheduler.running.clear()
        scheduler.cache.close(cascade)
    for index in range(first, plan.sequences):
        dense = window + index * plan.interval // plan.sequences
        slots = slots_of(plan, name, context - dense, lengths)
        fill(scheduler, request(index, [0] * context, new_tokens), slots, dense, generator)
    return seconds


def slots_of(plan: EndToEndPlan, name: str, older: int, lengths: dict[str, Pages]) -> Pages:
    """Slots of each layer and head in the sparse tier of a sequence that is not prefilled."""
    size = (plan.model.layers, plan.model.heads)
    if name == FULL:
        return np.full(size, older, dtype=np.int64)
    uniform = np.full(size, plan.mean_tokens - plan.local_window, dtype=np.int64)
    return np.minimum(lengths[OURS] if name == OURS else uniform, older)


@dataclass(frozen=True)
class Driven:
    """What the timed steps came to."""

    steps: int
    tokens: int
    seconds: float
    median_step_ms: float
    slowest_step_ms: float
    compression_share: float
    compressions: int
    kv_bytes: int


def drive(plan: EndToEndPlan, scheduler: Scheduler, device: torch.device, limit: float) -> Driven:
    """Step as the scheduler does, after some steps that are not counted, for `limit` seconds at most."""
    cache = scheduler.cache
    for _ in range(plan.warm_up):
        step(scheduler)
    _wait(device)
    compressions, tokens, kv_bytes = cache.compressions, 0, 0
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < plan.steps and (len(times) < 8 or time.perf_counter() - started < limit):
        now = time.perf_counter()
        tokens += sum(event.choice is not None for event in step(scheduler))
        times.append(time.perf_counter() - now)
        kv_bytes = max(kv_bytes, scheduler.kv_bytes)
    _wait(device)
    seconds = time.perf_counter() - started
    median = statistics.median(times)
    # Steps without a pass take about the median; what all take beyond it is due to passes, on the host or beside.
    share = max(0.0, 1.0 - median * len(times) / seconds)
    return Driven(
        steps=len(times),
        tokens=tokens,
        seconds=seconds,
        median_step_ms=1e3 * median,
        slowest_step_ms=1e3 * max(times),
        compression_share=share,
        compressions=cache.compressions - compressions,
        kv_bytes=kv_bytes,
    )


def static_cache(
    part: Part, plan: EndToEndPlan, device: torch.device, loaded: LoadedModel, context: int, limit: float
) -> float:
    """Tokens per second of transformers' static cache, eagerly."""
    model, sizes = loaded.model, plan.model
    cache: Any = StaticCache(config=model.config, max_cache_len=context + plan.static_steps + 2)
    size = (plan.sequences, sizes.heads, context, sizes.head_dim)
    names = inspect.signature(model.forward).parameters
    argument = "cache" if "cache" in names else "past_key_values"
    with torch.inference_mode():
        for layer in range(sizes.layers):
            keys, values = (torch.empty(size, dtype=sizes.dtype, device=device).normal_() for _ in range(2))
            cache.update(keys, values, layer)
            del keys, values
        tokens = torch.zeros(plan.sequences, 1, dtype=torch.int64, device=device)
        times: list[float] = []
        started = time.perf_counter()
        for index in range(plan.static_steps + 1):
            now = time.perf_counter()
            positions = torch.full_like(tokens, context + index)
            output = model(
                input_ids=tokens, position_ids=positions, use_cache=True, logits_to_keep=1, **{argument: cache}
            )
            tokens = output.logits[:, -1].argmax(-1, keepdim=True)
            _wait(device)
            times.append(time.perf_counter() - now)
            if index >= 2 and time.perf_counter() - started > limit:
                break
    seconds = statistics.median(times[1:])
    part.row(
        context=context,
        cache=STATIC,
        tokens_per_s=plan.sequences / seconds,
        step_ms=1e3 * seconds,
        steps=len(times) - 1,
        kv_gib=sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / 2**30,
    )
    return plan.sequences / seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cache_settings(plan: EndToEndPlan) -> dict[str, Any]:
    return {
        "interval": plan.interval,
        "query_rows": plan.interval,
        "local_window": plan.local_window,
        "page_slots": plan.page_slots,
    }


def bytes_needed(plan: EndToEndPlan, context: int) -> dict[str, int]:
    """Bytes of each cache with the weights, at its peak; worked out without a device."""
    sizes = plan.model
    group = sizes.query_heads // sizes.heads
    geometry = ModelGeometry(
        windows=(None,) * sizes.layers,
        heads=sizes.heads,
        group=group,
        head_dim=sizes.head_dim,
        dtype=sizes.dtype,
        device=torch.device("cpu"),
        max_positions=sizes.positions,
    )
    slot = 2 * sizes.heads * sizes.head_dim * sizes.dtype.itemsize
    found = {}
    for name, settings in methods(plan).items():
        ready = load_config({"cache": cache_settings(plan), **settings})
        parts = ready.components if ready.config.compression else None
        admission = Admission(geometry, ready.config.cache, parts)
        pages = plan.sequences * admission.sequence_pages(plan.total_tokens(context))
        pages += pages // 8 if name != FULL else 0
        lanes = plan.sequences * admission.lane_bytes()
        # Resident tokens of one sequence while it is compressed: eight tensors of int64 at most.
        passes = 8 * 8 * sizes.layers * sizes.heads * (context if name == FULL else 5 * plan.mean_tokens)
        # A prompt goes through a layer at once: hidden states, a gated product, K and V for every query head.
        widest = 8 * sizes.hidden + 4 * sizes.intermediate + 2 * sizes.query_heads * sizes.head_dim
        prefill = admission.prefill_bytes(context) + context * widest * sizes.dtype.itemsize
        transient = max(passes, prefill if name == OURS else 0)
        found[name] = sizes.weight_bytes() + pages * admission.page_bytes + lanes + transient
    # Where a mask is given, transformers repeats K and V of a layer for every query head.
    layer = plan.sequences * slot * (context + plan.static_steps + 2)
    found[STATIC] = sizes.weight_bytes() + sizes.layers * layer + (1 + group) * layer
    return found
