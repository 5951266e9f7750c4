"""`hardkv compare`: one table, JSON, files, and errors before any work."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging as transformers_logging

import hardkv.evaluation
from hardkv.cli.command_lines import spread
from hardkv.evaluation import Row, bundled_texts
from tests.command_line import Call, Called, run_main
from tests.tiny_models import save_tiny

PLUGIN = """
import hardkv
class Oldest(hardkv.ImportanceScorer):
    '''Oldest first.'''
    name = "oldest_here"
    def score(self, view):
        return -view.positions.float()[:, :, None]
class Broken(hardkv.ImportanceScorer):
    '''Always raises.'''
    name = "broken_here"
    def score(self, view):
        raise ValueError("bang")
@hardkv.hookimpl
def hardkv_components():
    return [Oldest, Broken]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def call(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Compare on the tiny model with a small cache, and a plugin beside the configuration."""
    transformers_logging.disable_progress_bar()
    (tmp_path / "here.py").write_text(PLUGIN)
    settings = {
        "plugins": ["here"],
        "model": {"id": model},
        "cache": {"sinks": 2, "local_window": 8, "query_rows": 32, "page_slots": 8},
        "budget": {"name": "ada", "mean_tokens": 100},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    capsys.readouterr()

    def run(*arguments: str, sizes: tuple[str, ...] = ("--mean-budget", "48", "--prompt-tokens", "160")) -> Called:
        return run_main(["compare", "-c", str(tmp_path / "run.yaml"), *sizes, "--fed-tokens", "12", *arguments], capsys)

    return run


def test_several_values_after_one_option() -> None:
    assert spread(["--texts", "a", "b", "--json", "--only=x", "y"], {"--texts", "--only"}) == [
        *("--texts", "a", "--texts", "b"),
        "--json",
        *("--only=x", "--only", "y"),
    ]


def test_a_table_of_methods_with_the_plugins_and_the_configuration(call: Call) -> None:
    names = ["config", "default", "oldest_here", "broken_here"]
    result = call("--only", *names, "--texts", *map(str, bundled_texts()[:2]))
    assert result.code == 0
    for text in (
        "config (attention_power+ada)",
        "oldest_here+top_k",
        "failed: scorer 'broken_here' raised ValueError: bang",
    ):
        assert text in result.out
    assert "in float32, mean budget 48 tokens per head; 2 texts: 160 tokens, then 12 given ones" in result.out
    assert result.out.index("default (") < result.out.index("broken_here+top_k")
    assert "every token kept" in result.err
    assert "4/4 " in result.err


def test_json_output_and_picture_hold_the_same(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'hardkv[plot]'")
    saved, plot = tmp_path / "compare.json", tmp_path / "compare.png"
    text = str(bundled_texts()[0])
    result = call("--only", "streaming", "--texts", text, "--json", "-o", str(saved), "--plot", str(plot))
    found = json.loads(result.out)
    assert found == json.loads(saved.read_text())
    assert plot.read_bytes().startswith(b"\x89PNG")
    (row,) = found["rows"]
    assert row["method"] == "streaming+top_k"
    assert row["components"]["budget"] == {"name": "top_k", "mean_tokens": 48}
    assert row["mean_tokens"] == pytest.approx(48, rel=0.01)
    assert (found["complete"], found["dtype"], found["mean_budget"]) == (True, "float32", 48)
    assert found["command"].startswith("hardkv compare -c ")
    assert found["command"].endswith(f"-o {saved} --plot {plot}")


def test_precision_of_the_configuration_or_the_option(call: Call) -> None:
    one = ("--only", "streaming", "--texts", str(bundled_texts()[0]), "--json")
    assert json.loads(call(*one, "--set", "model.dtype=bfloat16").out)["dtype"] == "bfloat16"
    assert json.loads(call(*one, "--dtype", "bfloat16").out)["dtype"] == "bfloat16"


def test_an_interrupt_shows_what_there_is(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    whole = hardkv.evaluation.measure

    def interrupted(*arguments: Any) -> Row:
        if measured:
            raise KeyboardInterrupt
        measured.append(arguments[-1].name)
        return whole(*arguments)

    monkeypatch.setattr(hardkv.evaluation, "measure", interrupted)
    result = call("--only", "streaming", "random", "--texts", str(bundled_texts()[0]), "--json")
    assert result.code == 130
    assert "interrupted" in result.err
    found = json.loads(result.out)
    assert found["complete"] is False
    assert [row["method"] for row in found["rows"]] == measured


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--texts", "missing.txt"], "--texts missing.txt: no such file"),
        (["--only", "snapvk"], "no method is called 'snapvk'. Did you mean 'snapkv'?"),
        (["--budgets", "topk"], "unknown budget 'topk'. Did you mean 'top_k'?"),
        (["--rounds", "2"], "--fed-tokens 12: 2 rounds of 128 tokens feed 256; leave it out"),
        (["--output", "no/such/folder.json"], "--output no/such/folder.json: its folder does not exist"),
        (["--plot", "no/such/folder.png"], "--plot no/such/folder.png: its folder does not exist"),
        (["--mean-budget", "160"], "expected fewer than the 160 tokens of a prompt"),
        (["--mean-budget", "10"], "expected more than cache.sinks + cache.local_window (2 + 8)"),
        (["--prompt-tokens", "100000"], "chain_of_thought.txt: "),
        (["--dtype", "float8"], "model.dtype: "),
        (["surplus.txt"], "unexpected extra argument"),
    ],
)
def test_errors_come_before_any_work(call: Call, arguments: list[str], text: str) -> None:
    result = call(*arguments)
    assert (result.code, result.out) == (2, "")
    assert text in result.err
    assert "every token kept" not in result.err


def test_a_picture_without_matplotlib_is_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = call("--plot", "plot.png")
    assert result.code == 2
    assert "--plot needs matplotlib, which is not installed: pip install 'hardkv[plot]'" in result.err
