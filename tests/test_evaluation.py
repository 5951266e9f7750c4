"""Comparing methods: fidelity, equal budgets, one row for every component, and what cannot run says why."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from torch import Tensor

from hardkv import Budget, HardKVConfig, ImportanceScorer, Options, ScoreView, __version__
from hardkv.errors import ConfigError, InputError
from hardkv.evaluation import (
    Bench,
    Differences,
    Method,
    Row,
    all_methods,
    bundled_texts,
    choose,
    measure,
    measure_reference,
    provenance,
    ranked,
    read_workload,
    schedule,
)
from hardkv.evaluation.plotting import check_plot, draw
from hardkv.evaluation.report import report
from hardkv.evaluation.solving import MOST_PROBES, TOLERANCE, solve_share
from hardkv.interfaces import CacheTier, Calibrator, Component
from hardkv.policies.budgets.top_k import TopK
from hardkv.registry import SLOTS, Registered, Registry, load_registry
from tests.tiny_models import loaded, tiny_tokenizer

MEAN = 48
CACHE = {"sinks": 2, "local_window": 8, "query_rows": 32, "page_slots": 8}
CONFIG = HardKVConfig.model_validate({"cache": CACHE})


class NeedsFile(ImportanceScorer):
    """A scorer that cannot be built from nothing."""

    name = "needs_file"

    class Config(Options):
        file: str = Field(description="Weights.")

    def score(self, view: ScoreView) -> Tensor:
        return view.positions.float()[:, :, None]


class Explodes(ImportanceScorer):
    """A scorer that raises."""

    name = "explodes"

    def score(self, view: ScoreView) -> Tensor:
        raise ValueError("bang")


class Untargeted(TopK):
    """A budget whose size nothing here can set."""

    name = "untargeted"

    class Config(Options):
        tokens: int = 64

    config: Any


class Shared(TopK):
    """A budget that keeps a share; only its bounds say so."""

    name = "shared"
    needs_probabilities: ClassVar[bool] = False

    class Config(Options):
        part: float = Field(gt=0.0, lt=1.0, description="Share of the prompt.")

        def target_tokens(self, seen_tokens: int) -> int:
            return max(1, round(self.part * seen_tokens))

    config: Any

    def target_tokens(self, seen_tokens: int) -> int | None:
        return None


def with_plugins(*components: type[Component]) -> Registry:
    slots = {
        component: next(slot for base, slot in SLOTS.items() if issubclass(component, base)) for component in components
    }
    mine = [Registered(slot, component.name, component, "mine", "") for component, slot in slots.items()]
    return Registry([*load_registry().all(), *mine])


@pytest.fixture(scope="module")
def bench() -> Bench:
    texts = bundled_texts()[:2]
    workload = read_workload(tiny_tokenizer(), texts, schedule(160, 12))
    registry = with_plugins(NeedsFile, Explodes, Untargeted, Shared)
    return Bench(loaded(), CONFIG, registry, workload, MEAN)


@pytest.fixture(scope="module")
def methods(bench: Bench) -> dict[str, Method]:
    return {method.name: method for method in all_methods(bench.registry, bench.config, MEAN)}


# Fidelity


def test_fidelity_of_known_distributions() -> None:
    full = torch.log(torch.tensor([[0.5, 0.5], [0.8, 0.2]]))
    other = torch.log(torch.tensor([[0.25, 0.75], [0.8, 0.2]]))
    found = Differences([full, full], [[0, 0, 0]] * 2)
    for text, rows in enumerate((other, full)):
        for row, logits in enumerate(rows):
            found.take(text, row + 1, logits)
    first = 0.5 * torch.log(torch.tensor(2.0)) + 0.5 * torch.log(torch.tensor(2 / 3))
    summary = found.summary(["a", "b"], 2)
    assert summary["kl"] == pytest.approx(float(first) / 4, rel=1e-5)
    assert summary["top1_agreement"] == pytest.approx(0.75)


# Workload


def test_schedule_fills_in_what_is_left_out() -> None:
    once, often = schedule(), schedule(rounds=8)
    assert (once.prompt_tokens, once.fed_tokens, once.interval) == (2048, 256, 257)
    assert (often.prompt_tokens, often.fed_tokens, often.interval) == (1024, 1024, 128)
    with pytest.raises(InputError, match="8 rounds of 128 tokens feed 1024; leave it out"):
        schedule(fed_tokens=64, rounds=8)
    with pytest.raises(InputError, match="expected 2 or more"):
        schedule(fed_tokens=1)


def test_bundled_texts_are_long_enough_for_the_defaults() -> None:
    assert [path.name for path in bundled_texts()] == [
        *("chain_of_thought.txt", "code.txt", "dialogue.txt", "german.txt"),
        *("maths.txt", "prose.txt", "report.txt", "tables.txt"),
    ]
    assert all(len(path.read_text(encoding="utf-8").split()) > 1500 for path in bundled_texts())


def test_texts_that_cannot_be_used(tmp_path: Path) -> None:
    short, odd = tmp_path / "short.txt", tmp_path / "odd.txt"
    short.write_text("too short")
    odd.write_bytes(b"\xff\xfe")
    times = schedule(160, 12)
    for path, text in (
        (short, "short.txt: 9 tokens; 172 are needed, 160 of prompt and 12 fed after it"),
        (odd, "expected a file of UTF-8 text"),
        (tmp_path / "no.txt", "no.txt: no such file"),
    ):
        with pytest.raises(InputError, match=text):
            read_workload(tiny_tokenizer(), [path], times)


def test_a_workload_is_cut_into_prompt_and_fed_tokens(bench: Bench) -> None:
    text = bundled_texts()[0].read_text(encoding="utf-8")
    ids = tiny_tokenizer()(text)["input_ids"]
    assert bench.workload.prompts[0] + bench.workload.fed[0] == ids[:172]
    assert bench.workload.names == ("chain_of_thought.txt", "code.txt")


# Solving


@given(
    middle=st.floats(-6, 6),
    steepness=st.floats(0.5, 2),
    lowest=st.floats(1, 50),
    target=st.floats(80, 900),
    start=st.floats(0.05, 0.99),
)
def test_a_share_is_found_where_there_is_one(
    middle: float, steepness: float, lowest: float, target: float, start: float
) -> None:
    probes = []

    def mean_at(share: float) -> float:
        odds = torch.logit(torch.tensor(share, dtype=torch.float64))
        probes.append(share)
        return float(lowest + 1000 * torch.sigmoid(steepness * (odds - middle)))

    found = solve_share(mean_at, start, target)
    assert found.mean_tokens == mean_at(found.share)
    assert abs(found.mean_tokens / target - 1) <= TOLERANCE
    assert len(probes) - 1 <= MOST_PROBES


def test_what_no_share_can_meet_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no share keeps a mean of 10 tokens: 3\.\d+e-07 keeps 64\.0"):
        solve_share(lambda share: 64 + share, 0.95, 10)
    with pytest.raises(ConfigError, match=r"no share keeps a mean of 100 tokens: 0\.9999997 keeps 65\.0"):
        solve_share(lambda share: 64 + share, 0.95, 100)
    with pytest.raises(ConfigError, match="cannot search a mean of 800 tokens: more of the share keeps fewer tokens"):
        solve_share(lambda share: 1000 * (1 - share), 0.5, 800)


# The list of methods


def test_every_component_has_its_row(bench: Bench, methods: dict[str, Method]) -> None:
    assert next(iter(methods)) == "default"
    assert "config" not in methods
    names = bench.registry.names
    for scorer in names(ImportanceScorer):
        assert f"{scorer}+top_k" in methods
    for budget in names(Budget):
        assert any(method.components["budget"]["name"] == budget for method in methods.values())
    for calibrator in names(Calibrator):
        assert methods[f"snapkv+top_p+{calibrator}"].solve == "p"
    for condenser in names(CacheTier):
        assert any(method.components["condenser"]["name"] == condenser for method in methods.values())
    assert methods["default"].components["budget"] == {"name": "threshold", "mean_tokens": MEAN, "floor_share": 0.2}


def test_no_combination_is_listed_twice(bench: Bench) -> None:
    found = all_methods(bench.registry, bench.config, MEAN, ["top_k", "threshold", "top_p"])
    keys = [tuple(spec["name"] for spec in method.components.values()) for method in found]
    assert len(set(keys)) == len(keys)
    assert len({method.name for method in found}) == len(found)
    assert {"snapkv+threshold", "snapkv+top_k", "snapkv+top_p+exact"} <= {method.name for method in found}
    with pytest.raises(ConfigError, match=r"unknown budget 'topk'. Did you mean 'top_k'"):
        all_methods(bench.registry, bench.config, MEAN, ["topk"])


def test_a_configuration_has_its_row_and_its_options_hold_for_its_components(bench: Bench) -> None:
    own = HardKVConfig.model_validate(
        {"cache": CACHE, "scorer": {"name": "needs_file", "file": "w"}, "budget": {"name": "ada", "mean_share": 0.1}}
    )
    found = {method.name: method for method in all_methods(bench.registry, own, MEAN)}
    assert found["config"].components["budget"] == {"name": "ada", "mean_tokens": MEAN}
    assert found["config"].obstacle is None
    assert found["needs_file+top_k"].components["scorer"] == {"name": "needs_file", "file": "w"}
    assert found["needs_file+top_k"].obstacle is None


def test_choosing_by_name_or_component(bench: Bench) -> None:
    every = all_methods(bench.registry, bench.config, MEAN)

    def names(*wanted: str) -> list[str]:
        return [method.name for method in choose(every, wanted)]

    assert names("snapkv+top_k", "default") == ["default", "snapkv+top_k"]
    assert names("snapkv") == ["snapkv+top_k", *(f"snapkv+top_p+{name}" for name in bench.registry.names(Calibrator))]
    assert "default" in names("threshold")
    with pytest.raises(InputError, match=r"no method is called 'snapvk'. Did you mean 'snapkv'"):
        names("snapvk")


def test_a_condenser_that_holds_tokens_takes_them_from_the_budget(methods: dict[str, Method]) -> None:
    merge = methods["attention_power+threshold+merge"]
    assert merge.condensed_slots == MEAN // 12
    assert merge.components["budget"]["mean_tokens"] == MEAN - MEAN // 12


# Measuring


def test_a_cache_that_keeps_every_token_has_no_divergence(bench: Bench) -> None:
    reference = measure_reference(bench)
    rows = bench.runtime({}, compression=False).teacher_force(bench.workload.prompts, bench.workload.fed)
    for logits, expected in zip(reference.logits, rows, strict=True):
        torch.testing.assert_close(torch.log_softmax(logits, -1), expected[1:], rtol=0, atol=0)
    roomy = Method("roomy", {**_specs(bench), "budget": {"name": "threshold", "mean_tokens": 400}})
    row = measure(bench, reference, roomy)
    assert row.kl == pytest.approx(0.0, abs=1e-5)
    assert (row.top1_agreement, row.compressions, row.note) == (1.0, 0, "never compressed")
    assert (row.mean_tokens, row.compression_ms) == (None, None)


def _specs(bench: Bench) -> dict[str, dict[str, Any]]:
    return {slot: getattr(bench.config, slot).model_dump() for slot in SLOTS.values()}


def test_methods_meet_the_same_mean_and_those_that_cannot_say_why(bench: Bench, methods: dict[str, Method]) -> None:
    reference = measure_reference(bench)

    def row(name: str) -> Row:
        return measure(bench, reference, methods[name])

    for name in ("default", "streaming+top_k", "attention_power+threshold+merge", "attention_power+shared"):
        found = row(name)
        assert found.note is None, name
        assert found.mean_tokens == pytest.approx(MEAN, rel=0.01), name
        assert found.kl is not None
        assert found.kl > 0
        assert found.compressions == 2
        assert found.compression_ms is not None
        assert found.compression_ms > 0
        assert found.kv_bytes is not None
        assert found.kv_bytes_share == found.kv_bytes / reference.kv_bytes
    assert row("attention_power+shared").solved["budget.part"] == pytest.approx(MEAN / 160, rel=0.02)
    for name, note in {
        "needs_file+top_k": "not run: needs scorer.file; give it with --config: scorer: {name: needs_file, file: ...}",
        "explodes+top_k": "failed: scorer 'explodes' raised ValueError: bang",
        "attention_power+untargeted": "not run: budget 'untargeted' has no option mean_tokens, nor one share",
    }.items():
        found = row(name)
        assert str(found.note).startswith(note)
        assert found.kl is None


def test_top_p_is_solved_for_the_mean_under_every_calibrator(bench: Bench, methods: dict[str, Method]) -> None:
    reference = measure_reference(bench)
    for calibrator in ("exact", "temperature"):
        method = methods[f"snapkv+top_p+{calibrator}"]
        budget = {**method.components["budget"], "floor_tokens": 16}
        row = measure(bench, reference, Method(method.name, {**method.components, "budget": budget}, solve="p"))
        assert row.note is None
        assert row.mean_tokens == pytest.approx(MEAN, rel=TOLERANCE)
        assert row.components["budget"]["p"] == row.solved["budget.p"]
        assert 0 < row.solved["budget.p"] < 1
    floor = methods["snapkv+top_p+exact"]
    refused = measure(bench, reference, floor)  # its floor of 64 tokens is above the mean
    assert str(refused.note).startswith("not run: no share keeps a mean of 48 tokens")


def test_rounds_compress_again_while_decoding(bench: Bench, methods: dict[str, Method]) -> None:
    workload = read_workload(tiny_tokenizer(), bundled_texts()[:1], schedule(96, rounds=3, interval=16))
    again = Bench(bench.loaded, bench.config, bench.registry, workload, MEAN)
    row = measure(again, measure_reference(again), methods["default"])
    assert (row.compressions, row.note) == (3, None)


# Reports and pictures


@pytest.fixture(scope="module")
def found(bench: Bench, methods: dict[str, Method]) -> dict[str, Any]:
    reference = measure_reference(bench)
    rows = [measure(bench, reference, methods[name]) for name in ("needs_file+top_k", "random+top_k", "default")]
    return report("hardkv compare", bench, reference, rows, complete=True)


def test_a_report_is_ranked_and_says_what_it_was_made_with(found: dict[str, Any]) -> None:
    assert json.loads(json.dumps(found)) == found | {"texts": ["chain_of_thought.txt", "code.txt"]}
    assert found["rows"][-1]["method"] == "needs_file+top_k"
    assert found["rows"][0]["kl"] <= found["rows"][1]["kl"]
    assert found["versions"]["hardkv"] == __version__
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["versions"]) == {"hardkv", "torch", "transformers", "python"}
    assert found["machine"] == provenance(torch.device("cpu"))["machine"]
    assert (found["prompt_tokens"], found["fed_tokens"], found["rounds"]) == (160, 12, 1)


def test_ranking_puts_rows_without_a_number_last() -> None:
    rows = [Row("a", {}), Row("b", {}, kl=2.0), Row("c", {}, kl=1.0), Row("d", {})]
    assert [row.method for row in ranked(rows)] == ["c", "b", "a", "d"]


@pytest.mark.parametrize(("name", "start"), [("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml"), ("plot.pdf", b"%PDF")])
def test_a_picture_is_drawn(found: dict[str, Any], tmp_path: Path, name: str, start: bytes) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'hardkv[plot]'")
    path = tmp_path / name
    check_plot(path)
    draw(found, path)
    assert path.read_bytes().startswith(start)
    if name == "plot.svg":
        assert all(
            text in path.read_text() for text in ("not run: needs_file+top_k", "default (attention_power+threshold)")
        )


def test_pictures_that_cannot_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    there: Any = object()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there)
    with pytest.raises(InputError, match=r"--plot plot.bmp: expected a name that ends in .png, .svg, .pdf"):
        check_plot(Path("plot.bmp"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"not installed: pip install 'hardkv\[plot\]'"):
        check_plot(Path("plot.png"))
