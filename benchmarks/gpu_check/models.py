"""Random models, and sequences of any length without a prefill, for the parts that drive the runtime's own loop."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.gpu_check.plan import ModelPlan
from hardkv import HardKVRuntime
from hardkv.config import GenerationSettings
from hardkv.memory import PagePool, Pages, upload
from hardkv.model_adapter import LoadedModel
from hardkv.sampling import SamplingRules
from hardkv.scheduler import Event, Request, Scheduler, _Running
from hardkv.tiers.cascade import Cascade


class NoTokenizer:
    """Stands where a tokenizer is expected; prompts are token ids here, and no text is made."""

    eos_token_id = None


def random_model(plan: ModelPlan, device: torch.device, seed: int = 0) -> LoadedModel:
    """Built on the device itself; no file is read.

    Keys of a layer are scaled by a factor of its own, from 0.25 to 4: some layers look at a few tokens, others at all.
    """
    config = Qwen3Config(
        vocab_size=plan.vocabulary,
        hidden_size=plan.hidden,
        intermediate_size=plan.intermediate,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.query_heads,
        num_key_value_heads=plan.heads,
        head_dim=plan.head_dim,
        max_position_embeddings=plan.positions,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=plan.dtype, attn_implementation="sdpa")
    with torch.no_grad():
        for layer, factor in zip(model.model.layers, 0.25 * 16.0 ** torch.rand(plan.layers), strict=True):
            layer.self_attn.k_norm.weight.fill_(float(factor))
    model.eval()
    tokenizer: Any = NoTokenizer()
    return LoadedModel(model, tokenizer)


def runtime_of(
    loaded: LoadedModel, plan: ModelPlan, device: torch.device, cache: dict[str, Any], **settings: Any
) -> HardKVRuntime:
    """A runtime over a model in memory."""
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    model = {"dtype": names[plan.dtype], "device": str(device)}
    return HardKVRuntime.from_config({"model": model, "cache": cache, **settings}, loaded=loaded)


def request(index: int, prompt: list[int], new_tokens: int, **settings: Any) -> Request:
    """A prompt that ends after so many tokens, whatever they are."""
    generation = GenerationSettings(max_new_tokens=new_tokens, ignore_eos=True, **settings)
    return Request(index, prompt, generation, index, frozenset(), len(prompt) + new_tokens)


def prepare(runtime: HardKVRuntime, total_tokens: int, sequences: int, slack: bool) -> Scheduler:
    """Make room for so many sequences of `total_tokens`; gives the runtime's own scheduler.

    `slack`: an eighth more pages, as the runtime itself adds where there is room.
    """
    cache = runtime._cache
    pages = cache.admission.sequence_pages(total_tokens) * sequences
    with torch.inference_mode():
        cache.prepare(pages + (pages // 8 if slack else 0), sequences, cache.admission.head_pages(total_tokens))
    runtime._loop.prepare()
    return Scheduler(runtime._loop, total_tokens, None, runtime._overlaps)


def admit(scheduler: Scheduler, asked: Request) -> Cascade:
    """Prefill a prompt for real."""
    for event in scheduler._admit(asked):
        if event.error is not None:
            raise event.error
    return scheduler.running[-1].cascade


def step(scheduler: Scheduler) -> list[Event]:
    """What the scheduler does for one token of every sequence: compressions that are due, the step, the tokens.

    Raises:
        HardKVError: a sequence failed.
    """
    events = list(scheduler._step())
    for event in events:
        if event.error is not None:
            raise event.error
    return events


@torch.inference_mode()
def fill(
    scheduler: Scheduler, asked: Request, lengths: Pages, dense_tokens: int, generator: torch.Generator
) -> Cascade:
    """Open a sequence and fill its tiers with random K and V, instead of a prefill of its prompt.

    `lengths [L, H]`: slots of each head in the sparse tier; their positions are spread over the prompt. Statistic and
    query ring are random too. Keys of a head are scaled by a factor of its own, so that heads differ.
    """
    loop, cache = scheduler.loop, scheduler.cache
    cascade = cache.open(asked.max_tokens)
    pool, device = cache.pool, cache.geometry.device
    seen = len(asked.prompt_ids)
    older = seen - dense_tokens
    cascade.sparse.set_lengths(lengths, lengths)
    longest = cascade.sparse.longest
    held, slots = cascade.sparse.present(), cascade.sparse.slots()
    column = torch.arange(longest, device=device)
    spread = column * older // upload(np.maximum(lengths, 1), device)[..., None]
    _show(pool, slots[held], spread[held])
    cascade.dense.lengths[:] = dense_tokens
    newest = cascade.dense.slots(dense_tokens)
    _show(pool, newest.flatten(), (older + torch.arange(dense_tokens, device=device)).expand(newest.shape).flatten())
    scale = 0.25 * 16.0 ** torch.rand(lengths.shape, generator=generator)  # from 0.25 to 4
    for table in (cascade.sparse.table, cascade.dense.table):
        marks = np.broadcast_to(scale.numpy()[..., None], table.pages.shape)[table.pages >= 0]
        _fill_pages(pool, table.pages[table.pages >= 0], marks)
    if pool.statistic.shape[0]:
        flat = torch.cat([slots[held], newest.flatten()])
        pool.statistic.view(-1)[flat] = torch.rand(flat.shape, device=device)
    if cache.ring is not None:
        last = torch.arange(seen - cache.ring.rows, seen, device=device)
        size = (cache.geometry.heads, cache.geometry.group, cache.ring.rows, cache.geometry.head_dim)
        for layer in range(pool.layers):
            queries = torch.randn(size, device=device).to(pool.keys.dtype)
            cache.ring.fill(layer, cascade.lane, queries, last)
    cascade.seen_tokens = seen
    rules = SamplingRules(asked.settings.temperature)
    logits = torch.randn(1, loop.vocabulary, device=device)
    asked.generated.append(loop.start(cascade.lane, rules, asked.seed, [], logits))
    scheduler.running.append(_Running(asked, cascade, rules, deque()))
    return cascade


def _show(pool: PagePool, slots: Tensor, positions: Tensor) -> None:
    pool.bias.view(-1)[slots] = 0.0
    pool.positions.view(-1)[slots] = positions.to(torch.int32)


def _fill_pages(pool: PagePool, pages: Pages, scale: np.ndarray[Any, Any], at_once: int = 1 << 15) -> None:
    """Normal numbers in K and V of some pages, those of K times each page's `scale`."""
    size = pool.keys.shape[1:]
    for first in range(0, len(pages), at_once):
        index = upload(pages[first : first + at_once], pool.keys.device)
        factor = upload(scale[first : first + at_once], pool.keys.device).to(pool.keys.dtype)[:, None, None]
        for target, times in ((pool.keys, factor), (pool.values, None)):
            fresh = torch.empty((len(index), *size), dtype=target.dtype, device=target.device).normal_()
            target.index_copy_(0, index, fresh if times is None else fresh.mul_(times))
