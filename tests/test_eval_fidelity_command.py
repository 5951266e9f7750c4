"""`hardkv eval fidelity`: tables, JSON, what a kill leaves, resuming, pictures, and errors before any work."""

from __future__ import annotations

import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

from hardkv.evaluation.faithful import Panel
from hardkv.evaluation.faithful.held import Held
from hardkv.evaluation.faithful.pending import Pending
from hardkv.evaluation.faithful.plotting import _apart, draw
from hardkv.evaluation.pages import read_result, write_page
from tests.command_line import Call, Called, run_main
from tests.tiny_models import save_tiny

PLUGIN = """
import hardkv
class Broken(hardkv.ImportanceScorer):
    '''Always raises.'''
    name = "broken_here"
    def score(self, view):
        raise ValueError("bang")
@hardkv.hookimpl
def hardkv_components():
    return [Broken]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture
def call(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    transformers_logging.disable_progress_bar()
    (tmp_path / "here.py").write_text(PLUGIN)
    settings = {
        "plugins": ["here"],
        "model": {"id": model},
        "cache": {"sinks": 2, "local_window": 8, "query_rows": 32, "page_slots": 8},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    capsys.readouterr()
    small = (
        "--mean-budgets",
        "64",
        "48",
        "--prompt-tokens",
        "96",
        "--fed-tokens",
        "12",
        "--free-tokens",
        "4",
        "--texts",
        "prose",
    )

    def run(*arguments: str, sizes: tuple[str, ...] = small) -> Called:
        return run_main(["eval", "fidelity", "-c", str(tmp_path / "run.yaml"), *sizes, *arguments], capsys)

    return run


class Count:
    """Counts what is measured and judged, and breaks off where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured: list[str] = []
        self.judged: list[int] = []
        self.break_at_row, self.break_at_judging = -1, False
        measure, judge = Panel.measure, Panel.judge

        def counted(panel: Panel, task: Any) -> Any:
            if len(self.measured) == self.break_at_row:
                raise KeyboardInterrupt
            self.measured.append(task.method.name)
            return measure(panel, task)

        def judged(panel: Panel, runs: Any) -> Any:
            if self.break_at_judging:
                raise KeyboardInterrupt
            self.judged.append(len(runs))
            return judge(panel, runs)

        monkeypatch.setattr(Panel, "measure", counted)
        monkeypatch.setattr(Panel, "judge", judged)


def test_tables_of_two_rounds_and_what_the_default_has(call: Call, tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_text("window 16: {cache.local_window: 16}\ninterval 8: {cache.interval: 8}\n")
    options = ("--only", "default", "snapkv+top_k", "broken_here", "--variants", str(tmp_path / "v.yaml"))
    result = call(*options, "--rounds", "1", "3", "--interval", "16")
    assert result.code == 0
    for text in (
        "in float32, one compression; 1 text: 96 tokens, then 12 given ones",
        "in float32, 3 rounds; 1 text: 96 tokens, then 48 given ones",
        "failed: scorer 'broken_here' raised ValueError: bang",
    ):
        assert text in result.out
    assert result.err.count("not run: cache.interval makes no difference to a single compression") == 2
    assert result.err.count("failed: scorer 'broken_here' raised ValueError: bang") == 4
    assert result.out.index("full cache") < result.out.index("default")
    lines = [line for line in result.out.splitlines() if ": default has " in line]
    assert [line.split(":")[0] for line in lines] == [
        *("one compression, 64 tokens", "one compression, 48 tokens", "3 rounds, 64 tokens", "3 rounds, 48 tokens")
    ]
    assert all("the best of the others" in line for line in lines)
    assert "3 rounds, every token kept: perplexity" in result.err


def test_json_and_file_hold_the_same(call: Call, tmp_path: Path) -> None:
    save = tmp_path / "fid.json"
    found = call("--only", "default", "h2o", "--json", "-o", str(save)).json
    assert found == json.loads(save.read_text())
    assert [found[key] for key in ("kind", "complete", "dtype", "texts", "layers")] == [
        *("fidelity", True, "float32", ["prose.txt"], [0, 1])
    ]
    assert found["command"].startswith("hardkv eval fidelity -c ")
    assert set(found["versions"]) == {"hardkv", "torch", "transformers", "python"}
    assert [(row["mean_budget"], row["method"]) for row in found["rows"]] == [
        *((None, "full cache"), (64, "default"), (64, "h2o+top_k"), (48, "default"), (48, "h2o+top_k"))
    ]
    _, default, h2o, *_ = found["rows"]
    assert default["kl_ratio_to"] == {"h2o+top_k": default["kl"] / h2o["kl"]}
    assert default["kl_by_text"] == {"prose.txt": default["kl"]}
    assert (default["kl_standard_error"], len(default["kl_by_round"])) == (None, 1)
    for row in (default, h2o):
        assert row["mean_tokens"] == pytest.approx(64, rel=0.02)
        assert all(0 < mass <= 1 for mass in row["attention_mass_kept"])
        assert len(row["attention_output_error"]) == 2
        assert 1 <= row["first_divergence"]["prose.txt"] <= 4
    assert not list(tmp_path.glob("fid.json.*"))


def test_what_can_be_left_out(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    count = Count(monkeypatch)
    rows = call("--only", "h2o", "--no-layers", "--free-tokens", "0", "--json").json["rows"]
    assert count.judged == []
    assert rows[1]["attention_mass_kept"] is None
    assert "first_divergence" not in rows[1]


def test_each_row_is_on_the_disk_and_none_is_measured_twice(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, count = tmp_path / "fid.json", Count(monkeypatch)
    options = ("--only", "default", "h2o", "-o", str(save))
    count.break_at_row = 3
    broken = call(*options)
    assert (broken.code, "interrupted" in broken.err) == (130, True)
    found = json.loads(save.read_text())
    assert found["complete"] is False
    assert [row["method"] for row in found["rows"]] == ["full cache", "default", "h2o+top_k", "default"]
    assert found["rows"][1]["attention_mass_kept"] is None  # judged later, from what lies beside the file
    assert (tmp_path / "fid.json.held").exists()
    assert "holds an unfinished result; --resume continues it" in call(*options).err

    count.break_at_row, count.break_at_judging = -1, True
    assert call(*options, "--resume").code == 130
    assert len(count.measured) == 3
    count.break_at_judging = False
    resumed = call(*options, "--resume")
    assert (resumed.code, count.measured) == (0, ["default", "h2o+top_k", "default", "h2o+top_k"])
    assert "3 of 4 rows are there" in resumed.err
    assert count.judged == [3, 1]
    assert not (tmp_path / "fid.json.held").exists()
    whole = json.loads(save.read_text())
    assert whole["complete"] is True
    assert all(row["attention_mass_kept"] for row in whole["rows"][1:])
    expected = call("--only", "default", "h2o", "--json").json["rows"]
    for row, other in zip(whole["rows"], expected, strict=True):
        for key in ("kl", "attention_mass_kept", "attention_output_error", "first_divergence", "perplexity"):
            assert row.get(key) == (pytest.approx(other[key], rel=1e-6) if key in other else None)
    assert call(*options, "--resume", "--only", "snapkv+top_k").code == 0
    assert count.measured[8:] == ["snapkv+top_k", "snapkv+top_k"]  # more rows may be added
    assert len(json.loads(save.read_text())["rows"]) == 7


def test_settings_that_differ_are_not_resumed(call: Call, tmp_path: Path) -> None:
    save, file = tmp_path / "fid.json", tmp_path / "v.yaml"
    file.write_text("mine: {cache.local_window: 16}")
    options = ("--only", "default", "--variants", str(file), "--no-layers", "-o", str(save))
    assert call(*options).code == 0
    before = save.read_bytes()
    for change, text in (
        (("--set", "cache.sinks=3"), "was made with other settings: cache.sinks: 2 there, 3 now. Give those"),
        (("--free-tokens", "0"), "free_tokens: 4 there, 0 now"),
        (("--texts", "code"), "texts.code.txt: None there"),
    ):
        result = call(*options, *change, "--resume")
        assert result.code == 2
        assert text in result.err.replace("\n", " "), change
    file.write_text("mine: {cache.local_window: 12}")
    result = call(*options, "--resume")
    assert result.code == 2
    assert "row 'mine' of" in result.err
    assert "cache.local_window: 16 there, 12 now" in result.err.replace("\n", " ")
    assert save.read_bytes() == before
    save.write_text("{}")
    assert "is no result of 'hardkv eval fidelity'" in call(*options, "--resume").err


def test_what_was_held_survives_and_a_damaged_file_is_no_obstacle(tmp_path: Path) -> None:
    pending = Pending(tmp_path / "x.json")
    runs = [[Held.of(torch.rand(1, 2, size) < 0.5) for size in (9, 17)], [Held.of(torch.ones(1, 2, 3) > 0)]]
    pending.add((8, 48, "a/b"), runs)
    again = Pending(tmp_path / "x.json")
    again.resume()
    ((key, found),) = again.of(8).items()
    assert (key, again.of(1)) == ((8, 48, "a/b"), {})
    assert [[one.since for one in text] for text in found] == [[9, 17], [3]]
    assert (found[0][1].bits == runs[0][1].bits).all()
    (tmp_path / "x.json.held").write_bytes(b"PK half of it")
    again.resume()
    assert again.runs == {}


def test_the_frontier_is_drawn_and_reported(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'hardkv[plot]'")
    save, plot = tmp_path / "fid.json", tmp_path / "fid.svg"
    result = call("--only", "default", "h2o", "broken_here", "-o", str(save), "--plot", str(plot))
    assert result.code == 0
    assert "<svg" in plot.read_text()
    text = write_page([read_result(save)], "t")
    for expected in (
        "KL over the mean budget, one compression, nats per token (lower is better)",
        "h2o+top_k",
        "attention mass kept",
        "failed: scorer &#x27;broken_here&#x27; raised ValueError: bang",
    ):
        assert expected in text, expected


def test_one_budget_without_layers_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'hardkv[plot]'")
    common = {"rounds": 8, "mean_budget": 48, "prompt_tokens": 96, "fed_tokens": 8, "mean_tokens": 48.0}
    rows = [{**common, "method": name, "kl": kl} for name, kl in (("default", 0.0), ("h2o+top_k", 0.25))]
    found = {"model": "m", "dtype": "float32", "texts": ["a"], "layers": [0], "rows": rows}
    draw(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_labels_keep_apart_and_in_order() -> None:
    places = _apart({"a": 0.5, "b": 0.5, "c": 0.51, "d": 1.0}, 0.1)
    heights = [places[name] for name in "abcd"]
    assert all(above - below >= 0.1 - 1e-9 for below, above in pairwise(heights))
    assert heights[-1] <= 1.0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--texts", "proze"], "--texts proze: no such file. Did you mean 'prose'?"),
        (["--only", "snapvk"], "no method is called 'snapvk'. Did you mean 'snapkv'?"),
        (["--mean-budgets", "96"], "--mean-budgets 96: expected fewer than the 96 tokens of a prompt"),
        (["--mean-budgets", "10"], "expected more than cache.sinks + cache.local_window (2 + 8)"),
        (["--rounds", "3", "--fed-tokens", "9"], "--fed-tokens 9: is for one compression"),
        (["--variants", "no.yaml"], "no.yaml: no such file"),
        (["--resume"], "--resume: there is nothing to go on with; name the file with --output"),
        (["--output", "no/such/folder.json"], "--output no/such/folder.json: its folder does not exist"),
        (["--plot", "frontier.gif"], "--plot frontier.gif: expected a name that ends in .png, .svg, .pdf"),
        (["--free-tokens", "2000"], "--free-tokens 2000: with prompts of 96 tokens this is beyond the model's 2048"),
        (["--prompt-tokens", "100000"], "prose.txt: "),
    ],
)
def test_errors_come_before_any_work(call: Call, arguments: list[str], text: str) -> None:
    result = call(*arguments)
    assert (result.code, result.out) == (2, "")
    assert text in result.err.replace("\n", " ")
    assert "every token kept" not in result.err


def test_a_picture_without_matplotlib_is_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = call("--plot", "plot.png")
    assert result.code == 2
    assert "pip install 'hardkv[plot]'" in result.err


def test_the_help_mentions_what_it_does(call: Call) -> None:
    text = " ".join(call("--help").out.split())
    for words in ("--mean-budgets TOKENS...", "--variants FILE", "--resume", "--free-tokens", "--no-layers"):
        assert words in text
