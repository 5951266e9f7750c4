"""The runtime from end to end, on a tiny random model; each trap of other implementations has a test with its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hardkv import HardKVCache, HardKVRuntime, InputError, OnlineScorer, ScoreView
from hardkv.errors import CapacityError, ConfigError, HardKVError, ModelNotFoundError, PluginError
from hardkv.interfaces import CacheTier
from hardkv.model_adapter import LoadedModel
from hardkv.scheduler import Request, Scheduler
from hardkv.types import TierShape, TokenBatch
from hardkv_kernels import attend_slots
from tests.no_sync import NoSync
from tests.test_families import stock
from tests.tiny_models import VOCABULARY, hf_generate, loaded

CACHE = {"sinks": 2, "local_window": 8, "query_rows": 16, "interval": 16, "page_slots": 8}
BASE: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "cache": CACHE,
    "budget": {"name": "threshold", "mean_tokens": 40},
}
MEAN = 40


def prompt(seed: int, tokens: int) -> list[int]:
    return torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return loaded("llama")


@pytest.fixture
def runtime(model: LoadedModel) -> HardKVRuntime:
    return HardKVRuntime.from_config(BASE, loaded=model)


# Prompts


def test_every_way_to_give_a_prompt_leads_to_the_same_tokens(runtime: HardKVRuntime) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    ids = runtime.tokenizer(text)["input_ids"]
    expected = runtime.generate(text, max_new_tokens=8)
    for same in (ids, torch.tensor(ids)):
        assert runtime.generate(same, max_new_tokens=8) == expected
    for batch in ([text], [ids], torch.tensor([ids])):
        assert runtime.generate(batch, max_new_tokens=8) == [expected]


def test_a_chat_and_a_batch_of_chats(runtime: HardKVRuntime) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    as_text = runtime.generate("user: Hello\nassistant: ", max_new_tokens=6)
    assert runtime.generate(chat, max_new_tokens=6) == as_text
    assert runtime.generate([chat, chat], max_new_tokens=6)[1].text == as_text.text


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("", "is an empty string"),
        ([], "at least one prompt"),
        ([[]], "is empty"),
        (["good", ""], "prompt 1 of 2 is an empty string"),
        (7, "expected a string.*got int"),
        (None, "got NoneType"),
        ({"role": "user"}, "expected a string"),
        (["good", 3.5], "prompt 1 of 2: expected a string"),
        ([1, "two"], "list of int, str"),
        ([VOCABULARY + 5], "token id 264; the vocabulary has ids 0 to 258"),
        ([-1], "token id -1"),
        ([{"role": "user"}], "needs 'role' and 'content'"),
        (torch.ones(3), "torch.float32"),
        (b"bytes", "got bytes"),
    ],
)
def test_a_wrong_prompt_is_refused_and_the_runtime_stays_usable(runtime: HardKVRuntime, bad: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        runtime.generate(bad, max_new_tokens=2)
    assert len(runtime.generate("good", max_new_tokens=2).token_ids) == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens.*greater than or equal to 1.*got 0"),
        ({"max_new_tokens": -3}, "max_new_tokens.*got -3"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_tokens": 3}, "no argument 'max_tokens'.*Did you mean 'max_new_tokens'"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_a_wrong_argument_is_refused_before_work_starts(
    runtime: HardKVRuntime, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        runtime.generate("good", **arguments)
    with pytest.raises(InputError, match=told):
        runtime.stream("good", **arguments)


def test_a_prompt_longer_than_the_positions_is_refused(runtime: HardKVRuntime) -> None:
    with pytest.raises(InputError, match="2048 tokens; the model has 2048 positions"):
        runtime.generate(prompt(0, 2048))


def test_generation_stops_at_the_last_position(runtime: HardKVRuntime) -> None:
    one = runtime.generate(prompt(0, 2040), max_new_tokens=50, ignore_eos=True)
    assert (len(one.token_ids), one.finish_reason) == (8, "length")


@pytest.mark.parametrize(
    ("override", "error", "told"),
    [
        ({"model": {"id": "./no/such/folder"}}, ModelNotFoundError, "no such folder"),
        ({"model": {"id": "missing.gguf"}}, ModelNotFoundError, "no such GGUF file"),
        ({"model": {"dtype": "float8"}}, ConfigError, r"model\.dtype"),
        ({"model": {"device": "warp9"}}, ConfigError, r"model\.device"),
        ({"cache": {"sink": 4}}, ConfigError, "Did you mean 'sinks'"),
    ],
)
def test_a_wrong_configuration_is_one_error(override: dict[str, Any], error: type[HardKVError], told: str) -> None:
    with pytest.raises(error, match=told):
        HardKVRuntime.from_config(override)


def test_a_device_that_is_not_there_is_refused(model: LoadedModel) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match="'cuda' is not available here"):
        HardKVRuntime.from_config({"model": {"id": "smollm2", "device": "cuda"}})


# Memory


def test_too_little_memory_for_one_sequence_is_refused_before_work(model: LoadedModel) -> None:
    small = HardKVRuntime.from_config({**BASE, "cache": {**CACHE, "pool_bytes": 50_000}}, loaded=model)
    with pytest.raises(CapacityError, match=r"needs up to [\d,]+ bytes of pages; cache.pool_bytes is 50,000"):
        small.generate(prompt(0, 500), max_new_tokens=100)


def test_sequences_wait_for_room_and_come_out_in_order(model: LoadedModel) -> None:
    prompts = [prompt(seed, 60 + 20 * seed) for seed in range(5)]
    free = HardKVRuntime.from_config(BASE, loaded=model)
    one = free._cache.admission.sequence_pages(60 + 80 + 30) * free._cache.admission.page_bytes
    tight = HardKVRuntime.from_config({**BASE, "cache": {**CACHE, "pool_bytes": int(2.5 * one)}}, loaded=model)
    expected = free.generate(prompts, max_new_tokens=30, ignore_eos=True)
    assert tight.generate(prompts, max_new_tokens=30, ignore_eos=True) == expected
    assert len(tight.stats().step_seconds) > len(free.stats().step_seconds)
    lanes = HardKVRuntime.from_config({**BASE, "cache": {**CACHE, "max_sequences": 1}}, loaded=model)
    assert lanes.generate(prompts, max_new_tokens=30, ignore_eos=True) == expected


def test_bytes_are_really_freed(model: LoadedModel) -> None:
    ids = prompt(1, 600)
    compressed = HardKVRuntime.from_config(BASE, loaded=model)
    compressed.generate(ids, max_new_tokens=40, ignore_eos=True)
    whole = HardKVRuntime.from_config({**BASE, "compression": False}, loaded=model)
    whole.generate(ids, max_new_tokens=40, ignore_eos=True)
    assert compressed.stats().kv_bytes < 0.2 * whole.stats().kv_bytes
    # prefill holds the budget and one layer of four, and what it needs to choose: never the whole prompt of all layers
    assert compressed.stats().kv_bytes_peak < 0.6 * whole.stats().kv_bytes
    for runtime in (compressed, whole):
        stats = runtime.stats()
        assert stats.kv_bytes <= stats.kv_bytes_peak
        assert stats.kv_bytes <= stats.kv_bytes_reserved
        assert runtime._cache.pool.manager.used_pages == 0  # all sequences have ended


def test_reset_and_reuse_leave_nothing_behind(model: LoadedModel) -> None:
    runtime = HardKVRuntime.from_config(BASE, loaded=model)
    ids = prompt(2, 150)
    first = runtime.generate(ids, max_new_tokens=50, ignore_eos=True)
    runtime.generate([prompt(3, 90), prompt(4, 200)], max_new_tokens=20)
    assert runtime.generate(ids, max_new_tokens=50, ignore_eos=True) == first
    runtime.reset()
    assert runtime.stats().kv_bytes == runtime.stats().tokens_seen == runtime.stats().compressions == 0
    assert runtime._cache.kv_bytes == 0
    assert runtime.generate(ids, max_new_tokens=50, ignore_eos=True) == first


# Batches and sampling


def test_a_row_of_a_batch_equals_the_row_alone(runtime: HardKVRuntime) -> None:
    prompts = [prompt(seed, tokens) for seed, tokens in ((5, 9), (6, 130), (7, 61), (8, 300))]
    settings: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
    together = runtime.generate(prompts, **settings)
    for ids, row in zip(prompts, together, strict=True):
        assert runtime.generate(ids, **settings) == row


def test_every_sequence_of_a_batch_is_compressed(runtime: HardKVRuntime) -> None:
    rows = runtime.generate([prompt(seed, 100) for seed in range(3)], max_new_tokens=60, ignore_eos=True)
    assert [row.stats.compressions for row in rows] == [4, 4, 4]
    for row in rows:
        assert row.stats.mean_tokens_after_compression == pytest.approx([MEAN] * 4, rel=0.02)


def test_greedy_tokens_are_stock_s_with_an_unlimited_budget(model: LoadedModel) -> None:
    keep = HardKVRuntime.from_config({**BASE, "compression": False}, loaded=model)
    ids = prompt(9, 80)
    assert keep.generate(ids, max_new_tokens=64, ignore_eos=True).token_ids == stock(model.model, ids)


def test_sampling_repeats_with_the_seed_and_does_not_depend_on_the_batch(runtime: HardKVRuntime) -> None:
    settings: dict[str, Any] = {
        "max_new_tokens": 24,
        "temperature": 1.2,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
    }
    ids = prompt(10, 40)
    one = runtime.generate(ids, seed=3, **settings)
    assert runtime.generate(ids, seed=3, **settings) == one
    assert runtime.generate([prompt(11, 33), ids], seed=2, **settings)[1].token_ids == one.token_ids
    assert runtime.generate(ids, seed=4, **settings).token_ids != one.token_ids


def test_top_k_of_one_is_greedy_and_a_penalty_forbids_repeats(runtime: HardKVRuntime) -> None:
    ids = prompt(12, 40)
    greedy = runtime.generate(ids, max_new_tokens=20, ignore_eos=True)
    assert runtime.generate(ids, max_new_tokens=20, temperature=5.0, top_k=1, ignore_eos=True) == greedy
    fresh = runtime.generate(ids, max_new_tokens=20, repetition_penalty=100.0, ignore_eos=True).token_ids
    assert len(set(fresh)) == 20
    assert not set(fresh) & set(ids)


def test_logprobs_are_the_model_s_own(model: LoadedModel) -> None:
    keep = HardKVRuntime.from_config({**BASE, "compression": False}, loaded=model)
    ids = prompt(13, 30)
    one = keep.generate(ids, max_new_tokens=5, logprobs=3, ignore_eos=True)
    assert one.logprobs is not None
    with torch.no_grad():
        logits = model.model(torch.tensor([ids + one.token_ids])).logits[0]
    expected = torch.log_softmax(logits.float(), -1)
    for step, entry in enumerate(one.logprobs):
        row = expected[len(ids) - 1 + step]
        assert entry.token_id == one.token_ids[step]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert list(entry.top_logprobs) == row.topk(3).indices.tolist()
    assert keep.generate(ids, max_new_tokens=2).logprobs is None


# Text


def test_a_stream_is_the_text_in_pieces(runtime: HardKVRuntime) -> None:
    whole = runtime.generate("Once upon a time", max_new_tokens=40)
    pieces = list(runtime.stream("Once upon a time", max_new_tokens=40))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.token_id for piece in pieces[:-1]] == whole.token_ids
    assert pieces[-1].finish_reason == whole.finish_reason


def test_a_stop_text_ends_the_generation_and_is_cut_off(runtime: HardKVRuntime) -> None:
    ids = prompt(14, 50)
    whole = runtime.generate(ids, max_new_tokens=40, ignore_eos=True).text
    stop = whole[10:13]
    one = runtime.generate(ids, max_new_tokens=40, stop=[stop], ignore_eos=True)
    assert one.finish_reason == "stop"
    assert one.text == whole[: whole.index(stop)]
    streamed = "".join(piece.text for piece in runtime.stream(ids, max_new_tokens=40, stop=[stop], ignore_eos=True))
    assert streamed == one.text


def test_a_stop_id_ends_the_generation(runtime: HardKVRuntime) -> None:
    ids = prompt(15, 50)
    whole = runtime.generate(ids, max_new_tokens=30, ignore_eos=True).token_ids
    one = runtime.generate(ids, max_new_tokens=30, stop_token_ids=[whole[7]], ignore_eos=True)
    assert one.token_ids == whole[: whole.index(whole[7]) + 1]
    assert one.finish_reason == "stop"


def test_an_abandoned_stream_gives_its_memory_back(runtime: HardKVRuntime) -> None:
    stream = runtime.stream(prompt(16, 100), max_new_tokens=40)
    next(stream)
    with pytest.raises(HardKVError, match="already generating"):
        runtime.generate("x", max_new_tokens=2)
    stream.close()  # type: ignore[attr-defined]
    assert runtime._cache.pool.manager.used_pages == 0
    assert len(runtime.generate("x", max_new_tokens=2).token_ids) == 2


# The life of a token


def test_six_rounds_keep_sinks_window_and_position_order(model: LoadedModel) -> None:
    for scorer in ("attention_power", "snapkv", "streaming"):
        config = {**BASE, "scorer": {"name": scorer, **({"rows": 16} if scorer == "snapkv" else {})}}
        cache = HardKVCache(model.model, config)
        ids = torch.tensor([prompt(17, 120)])
        hf_generate(
            model.model,
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6 * 16 + 10,
            do_sample=False,
            eos_token_id=None,
            past_key_values=cache,
        )
        cascade = cache._rows[0]
        assert cascade.compressions >= 6
        resident = cascade.resident()
        newest = list(range(cascade.seen_tokens - 8, cascade.seen_tokens))
        for positions, shown in zip(resident.positions.flatten(0, 1), resident.shown.flatten(0, 1), strict=True):
            held = positions[shown].tolist()
            assert held == sorted(set(held))
            assert held[:2] == [0, 1]
            assert held[-8:] == newest


def test_a_prompt_shorter_than_lower_is_kept_whole(runtime: HardKVRuntime) -> None:
    one = runtime.generate(prompt(18, 20), max_new_tokens=10, ignore_eos=True)
    assert one.stats.compressions == 0
    assert one.stats.tokens_kept == [[29, 29]] * 4


COMBINATIONS = [
    *[
        {"scorer": {"name": name}}
        for name in ("attention", "window_max", "h2o", "tova", "streaming", "key_norm", "random")
    ],
    {"scorer": {"name": "attention", "reduce": "max"}, "budget": {"name": "top_p", "p": 0.8, "floor_tokens": 16}},
    {"scorer": {"name": "window_max", "online": False}},
    {"scorer": {"name": "snapkv", "rows": 16}},
    {"scorer": {"name": "snapkv", "rows": 16, "pool": "logit"}, "calibrator": {"name": "temperature"}},
    {"scorer": {"name": "rkv"}},
    {"scorer": {"name": "rkv"}, "calibrator": {"name": "softmax"}},
    *[{"budget": {"name": name, "mean_tokens": MEAN}} for name in ("top_k", "ada")],
    {"budget": {"name": "threshold", "mean_share": 0.25}},
    *[{"regularizer": {"name": name}} for name in ("sparse_load", "rewrite", "flatten_max", "flatten_sum")],
    {"regularizer": {"name": "auto", "mode": "per_layer"}},
    {"regularizer": {"name": "rewrite", "mode": "union"}},
    {"condenser": {"name": "merge"}, "cache": {**CACHE, "condensed_slots": 8}},
]


@pytest.mark.parametrize("override", COMBINATIONS, ids=str)
def test_every_component_runs_and_meets_its_budget(model: LoadedModel, override: dict[str, Any]) -> None:
    runtime = HardKVRuntime.from_config({**BASE, **override}, loaded=model)
    rows = runtime.generate([prompt(19, 130), prompt(20, 90)], max_new_tokens=50, ignore_eos=True)
    for row in rows:
        assert row.finish_reason == "length"
        assert row.stats.compressions == 4
        for mean in row.stats.mean_tokens_after_compression:
            if "top_p" in str(override):
                assert 16 <= mean < 130
            elif "mean_share" in str(override):
                assert 0.2 * 90 < mean < 0.3 * 180
            else:
                assert mean == pytest.approx(MEAN, rel=0.02)
    if "per_layer" in str(override):
        assert all(len(set(heads)) == 1 for heads in rows[0].stats.tokens_kept)
    if "union" in str(override):
        assert len({count for heads in rows[0].stats.tokens_kept for count in heads}) == 1


def test_window_max_is_the_same_online_and_over_the_query_window(model: LoadedModel) -> None:
    ids = prompt(21, 120)
    rewrite: dict[str, Any] = {**BASE, "regularizer": {"name": "rewrite"}}
    both = [
        HardKVRuntime.from_config(
            {**rewrite, "scorer": {"name": "window_max", "online": online}}, loaded=model
        ).generate(ids, max_new_tokens=50, ignore_eos=True)
        for online in (True, False)
    ]
    assert both[0].token_ids == both[1].token_ids
    assert both[0].stats.tokens_kept == both[1].stats.tokens_kept


# Failing plugins and host syncs


class _Breaks(OnlineScorer):
    name = "breaks"

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.calls = 0

    def update(self, statistic: torch.Tensor, probabilities: torch.Tensor) -> None:
        statistic.add_(probabilities.mean(-2))

    def finish(self, statistic: torch.Tensor, view: ScoreView) -> torch.Tensor:
        scores = statistic[:, :, None]
        if int(view.positions.max()) < 200:  # only the long prompt of the batch
            return scores
        if self.how == "raises":
            raise ZeroDivisionError("one over none")
        return scores * float("nan") if self.how == "nan" else scores[..., :-1]


@pytest.mark.parametrize(
    ("how", "told"), [("raises", "one over none"), ("nan", "not finite"), ("shape", "gave scores of shape")]
)
def test_a_scorer_that_breaks_takes_down_its_own_sequence_only(model: LoadedModel, how: str, told: str) -> None:
    runtime = HardKVRuntime.from_config(BASE, loaded=model)
    good = HardKVRuntime.from_config({**BASE, "scorer": {"name": "h2o"}}, loaded=model)
    parts = runtime._cache.parts
    assert parts is not None
    object.__setattr__(parts, "scorer", _Breaks(how))
    short, long = prompt(22, 60), prompt(23, 190)
    rows = runtime.generate([short, long, short], max_new_tokens=40, ignore_eos=True)
    assert [row.finish_reason for row in rows] == ["length", "error", "length"]
    assert rows[1].error is not None
    assert told in rows[1].error
    assert "breaks" in rows[1].error
    expected = good.generate([short], max_new_tokens=40, ignore_eos=True)[0]
    assert len(rows[0].token_ids) == len(expected.token_ids) == 40
    assert rows[0].token_ids == rows[2].token_ids
    with pytest.raises(PluginError, match=told):
        runtime.generate(long, max_new_tokens=40, ignore_eos=True)
    assert runtime.generate(short, max_new_tokens=40, ignore_eos=True).token_ids == rows[0].token_ids
    assert runtime._cache.pool.manager.used_pages == 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2}])
def test_a_whole_step_makes_no_host_sync(family: str, sampling: dict[str, Any]) -> None:
    """Embedding, layers, cache, statistic and sampling, for sequences that joined at different lengths."""
    runtime = HardKVRuntime.from_config(BASE, loaded=loaded(family))
    running = started(runtime, [prompt(24, 60), prompt(25, 90)], {"max_new_tokens": 20, "ignore_eos": True, **sampling})
    cascades, rules = [one.cascade for one in running], [one.rules for one in running]
    runtime._loop.step(cascades, rules)  # binds: what changes only between steps may be uploaded
    with NoSync():  # type: ignore[no-untyped-call]
        chosen, logits = runtime._loop.step(cascades, rules)
    assert chosen.shape == (2,)
    assert logits.shape == (2, VOCABULARY)


def started(runtime: HardKVRuntime, prompts: list[list[int]], settings: dict[str, Any]) -> list[Any]:
    """Prefill prompts and stop before the first decode step."""
    requests, _ = runtime._requests(prompts, settings)
    runtime._prepare(requests)
    runtime._loop.prepare()
    scheduler = Scheduler(runtime._loop, 2048, None, False)
    for request in requests:
        assert isinstance(request, Request)
        list(scheduler._admit(request))
    return scheduler.running


class _Apart(CacheTier):
    """A last tier of a third party: it keeps what is let go in lists of its own, and reads no queries."""

    name = "apart"
    holds_tokens = True
    allocated_bytes = 0

    def fresh(self) -> CacheTier:
        return _Apart()

    def allocate(self, shape: TierShape) -> None:
        self.held = [torch.zeros(2, shape.heads, 0, shape.head_dim) for _ in range(shape.layers)]
        self.bias = [torch.zeros(shape.heads, 0) for _ in range(shape.layers)]

    def admit(self, layer: int, tokens: TokenBatch) -> None:
        clean = [part.masked_fill(~tokens.mask[..., None], 0.0) for part in (tokens.keys, tokens.values)]
        self.held[layer] = torch.cat([self.held[layer], torch.stack(clean)], 2)
        bias = torch.zeros(tokens.mask.shape).masked_fill(~tokens.mask, float("-inf"))
        self.bias[layer] = torch.cat([self.bias[layer], bias], 1)

    def attend(
        self, layer: int, query: torch.Tensor, scaling: float, softcap: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attend_slots(query, *self.held[layer], self.bias[layer], scaling, softcap)
        return out, lse

    def reset(self) -> None:
        self.held, self.bias = [], []


def test_a_tier_that_loses_nothing_gives_stock_s_tokens(model: LoadedModel) -> None:
    """Whatever is compressed, everything is still attended: in the pages, or by the third party's tier."""
    runtime = HardKVRuntime.from_config({**BASE, "regularizer": {"name": "rewrite"}}, loaded=model)
    object.__setattr__(runtime._cache.parts, "condenser", _Apart())
    ids = prompt(9, 80)
    one = runtime.generate(ids, max_new_tokens=64, ignore_eos=True)
    assert one.stats.compressions == 4
    assert one.token_ids == stock(model.model, ids)


def test_a_cache_for_transformers_serves_again_after_reset(model: LoadedModel) -> None:
    ids = torch.tensor([prompt(17, 120)])
    cache = HardKVCache(model.model, BASE)
    arguments: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 40,
        "do_sample": False,
        "eos_token_id": None,
        "past_key_values": cache,
    }
    first = hf_generate(model.model, ids, **arguments)
    for mode in (torch.inference_mode(), torch.enable_grad(), torch.no_grad()):
        cache.reset()
        assert cache.kv_bytes == 0
        with mode:
            assert torch.equal(hf_generate(model.model, ids, **arguments), first)


@pytest.mark.parametrize(
    ("slot", "method", "told"),
    [
        ("budget", "counts", r"budget 'threshold' gave counts \[L, H\] of shape \(1, 1\); expected \(1, 2\)"),
        ("calibrator", "calibrate", r"calibrator 'exact' gave probabilities \[B, H, R, N\] of shape"),
        ("regularizer", "layout", r"regularizer 'auto' gave keep \[L, H, N\] of shape"),
    ],
)
def test_a_stage_of_a_wrong_shape_is_named(model: LoadedModel, slot: str, method: str, told: str) -> None:
    scorer = {"scorer": {"name": "rkv"}}
    runtime = HardKVRuntime.from_config({**BASE, **scorer}, loaded=model)
    component = getattr(runtime._cache.parts, slot)
    right = getattr(component, method)

    def wrong(*arguments: Any) -> Any:
        answer = right(*arguments)
        return replace(answer, keep=answer.keep[..., :-1]) if slot == "regularizer" else answer[..., :-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(component, method, wrong)
        with pytest.raises(PluginError, match=told):
            runtime.generate(prompt(89, 100), max_new_tokens=30, ignore_eos=True)
    assert runtime._cache.pool.manager.used_pages == 0
