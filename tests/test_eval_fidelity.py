"""What `hardkv eval fidelity` measures, each against a literal restatement, and the variants it reads."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hardkv import HardKVConfig, HardKVRuntime
from hardkv.errors import ConfigError, InputError
from hardkv.evaluation import Differences, Predictions, chosen_texts, read_workload, schedule
from hardkv.evaluation.bench import measure, measure_reference
from hardkv.evaluation.faithful import (
    DEFAULT,
    FULL,
    Panel,
    Task,
    Variant,
    check_room,
    methods_at,
    read_variants,
    tasks_of,
)
from hardkv.evaluation.faithful.free import compare_free
from hardkv.evaluation.faithful.held import Held, HeldRecorder
from hardkv.evaluation.faithful.layers import ERROR, MASS, judge_layers
from hardkv.model_adapter import LoadedModel, read_geometry
from hardkv.registry import SLOTS, load_registry
from tests.tiny_models import loaded, tiny_tokenizer

MEAN, PROMPT, INTERVAL = 48, 96, 16
CACHE = {"sinks": 2, "local_window": 8, "query_rows": 32, "page_slots": 8}
CONFIG = HardKVConfig.model_validate({"cache": CACHE})
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return loaded(num_hidden_layers=2)


@pytest.fixture(scope="module")
def panel(tiny: LoadedModel) -> Panel:
    workload = read_workload(tiny_tokenizer(), chosen_texts(["prose", "code"]), schedule(PROMPT, None, 3, INTERVAL))
    return Panel(tiny, CONFIG, load_registry(), workload, free_tokens=12, layers=True)


@pytest.fixture(scope="module")
def full(panel: Panel) -> dict[str, Any]:
    return panel.begin()


def task(name: str = DEFAULT, mean_tokens: int = MEAN, **changes: Any) -> Task:
    (method,) = methods_at(load_registry(), CONFIG, mean_tokens, [name])
    return Task(3, mean_tokens, replace(method, **changes))


# Predictions


def test_a_budget_without_limit_loses_nothing(panel: Panel, full: dict[str, Any]) -> None:
    row, held = panel.measure(task("streaming+top_k", 1000))
    (layers,) = panel.judge([held])
    assert row["kl"] == pytest.approx(0.0, abs=1e-5)
    assert (row["top1_agreement"], row["compressions"]) == (1.0, 0)
    assert row["perplexity"] == pytest.approx(full["perplexity"], rel=1e-4)
    assert row["perplexity_full"] == full["perplexity"]
    assert layers["attention_mass_kept"] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert layers["attention_output_error"] == pytest.approx([0.0, 0.0], abs=1e-5)
    assert row["first_divergence"] == {"prose.txt": 12, "code.txt": 12}
    assert (row["first_divergence_median"], row["first_divergence_mean"], row["same_tokens"]) == (12.0, 12.0, 1.0)


def test_perplexity_is_that_of_a_literal_loop(tiny: LoadedModel, panel: Panel, full: dict[str, Any]) -> None:
    surprises = []
    for prompt, fed in zip(panel.bench.workload.prompts, panel.bench.workload.fed, strict=True):
        with torch.no_grad():
            logits = tiny.model(torch.tensor([[*prompt, *fed]])).logits[0].double()
        # The first token after the prompt is left out; the one after t is predicted where t stands.
        lines = [-torch.log_softmax(logits[PROMPT + t - 1], 0)[fed[t]] for t in range(1, len(fed))]
        surprises.append(sum(map(float, lines)) / len(lines))
    assert full["perplexity"] == pytest.approx(math.exp(sum(surprises) / 2), rel=1e-4)
    assert (full["method"], full["mean_budget"], full["rounds"]) == (FULL, None, 3)


def test_a_row_adds_up(panel: Panel, full: dict[str, Any]) -> None:
    row, held = panel.measure(task())
    kl = row["kl_by_text"]
    assert row["kl"] == pytest.approx(sum(kl.values()) / 2)
    assert row["kl"] > 1e-3
    assert row["kl_standard_error"] == pytest.approx(abs(kl["prose.txt"] - kl["code.txt"]) / 2)
    # The last block lacks the prediction after the last token.
    weights = [INTERVAL, INTERVAL, INTERVAL - 1]
    by_round = zip(row["kl_by_round"], weights, strict=True)
    assert row["kl"] == pytest.approx(sum(value * weight for value, weight in by_round) / sum(weights))
    assert (row["compressions"], row["interval"], row["note"]) == (6, INTERVAL, None)
    assert row["mean_tokens"] == pytest.approx(MEAN, rel=0.02)
    assert [[one.since for one in text] for text in held] == [[PROMPT, PROMPT + INTERVAL, PROMPT + 2 * INTERVAL]] * 2
    assert all(0 <= index <= 12 for index in row["first_divergence"].values())


def test_a_variant_has_its_own_interval_over_the_same_tokens(panel: Panel, full: dict[str, Any]) -> None:
    row, held = panel.measure(task(cache={"interval": 8}))
    assert (row["compressions"], row["interval"], row["cache"]) == (12, 8, {"interval": 8})
    assert (len(row["kl_by_round"]), len(held[0])) == (3, 6)
    once = replace(panel.bench, workload=read_workload(tiny_tokenizer(), chosen_texts(["prose"]), schedule(PROMPT, 12)))
    assert measure(once, measure_reference(once), task(cache={"interval": 8}).method).compressions == 1


def test_differences_of_known_distributions() -> None:
    full = torch.log(torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.8, 0.2]]))
    other = torch.log(torch.tensor([[0.9, 0.1], [0.25, 0.75], [0.8, 0.2]]))
    fed = [[0, 1, 0]]
    kept = Predictions(fed, torch.float32)
    for row, logits in enumerate(full):
        kept.take(0, row, logits + 3.0)  # logits may be shifted
    assert kept.perplexity == pytest.approx((0.5 * 0.8) ** -0.5)
    found = Differences(kept.logits, fed)
    for row, logits in enumerate(other):
        found.take(0, row, logits)
    first = 0.5 * math.log(2.0) + 0.5 * math.log(2 / 3)
    summary = found.summary(["a"], 1)
    assert summary["kl_by_round"] == pytest.approx([first, 0.0], abs=1e-6)
    assert summary["kl"] == pytest.approx(first / 2)
    assert summary["perplexity"] == pytest.approx((0.75 * 0.8) ** -0.5)
    assert (summary["kl_standard_error"], list(summary["kl_by_text"])) == (None, ["a"])


def test_forced_rows_are_those_of_the_runtime(tiny: LoadedModel) -> None:
    runtime = HardKVRuntime.from_config(CONFIG, loaded=tiny)
    prompts, fed = [[1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10], [11, 12]]
    rows: dict[int, list[Tensor]] = {0: [], 1: []}

    def take(text: int, row: int, logits: Tensor) -> None:
        assert row == len(rows[text])
        rows[text].append(torch.log_softmax(logits, -1))

    runtime.force(prompts, fed, take)
    for text, expected in enumerate(runtime.teacher_force(prompts, fed)):
        torch.testing.assert_close(torch.stack(rows[text]), expected)


# Layers


def literal(attention: Tensor, values: Tensor, rows: range, reads: Any) -> tuple[float, float]:
    """Mean mass and error of one query head, in plain loops and float64, from transformers' own probabilities."""
    masses, errors = [], []
    for row in rows:
        kept = [slot for slot in reads(row) if slot <= row]
        mass = sum(float(attention[row, slot]) for slot in kept)
        ours = sum(attention[row, slot] / mass * values[slot] for slot in kept)
        whole = sum(attention[row, slot] * values[slot] for slot in range(row + 1))
        masses.append(mass)
        errors.append(float(torch.linalg.norm(ours - whole) / torch.linalg.norm(whole)))
    return sum(masses) / len(masses), sum(errors) / len(errors)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_mass_and_error_of_a_known_set(family: str) -> None:
    """Compressed after 30 tokens of prompt and after 5 of 9 fed ones; every head has its own set."""
    made = loaded(family, num_hidden_layers=2)
    geometry = read_geometry(made.model)
    torch.manual_seed(1)
    tokens, prompt, second = torch.randint(0, 250, (39,)), 30, 35
    first_set, second_set = torch.rand(2, 2, prompt) < 0.4, torch.rand(2, 2, second) < 0.3
    found = judge_layers(made, geometry, tokens.tolist(), prompt, [[Held.of(first_set), Held.of(second_set)]])[0]

    values: list[Tensor] = []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda module, args, out: values.append(out[0].double()))
        for layer in made.model.model.layers
    ]
    with torch.no_grad():
        output = made.model(tokens[None], output_attentions=True)
    for hook in hooks:
        hook.remove()
    for layer in range(2):
        numbers = []
        for query_head in range(4):
            head = query_head // 2

            def reads(row: int, layer: int = layer, head: int = head) -> list[int]:
                chosen = first_set if row < second else second_set
                return [*chosen[layer, head].nonzero()[:, 0].tolist(), *range(chosen.shape[-1], row + 1)]

            value = values[layer][:, head * 16 : head * 16 + 16]
            numbers.append(literal(output.attentions[layer][0, query_head].double(), value, range(prompt, 39), reads))
        mass, error = (sum(column) / 4 for column in zip(*numbers, strict=True))
        assert float(found[MASS, layer]) == pytest.approx(mass, rel=1e-4)
        assert float(found[ERROR, layer]) == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_softcap_and_sink_logits_are_the_models(family: str) -> None:
    """Of all tokens nothing is lost, whatever the model does to its logits; of few, something is."""
    made = loaded(family)
    geometry = read_geometry(made.model)
    layers = len(geometry.full_layers)
    everything = Held.of(torch.ones(layers, 2, 40, dtype=torch.bool))
    few = Held.of(torch.arange(40).expand(layers, 2, 40) % 5 == 0)
    whole, part = judge_layers(made, geometry, list(range(45)), 40, [[everything], [few]])
    assert whole[MASS].tolist() == pytest.approx([1.0] * layers, abs=1e-5)
    assert whole[ERROR].tolist() == pytest.approx([0.0] * layers, abs=1e-5)
    assert ((part[MASS] < 0.9) & (part[ERROR] > 0.05)).all()


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 40), st.integers(0, 5))
def test_held_positions_come_back(tokens: int, seed: int) -> None:
    shown = torch.rand(2, 3, tokens, generator=torch.Generator().manual_seed(seed)) < 0.5
    held = Held.of(shown)
    for layer in range(2):
        for head in range(3):
            assert held.positions(layer, head).tolist() == shown[layer, head].nonzero()[:, 0].tolist()


def test_what_a_cache_holds_is_what_its_statistics_count(tiny: LoadedModel) -> None:
    """With keep bits: masked slots are held by the cache, but not read."""
    config = HardKVConfig.model_validate(
        {
            "cache": {**CACHE, "interval": INTERVAL, "upper": 200},
            "budget": {"name": "threshold", "mean_tokens": MEAN},
            "regularizer": {"name": "sparse_load"},
        }
    )
    runtime, recorder = HardKVRuntime.from_config(config, loaded=tiny), HeldRecorder(1)
    answer = runtime.generate(list(range(90)), max_new_tokens=40, ignore_eos=True, observer=recorder)
    counts = [
        sum(len(held.positions(layer, head)) for layer in range(2) for head in range(2)) / 4
        for held in recorder.held[0]
    ]
    assert counts == pytest.approx(answer.stats.mean_tokens_after_compression)
    newest = [held.positions(1, 1).tolist()[-8:] for held in recorder.held[0]]
    assert newest == [list(range(held.since - 8, held.since)) for held in recorder.held[0]]


def test_the_first_divergence_and_the_same_tokens() -> None:
    found = compare_free(["a", "b", "c"], [[1, 2, 3, 4]] * 3, [[1, 2, 3, 4], [1, 9, 3, 4], [9, 2, 9, 9]])
    assert found["first_divergence"] == {"a": 4, "b": 1, "c": 0}
    assert (found["first_divergence_median"], found["first_divergence_mean"]) == (1.0, pytest.approx(5 / 3))
    assert found["same_tokens"] == pytest.approx((1.0 + 0.75 + 0.25) / 3)


# Methods and variants


def variants(folder: Path, text: str) -> list[Variant]:
    (folder / "v.yaml").write_text(text)
    return read_variants(folder / "v.yaml", load_registry(), None, [("cache.sinks", 2), ("scorer.name", "h2o")], MEAN)


def test_a_variant_is_the_shipped_default_with_its_settings(tmp_path: Path) -> None:
    text = "plain:\nrows 64: {scorer.name: window_max, cache.query_rows: 64}\nuniform: {budget.name: top_k}\n"
    plain, rows, uniform = (one.method(load_registry(), MEAN, 8) for one in variants(tmp_path, text))
    (default,) = methods_at(load_registry(), HardKVConfig(), MEAN, [DEFAULT])
    assert (plain.name, plain.components, plain.cache) == ("plain", default.components, {})
    assert (rows.components["scorer"], rows.cache) == ({"name": "window_max"}, {"query_rows": 64})
    assert rows.components["budget"] == default.components["budget"]
    assert uniform.components["budget"] == {"name": "top_k", "mean_tokens": MEAN}


def test_variants_that_cannot_run_say_why(tmp_path: Path) -> None:
    interval, window = variants(tmp_path, "i: {cache.interval: 64}\nw: {cache.local_window: 64}\n")
    assert interval.method(load_registry(), MEAN, 8).obstacle is None
    assert "no difference to a single compression" in str(interval.method(load_registry(), MEAN, 1).obstacle)
    assert "(2 + 64) are the whole mean budget" in str(window.method(load_registry(), MEAN, 8).obstacle)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: {cache.local_windw: 3}", r"'a': .*local_windw.*Did you mean 'local_window'"),
        ("a: {cache.local_window: many}", r"'a': cache.local_window: .*\(got 'many'\)"),
        ("a: {scorer.name: snapvk}", r"'a': .*unknown scorer 'snapvk'. Did you mean 'snapkv'"),
        ("a: {budget.name: topk}", r"'a': budget.name: unknown budget 'topk'. Did you mean 'top_k'"),
        ("a: {scorer.rows: 3}", "'a': .*rows"),
        ("a: {budget.mean_tokens: 3}", "'a': budget.mean_tokens: the mean comes from --mean-budgets"),
        ("a: {model.id: x}", "'a': model.id: a variant changes keys that begin with one of cache., scorer."),
        ("a: {cache.max_sequences: 4}", "'a': cache.max_sequences: is the same in every row"),
        ("a: 3", "'a': expected settings such as cache.local_window: 64, got 3"),
        ("a: {}\na: {}", r"duplicate key 'a' in lines 1 and 2"),
    ],
)
def test_faulty_variants_are_refused(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises((ConfigError, InputError), match=error):
        variants(tmp_path, text)


def test_every_variant_that_comes_with_the_project_runs() -> None:
    (prompt,) = read_variants(ROOT / "benchmarks" / "prompt.yaml", load_registry(), None, [], 192)
    assert prompt.method(load_registry(), 192, 1).obstacle is None
    found = read_variants(ROOT / "benchmarks" / "defaults.yaml", load_registry(), None, [], 192)
    methods = [one.method(load_registry(), 192, 8) for one in found]
    assert len(methods) == 16
    assert [method.name for method in methods if method.obstacle is not None] == []
    default = {slot: getattr(HardKVConfig(), slot).model_dump() for slot in SLOTS.values()}
    default["budget"]["mean_tokens"] = 192
    assert all(method.components != default or method.cache for method in methods)
    assert {method.name.split()[0] for method in methods} >= {
        "scorer",
        "budget",
        "interval",
        "local_window",
        "no",
        "prompt",
    }


def test_methods_by_name_by_component_and_all() -> None:
    registry = load_registry()

    def names(*chosen: str) -> list[str]:
        return [method.name for method in methods_at(registry, CONFIG, MEAN, list(chosen))]

    assert names("h2o", "default", "snapkv+threshold") == ["h2o+top_k", "default", "snapkv+threshold"]
    assert len(names("all")) > 20
    short = [method.name for method in methods_at(registry, CONFIG, MEAN, None)]
    assert short == [
        *("default", "window_max+threshold", "snapkv+top_k", "h2o+top_k", "tova+top_k", "streaming+top_k"),
        "expected_attention+top_k",
    ]
    with pytest.raises(InputError, match="no method is called 'h20'"):
        names("h20")


def test_a_sweep_has_every_row_once(tmp_path: Path) -> None:
    found = tasks_of(
        load_registry(), CONFIG, ([1, 8], [96, 48]), [DEFAULT, "h2o"], variants(tmp_path, "a: {}\ndefault:\n")
    )
    assert [one.key for one in found] == [
        (rounds, mean, name) for rounds in (1, 8) for mean in (96, 48) for name in (DEFAULT, "h2o+top_k", "a")
    ]
    with pytest.raises(InputError, match="'h2o\\+top_k' is what another row is called; rename it"):
        tasks_of(load_registry(), CONFIG, ([1], [48]), ["h2o"], variants(tmp_path, "h2o+top_k: {}"))


# Texts and room


def test_texts_by_name_and_by_file(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("mine")
    assert [path.name for path in chosen_texts([str(own), "prose"])] == ["own.txt", "prose.txt"]
    assert len(chosen_texts(None)) == 8
    with pytest.raises(InputError, match=r"--texts pros: no such file. Did you mean 'prose'"):
        chosen_texts(["pros"])
    with pytest.raises(InputError, match=r"two texts are called own.txt"):
        chosen_texts([str(own), str(own)])


def test_what_runs_past_the_last_position_is_refused(panel: Panel) -> None:
    with pytest.raises(InputError, match="--free-tokens 40: with prompts of 96 tokens this is beyond the model's 120"):
        check_room(replace(panel.bench.workload, schedule=schedule(PROMPT, 12)), 40, 120)
