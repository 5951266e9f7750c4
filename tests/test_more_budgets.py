"""Budgets `pyramid`, `static_heads` and `bytes`, and how bytes are shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardkv import CapacityError, ConfigError, HardKVCache, HardKVRuntime
from hardkv.config import load_config
from hardkv.policies.budgets.bytes import Bytes
from hardkv.policies.budgets.pyramid import Pyramid
from hardkv.policies.budgets.static_heads import StaticHeads
from hardkv.policies.budgets.threshold import Threshold
from hardkv.sharing import fair_level
from hardkv.types import Limits
from tests.test_budgets import SEEDS, SHAPES, draw_claims, limits_of
from tests.tiny_models import loaded, tiny_model

CONFIG: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "cache": {"interval": 16, "local_window": 8, "query_rows": 16, "page_slots": 8},
}


# pyramid


def literal_pyramid(target: int, beta: float, layers: int, least: int) -> list[float]:
    """The series of the paper, term by term."""
    top = max(target / beta, least)
    top = min(top, target)
    bottom = 2 * target - top
    if layers == 1:
        return [float(target)]
    return [bottom - (bottom - top) / (layers - 1) * layer for layer in range(layers)]


@given(st.integers(1, 400), st.floats(1.0, 40.0), st.integers(1, 40), st.integers(0, 40))
def test_pyramid_is_the_series_of_the_paper(target: int, beta: float, layers: int, window: int) -> None:
    budget = Pyramid(Pyramid.Config(mean_tokens=target, beta=beta))
    counts = budget._layer_counts(Limits(0, window, 0, 1 << 40, total_layers=layers))
    exact = literal_pyramid(target, beta, layers, max(window, 1))
    assert len(counts) == layers
    for count, wanted in zip(counts, exact, strict=True):
        assert abs(count - wanted) <= 1
    assert sum(counts) == target * layers
    if layers > 1:
        assert counts[0] >= max(counts) - 1  # rounding
        assert min(counts) >= 1


@given(SEEDS, SHAPES, st.integers(1, 30))
def test_pyramid_counts_hold_to_the_bounds_and_do_not_change_as_layers_are_added(
    seed: int, shape: tuple[int, int, int], target: int
) -> None:
    claims = draw_claims(seed, shape, "flat")
    budget, limits = Pyramid(Pyramid.Config(mean_tokens=target)), limits_of(claims, upper=25)
    counts = budget.counts(claims, limits)
    protected = claims.protected.sum(-1)
    assert bool((counts >= protected).all())
    assert bool((counts <= torch.maximum(claims.resident.clamp(max=25), protected)).all())
    assert bool((counts[claims.resident > 0] >= 1).all())
    first = budget.counts(claims.layer(0), limits)
    assert torch.equal(first, counts[:1])


def test_pyramid_meets_its_mean_in_a_runtime() -> None:
    runtime = HardKVRuntime.from_config(
        {**CONFIG, "scorer": {"name": "h2o"}, "budget": {"name": "pyramid", "mean_tokens": 40}}, loaded=loaded()
    )
    answer = runtime.generate(list(range(150)), max_new_tokens=70, ignore_eos=True)
    assert answer.stats.mean_tokens_after_compression == [40.0] * 5
    # 67 down to 12 (what is protected) and the tokens since
    assert answer.stats.tokens_kept == [[73, 73], [54, 54], [36, 36], [17, 17]] or [
        row[0] - answer.stats.tokens_kept[3][0] for row in answer.stats.tokens_kept
    ] == [56, 37, 19, 0]


# static_heads


def pattern_file(folder: Path, text: str) -> str:
    file = folder / "heads.tsv"
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("text", ["0.9\t0.1\n0.4\t0.5\n", "[[0.9, 0.1], [0.4, 0.5]]", "0.9, 0.1\n\n0.4 0.5"])
def test_static_heads_reads_tables_and_json(tmp_path: Path, text: str) -> None:
    budget = StaticHeads(StaticHeads.Config(pattern=pattern_file(tmp_path, text)))
    assert budget._full.tolist() == [[True, False], [False, True]]
    strict = StaticHeads(StaticHeads.Config(pattern=pattern_file(tmp_path, text), threshold=0.6))
    assert strict._full.tolist() == [[True, False], [False, False]]
    share = StaticHeads(StaticHeads.Config(pattern=pattern_file(tmp_path, text), full_share=0.75))
    assert share._full.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.9 x\n", "expected one row for each layer with one number from 0 to 1"),
        ("0.9 0.1\n0.5\n", "expected one row for each layer"),
        ("0.9 1.1\n", "expected one row for each layer"),
        ("[0.9, 0.1]", "expected one row for each layer"),
        ("", "expected one row for each layer"),
    ],
)
def test_static_heads_says_what_a_pattern_looks_like(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({**CONFIG, "budget": {"name": "static_heads", "pattern": pattern_file(tmp_path, text)}})


def test_static_heads_refuses_a_missing_file_and_two_rules(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.tsv"):
        load_config({**CONFIG, "budget": {"name": "static_heads", "pattern": str(tmp_path / "gone.tsv")}})
    options = {"pattern": pattern_file(tmp_path, "1 0"), "threshold": 0.5, "full_share": 0.5}
    with pytest.raises(ConfigError, match="give threshold or full_share, not both"):
        load_config({**CONFIG, "budget": {"name": "static_heads", **options}})


def test_static_heads_refuses_a_pattern_of_another_model(tmp_path: Path) -> None:
    config = {**CONFIG, "budget": {"name": "static_heads", "pattern": pattern_file(tmp_path, "1 0\n0 1\n1 1\n")}}
    with pytest.raises(ConfigError, match=r"has 3 rows of 2 numbers; the model has 4 layers with 2 KV heads"):
        HardKVRuntime.from_config(config, loaded=loaded())


@pytest.mark.parametrize("rows", [4, 2])
def test_static_heads_keeps_all_or_recent_tokens(tmp_path: Path, rows: int) -> None:
    """Over the layers of the model, or over those of full attention: two of four in this hybrid one."""
    pattern = [[1, 0]] * rows
    config = {
        **CONFIG,
        "scorer": {"name": "streaming"},
        "budget": {
            "name": "static_heads",
            "pattern": pattern_file(tmp_path, json.dumps(pattern)),
            "recent_tokens": 20,
        },
    }
    runtime = HardKVRuntime.from_config(config, loaded=loaded("gemma3_text"))
    answer = runtime.generate(list(range(150)), max_new_tokens=49, ignore_eos=True)
    full = [answer.stats.tokens_kept[layer] for layer in runtime.geometry.full_layers]
    since = full[0][1] - 20
    assert full == [[198, 20 + since]] * 2
    assert 0 <= since <= 16
    assert answer.stats.compressions == 3


# bytes


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(1, 100), st.integers(1, 3000))
def test_the_fair_level_is_max_min_fair(needs: list[int], least: int, room: int) -> None:
    level = fair_level(needs, lambda need, level: min(need, level), room, least)
    held = [min(need, least) for need in needs]
    if sum(held) > room:
        assert level is None
        return
    # literally: give one token in turn to each that wants one, until the room is full
    top = least
    while top < max(needs) and sum(min(need, top + 1) for need in needs) <= room:
        top += 1
    assert level == top


@given(SEEDS, SHAPES, st.integers(4, 30))
def test_bytes_spreads_its_share_as_threshold_does(seed: int, shape: tuple[int, int, int], share: int) -> None:
    claims = draw_claims(seed, shape, "peaked")
    limits = limits_of(claims, share_tokens=share)
    counts = Bytes(Bytes.Config(total=10**6)).counts(claims, limits)
    wanted = Threshold(Threshold.Config(mean_tokens=share, floor_share=0.2)).counts(claims, limits_of(claims))
    assert torch.equal(counts, wanted)


def shared(total: int, **options: int) -> dict[str, Any]:
    return {**CONFIG, "budget": {"name": "bytes", "total": total, "least_tokens": 32, **options}}


PROMPTS = [list(range(200)), list(range(60)), list(range(40, 200))]


@settings(max_examples=8)
@given(st.integers(110_000, 900_000))
def test_all_that_is_allocated_stays_within_the_bytes(total: int) -> None:
    runtime = HardKVRuntime.from_config(shared(total), loaded=MODEL)
    answers = runtime.generate(PROMPTS, max_new_tokens=60, ignore_eos=True)
    assert [answer.finish_reason for answer in answers] == ["length"] * 3
    stats = runtime.stats()
    assert stats.kv_bytes_reserved <= total
    assert stats.kv_bytes_reserved > 0.7 * min(total, 700_000)
    # as many as fit run together, and what is left goes to each by need
    means = [mean for answer in answers for mean in answer.stats.mean_tokens_after_compression]
    assert all(mean >= 32 for mean in means)


MODEL = loaded()


def test_a_short_sequence_leaves_its_share_to_the_long_ones() -> None:
    total = 330_000
    runtime = HardKVRuntime.from_config(shared(total), loaded=MODEL)
    alone = runtime.generate(PROMPTS[0], max_new_tokens=40, ignore_eos=True).stats.mean_tokens_after_compression
    both = runtime.generate([PROMPTS[0], PROMPTS[1]], max_new_tokens=40, ignore_eos=True)
    three = runtime.generate([PROMPTS[0], PROMPTS[2]], max_new_tokens=40, ignore_eos=True)
    assert not both[1].stats.mean_tokens_after_compression  # 100 tokens: all are kept
    first, second, third = alone or [240.0], both[0].stats.mean_tokens_after_compression, three[0].stats
    assert second[0] > third.mean_tokens_after_compression[0]
    assert first[0] >= second[0]
    assert len(set(second)) == 1


def test_what_ends_leaves_its_share_to_those_that_go_on() -> None:
    runtime = HardKVRuntime.from_config(shared(330_000), loaded=MODEL)
    admission = runtime._cache.admission
    shares = []
    for piece in runtime._run(runtime._requests([PROMPTS[0], PROMPTS[2]], {"max_new_tokens": 20})[0], None):
        shares.append(admission.share_tokens)
        if piece.request.index == 1 and len(piece.request.generated) >= 3:
            piece.request.cancelled = True
    assert shares[-1] is not None
    assert shares[0] is not None
    assert shares[-1] > shares[0]


def test_too_few_bytes_are_refused_with_what_is_needed() -> None:
    runtime = HardKVRuntime.from_config(shared(40_000), loaded=MODEL)
    with pytest.raises(CapacityError, match=r"shares 40,000 bytes; a sequence of 260 tokens needs at least \d+,\d{3}"):
        runtime.generate(PROMPTS, max_new_tokens=60)


def test_bytes_serves_a_cache_of_a_foreign_loop() -> None:
    model: Any = tiny_model("llama")
    ids = torch.randint(0, 250, (2, 100))
    cache = HardKVCache(model, shared(900_000), max_tokens=150)
    model.generate(ids, past_key_values=cache, max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert cache._cache.reserved_bytes <= 900_000 * 1.02  # tables besides
    small = HardKVCache(model, shared(120_000), max_tokens=150)
    with pytest.raises(CapacityError, match="2 rows of 150 tokens do not fit"):
        model.generate(ids, past_key_values=small, max_new_tokens=40, do_sample=False)
