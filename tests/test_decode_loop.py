"""The decode step as a CUDA graph needs it: padded, at constant addresses, the same whatever goes on beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hardkv import HardKVRuntime
from hardkv.errors import HardKVError, PluginError
from hardkv.graph import Graphs, bucket_of
from hardkv.model_adapter import LoadedModel
from tests.no_sync import NoSync
from tests.test_runtime import BASE, CACHE, _Breaks, prompt, started
from tests.tiny_models import loaded

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
LENGTHS = (130, 60, 97)
METHODS: dict[str, dict[str, Any]] = {
    "online": {},
    "plugin's own update": {"scorer": {"name": "own_update"}},
    "window": {"scorer": {"name": "snapkv", "rows": 16}},
    "rows and votes": {"scorer": {"name": "attention"}, "budget": {"name": "top_p", "p": 0.8, "floor_tokens": 16}},
    "masks": {"scorer": {"name": "window_max", "online": False}, "regularizer": {"name": "sparse_load"}},
    "temperature": {"scorer": {"name": "rkv"}, "calibrator": {"name": "temperature"}},
    "merge": {"condenser": {"name": "merge"}, "cache": {**CACHE, "condensed_slots": 8}},
    "random": {"scorer": {"name": "random"}},
    "all kept": {"compression": False},
}


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    """One with full attention alone, one with sliding layers and learned sinks."""
    return loaded(request.param)


def as_on_cuda(runtime: HardKVRuntime) -> HardKVRuntime:
    """Let it pad batches, overlap passes and use the pool as one region, as on a CUDA device."""
    runtime._loop.graphs = Graphs(CPU, pads=True)
    runtime._cache.layer_regions = False
    runtime._overlaps = True
    return runtime


def built(model: LoadedModel, method: dict[str, Any]) -> HardKVRuntime:
    own = method.get("scorer") == {"name": "own_update"}
    # `auto` goes by measured times: whether a window scorer can bring a token back would depend on them.
    fixed = {"regularizer": {"name": "rewrite"}}
    runtime = HardKVRuntime.from_config({**BASE, **fixed, **({} if own else method)}, loaded=model)
    if own:
        parts = runtime._cache.parts
        assert parts is not None
        object.__setattr__(parts, "scorer", _Breaks("never"))
    return runtime


@pytest.mark.parametrize("name", METHODS)
def test_it_is_the_same_loop(model: LoadedModel, name: str) -> None:
    """Padding, one region, grouped layers and passes beside other sequences' steps change nothing."""
    prompts = [prompt(40 + index, length) for index, length in enumerate(LENGTHS)]
    plain = built(model, METHODS[name]).generate(prompts, **SETTINGS)
    padded = as_on_cuda(built(model, METHODS[name])).generate(prompts, **SETTINGS)
    for one, other in zip(plain, padded, strict=True):
        assert other.token_ids == one.token_ids
        assert other.stats == one.stats
        assert one.stats.compressions == 0 or one.stats.compressions >= 3


def test_a_failure_beside_others_ends_its_own_sequence(model: LoadedModel) -> None:
    runtime = as_on_cuda(built(model, {}))
    parts = runtime._cache.parts
    assert parts is not None
    object.__setattr__(parts, "scorer", _Breaks("nan"))
    rows = runtime.generate([prompt(22, 60), prompt(23, 190)], max_new_tokens=40, ignore_eos=True)
    assert [row.finish_reason for row in rows] == ["length", "error"]
    assert "not finite" in str(rows[1].error)
    assert runtime._cache.pool.manager.used_pages == 0


def addresses(runtime: HardKVRuntime) -> dict[str, int]:
    """Where every buffer lies that a captured step refers to."""
    cache, found = runtime._cache, {}

    def note(name: str, holder: object) -> None:
        for key, value in vars(holder).items():
            if isinstance(value, Tensor) and value.numel() and key not in ("_lse", "_page_owner"):
                found[f"{name}.{key}"] = value.data_ptr()

    step = cache.step
    for name, holder in (("pool", cache.pool), ("tables", step.tables), ("loop", runtime._loop)):
        note(name, holder)
    note("sampler", runtime._loop.sampler)
    if cache.ring is not None:
        note("ring", cache.ring)
    for key in ("counters", "_all_lanes", "_all_starts", "_owner"):
        found[f"step.{key}"] = getattr(step, key).data_ptr()
    note("statistic", step.statistic)
    for layer, ring in cache.sliding._rings.items():
        note(f"sliding.{layer}", ring)
        found[f"sliding.{layer}.owner"] = ring.tables.owner.data_ptr()
    return found


@pytest.mark.parametrize("scorer", ["attention_power", "snapkv"])
def test_addresses_are_constant_over_300_steps(model: LoadedModel, scorer: str) -> None:
    """Sequences join, leave and are compressed meanwhile."""
    options = {"rows": 16} if scorer == "snapkv" else {}
    runtime = as_on_cuda(built(model, {"scorer": {"name": scorer, **options}, "cache": {**CACHE, "max_sequences": 3}}))
    lengths = [(90, 150), (60, 40), (120, 200), (50, 60), (70, 180)]
    requests, _ = runtime._requests([prompt(60 + i, length) for i, (length, _) in enumerate(lengths)], SETTINGS)
    for request, (length, tokens) in zip(requests, lengths, strict=True):
        request.max_tokens = length + tokens
    before: dict[str, int] = {}
    steps = 0
    for event in runtime._run(requests, None):
        before = before or addresses(runtime)
        if event.finish_reason is not None:
            assert event.finish_reason == "length"
        if runtime._cache.cascades:
            assert addresses(runtime) == before
            steps += 1
    assert steps > 300
    assert runtime.stats().compressions > 20
    # A second call of about that size uses the buffers again, and what was captured over them.
    generation = runtime._cache.generation
    runtime.generate([prompt(70, 100), prompt(71, 100), prompt(72, 100)], max_new_tokens=200, ignore_eos=True)
    assert runtime._cache.generation == generation


def test_rows_of_nobody_may_hold_anything(model: LoadedModel) -> None:
    """NaN in whatever a padded row reads or writes leaves the others' logits alone, bit by bit."""
    logits = []
    for poison in (False, True):
        runtime = as_on_cuda(built(model, {}))
        running = started(runtime, [prompt(80, 70), prompt(81, 90), prompt(82, 65)], SETTINGS)
        cascades, rules = [one.cascade for one in running], [one.rules for one in running]
        step = runtime._cache.step
        if poison:
            pool = runtime._cache.pool
            with torch.inference_mode():
                for tensor in (pool.keys, pool.values, pool.statistic):
                    tensor[pool.nobody_page] = float("nan")
                for ring in runtime._cache.sliding._rings.values():
                    ring._of(step.nobody, ring.keys).fill_(float("nan"))
        answers = [runtime._loop.step(cascades, rules)[1].clone() for _ in range(4)]
        assert step.lanes.shape == (4,)
        logits.append(torch.stack(answers))
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (17, 24), (64, 64)])
def test_buckets(rows: int, bucket: int) -> None:
    assert bucket_of(rows) == bucket
    assert Graphs(CPU, pads=True).rows_for(rows) == bucket
    assert Graphs(CPU).rows_for(rows) == rows


def test_a_sequence_that_needs_too_many_pages_in_a_head_says_so(model: LoadedModel) -> None:
    runtime = built(model, {"compression": False})
    running = started(runtime, [prompt(83, 60)], SETTINGS)
    tables = runtime._cache.step.tables
    tables.width = 2
    tables._seen.clear()
    with pytest.raises(HardKVError, match="its block table has room for 2"):
        runtime._loop.step([running[0].cascade], [running[0].rules])


def test_a_stream_that_is_closed_during_a_pass_leaves_nothing_behind(model: LoadedModel) -> None:
    runtime = as_on_cuda(built(model, {}))
    alone = runtime.generate(prompt(84, 70), **SETTINGS)
    requests, _ = runtime._requests([prompt(85, 90), prompt(86, 95)], SETTINGS)
    events = runtime._run(requests, None)
    for _ in events:
        if any(cascade.dense.full for cascade in runtime._cache.cascades.values()):
            break
    events.close()  # type: ignore[attr-defined]  # it is a generator
    assert runtime._cache.pool.manager.used_pages == 0
    assert runtime.generate(prompt(84, 70), **SETTINGS) == alone


@pytest.mark.parametrize(
    "name", [name for name in METHODS if name not in ("all kept", "random", "plugin's own update")]
)
def test_deciding_never_waits_for_the_device(model: LoadedModel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor makes a tensor of a Python number, whose copy to the device would wait too."""
    runtime = as_on_cuda(built(model, METHODS[name]))
    running = started(runtime, [prompt(87, 130)], {**SETTINGS, "max_new_tokens": 100})[0]
    while not running.cascade.dense.full:
        runtime._loop.step([running.cascade], [running.rules])

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("this copies from the host")

    from_numpy = torch.from_numpy

    def pinned(array: Any) -> Tensor:
        with _disable_current_modes():  # `upload` copies from pinned memory, and waits for nothing
            return from_numpy(array)

    monkeypatch.setattr(Tensor, "new_tensor", refuse)
    monkeypatch.setattr(torch, "from_numpy", pinned)
    with NoSync(), torch.inference_mode():  # type: ignore[no-untyped-call]
        decision = runtime._cache.compressor.decide(running.cascade)
    assert decision.selects
    assert decision.ready


def test_counters_are_right_after_a_step_that_failed(model: LoadedModel) -> None:
    """The device had counted the step, the host had not."""
    runtime = built(model, {})
    expected = runtime.generate(prompt(88, 70), **SETTINGS)
    scorer = runtime._cache.step.statistic.scorer
    assert scorer is not None

    def breaks(*_: Tensor) -> None:
        raise ZeroDivisionError("one over none")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(scorer), "update", breaks)
        with pytest.raises(PluginError, match="scorer 'attention_power' raised ZeroDivisionError: one over none"):
            runtime.generate(prompt(88, 70), **SETTINGS)
    assert runtime.generate(prompt(88, 70), **SETTINGS) == expected
