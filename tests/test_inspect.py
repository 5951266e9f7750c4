"""Looking inside a generation: what is recorded is what the cache holds, and recording changes nothing."""

from __future__ import annotations

import importlib.util
import json
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers.utils import logging as transformers_logging

from hardkv import HardKVRuntime
from hardkv.cache import CascadeCache
from hardkv.errors import InputError
from hardkv.evaluation.inspection import Recorder, Trace, record, terminal
from hardkv.evaluation.inspection.binning import marked, shares
from hardkv.evaluation.inspection.page import page
from hardkv.evaluation.inspection.recording import _runs, token_texts
from hardkv.tiers.cascade import Cascade
from tests.command_line import Call, Called, run_main
from tests.tiny_models import loaded, save_tiny, tiny_tokenizer

PROMPT = [(number * 37) % 250 for number in range(150)]
NEW: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
MASKING: dict[str, Any] = {"regularizer": {"name": "sparse_load"}}
HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> & http://example.org/"


def runtime(family: str = "llama", **changes: Any) -> HardKVRuntime:
    small = {
        "model": {"dtype": "float32"},
        "cache": {"sinks": 2, "local_window": 8, "interval": 16, "page_slots": 8, **changes.pop("cache", {})},
        "budget": {"name": "threshold", "mean_tokens": 48},
        **changes,
    }
    return HardKVRuntime.from_config(small, loaded=loaded(family))


class Comparing(Recorder):
    """Compares each pass's record with the cascade's own tables."""

    compared = 0

    def on_compression(self, index: int, cascade: Cascade, cache: CascadeCache) -> None:
        super().on_compression(index, cascade, cache)
        mine, resident = self.passes[-1], cascade.resident()
        hidden = resident.valid & ~resident.shown
        for ranges, chosen in ((mine.shown, resident.shown), (mine.masked, hidden)):
            for layer, row in enumerate(ranges):
                for head, each in enumerate(row):
                    held = resident.positions[layer, head][chosen[layer, head]].tolist()
                    assert np.flatnonzero(marked(each, cascade.seen_tokens)).tolist() == held
                    self.compared += 1
        assert mine.kept == cascade.kept_tokens().tolist()
        assert mine.tokens_seen == cascade.seen_tokens


@pytest.fixture(scope="module")
def trace() -> Trace:
    return record(runtime(**MASKING), PROMPT, **NEW)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", MASKING),
        ("gemma2", {"regularizer": {"name": "rewrite"}}),
        ("llama", {"condenser": {"name": "merge"}, "cache": {"condensed_slots": 8}}),
        ("llama", {"compression": False}),
    ],
)
def test_the_record_is_what_the_cascade_holds_and_changes_nothing(family: str, changes: dict[str, Any]) -> None:
    running = runtime(family, **changes)
    plain = running.generate(PROMPT, **NEW)
    stats = running.stats()
    observer = Comparing()
    observed = running.generate(PROMPT, observer=observer, **NEW)
    assert observed == plain
    assert running.stats().tokens_kept == stats.tokens_kept
    assert running.stats().kv_bytes == stats.kv_bytes == observer.steps[-1].kv_bytes
    full = len(running.geometry.full_layers)
    assert observer.compared == 2 * full * 2 * len(observer.passes)
    assert sum(each.selected for each in observer.passes) == plain.stats.compressions
    found = record(running, PROMPT, **NEW)
    assert (found.passes, found.steps) == (observer.passes, observer.steps)
    assert found.tokens_kept == plain.stats.tokens_kept
    assert found.steps[-1].tokens_seen == plain.stats.tokens_seen


def test_steps_add_up_and_masked_tokens_are_counted(trace: Trace) -> None:
    cells = len(trace.full_layers) * trace.heads
    assert [each.step for each in trace.passes] == [0, 16, 32]
    assert [step.step for step in trace.steps] == sorted([*range(40), 16, 32])
    for each in trace.passes:
        (step,) = [step for step in trace.steps if step.step == each.step][-1:]
        masked = sum(sum(part[1::2]) - sum(part[::2]) for row in each.masked for part in row)
        assert step.sparse_masked_slots == masked
        assert step.sparse_shown_slots + step.dense_slots == sum(map(sum, each.kept))
        assert (step.dense_slots, each.dense_tokens) == (8 * cells, 8)
    assert any(step.sparse_masked_slots for step in trace.steps)
    assert all(step.tokens_seen == 150 + step.step for step in trace.steps)


def test_passes_beside_decode_steps_are_recorded_alike(trace: Trace) -> None:
    running = runtime(**MASKING)
    running._overlaps = True
    observer = Comparing()
    running.generate(PROMPT, observer=observer, **NEW)
    assert (observer.passes, observer.steps) == (trace.passes, trace.steps)


def test_condensed_slots_are_counted() -> None:
    found = record(runtime(condenser={"name": "merge"}, cache={"condensed_slots": 8}), PROMPT, **NEW)
    assert {step.condensed_slots for step in found.steps} == {8 * 8}


def test_every_so_many_steps_passes_and_the_last_step_are_there(trace: Trace) -> None:
    sparse = record(runtime(**MASKING), PROMPT, every_steps=25, **NEW)
    # Before a pass the step it follows is kept too, or the rise to it would be lost.
    assert [step.step for step in sparse.steps] == [0, 16, 16, 25, 32, 32, 39]
    assert sparse.passes == trace.passes
    assert sparse.steps[-1] == trace.steps[-1]


def test_sliding_layers_keep_their_window() -> None:
    found = record(runtime("gemma2"), PROMPT, **NEW)
    assert found.windows == [24, None, 24, None]
    assert found.full_layers == [1, 3]
    assert found.tokens_kept[0] == [24, 24]
    assert "sliding window of 24" in drawn(terminal.heat_map(found, 100))
    with pytest.raises(InputError, match="layer 2 attends a sliding window of 24 tokens and is not compressed; 1, 3"):
        found.numbered(2, 0)


def test_json_round_trip_and_what_is_no_trace(trace: Trace) -> None:
    assert Trace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace
    for broken in ({}, {**trace.to_dict(), "surplus": 1}, {**trace.to_dict(), "steps": [{"step": 0}]}):
        with pytest.raises(InputError, match="expected the trace that 'hardkv inspect --json' writes under 'trace'"):
            Trace.from_dict(broken)


def test_only_one_prompt() -> None:
    running = runtime()
    with pytest.raises(InputError, match="record takes one prompt, got a batch of 2"):
        record(running, [PROMPT, PROMPT])
    with pytest.raises(InputError, match="a recorder follows one prompt"):
        running.generate([PROMPT, PROMPT], observer=Recorder(), **NEW)
    assert len(running.generate(PROMPT, **NEW).token_ids) == 40


@settings(deadline=None, max_examples=30)
@given(st.sets(st.integers(0, 90)))
def test_ranges_hold_the_positions(positions: set[int]) -> None:
    ranges = _runs(np.array(sorted(positions), dtype=np.int64))
    assert set(np.flatnonzero(marked(ranges, 91)).tolist()) == positions
    assert all(later > earlier for earlier, later in pairwise(ranges))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 80))
def test_shares_keep_the_total(marks: list[bool], bins: int) -> None:
    found = shares(np.array(marks), bins)
    sizes = [len(part) for part in np.array_split(np.array(marks), len(found))]
    assert len(found) == min(bins, len(marks))
    assert float(found @ np.array(sizes)) == pytest.approx(sum(marks))


def test_token_texts_join_to_the_text() -> None:
    tokenizer: Any = tiny_tokenizer()
    ids = [*tokenizer("naïve 語!")["input_ids"], tokenizer.eos_token_id, *tokenizer("ok")["input_ids"][:1]]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == "naïve 語!</s>o"


def drawn(thing: Any, width: int = 200) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(thing)
    return captured.get()


def test_the_terminal_shows_counts_sinks_and_window(trace: Trace) -> None:
    text = drawn(terminal.heat_map(trace, 100))
    assert all(f" {count:,}" in text for row in trace.passes[-1].kept for count in row)
    narrow = drawn(terminal.heat_map(trace, 20))
    assert len(narrow.splitlines()) == len(text.splitlines())
    count, layer, head = trace.ranked_heads[-1]
    assert f"layer {layer}, KV head {head}: {count} tokens" in terminal.summary(trace)["greediest head"]
    # Wide enough that each column is one position.
    total = trace.passes[-1].tokens_seen
    lines = drawn(terminal.strip_chart(trace, layer, head, total + 24), total + 24).splitlines()
    index = trace.numbered(layer, head)
    for each, line in zip(trace.passes, lines[2:], strict=False):
        kept = {place for place, mark in enumerate(line[16:]) if mark == "█"}
        assert kept == set(np.flatnonzero(marked(each.shown[index][head], total)).tolist())
        assert len(line) <= 16 + total
        assert line[16:].rstrip().count("·") == each.tokens_seen - len(kept)
    assert lines[2 + len(trace.passes)].strip() == "SS" + " " * (total - 10) + "W" * 8
    bars = drawn(terminal.occupancy(trace, 100))
    assert all(name in bars for name in ("dense", "sparse", "masked", "KV MiB"))
    assert "condensed" not in bars


class Scripts(HTMLParser):
    """Collects the scripts and everything that would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.loads: list[tuple[str, str | None]] = []
        self.tags: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [pair for pair in attrs if pair[0] in ("src", "href", "srcset", "action", "onerror")]
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


def test_the_page_loads_nothing_and_text_stays_text(trace: Trace) -> None:
    found = {"command": f"hardkv inspect {HOSTILE}", "trace": {**trace.to_dict(), "tokens": [HOSTILE, "\u2028", "é"]}}
    text, plain = page(found), page({"trace": trace.to_dict()})
    for pattern in ("http:", "https:", "//cdn", "@import", "url(", "fetch(", "innerHTML", "<img"):
        assert pattern not in plain
    seen = Scripts()
    seen.feed(text)
    assert seen.loads == []
    assert "img" not in seen.tags
    data, program = seen.scripts
    assert json.loads(data) == found
    assert "alert" not in program
    assert "default-src 'none'" in text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), "gemma2")


@pytest.fixture
def call(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    transformers_logging.disable_progress_bar()
    run_yaml = tmp_path / "run.yaml"
    cache = {"sinks": 2, "local_window": 8, "interval": 16, "page_slots": 8}
    chosen = {"max_new_tokens": 20, "ignore_eos": True}
    run_yaml.write_text(json.dumps({"model": {"id": model, "dtype": "float32"}, "cache": cache, "generation": chosen}))
    (tmp_path / "prompt.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    capsys.readouterr()

    def run(*arguments: str, prompt: tuple[str, ...] = ("-f", str(tmp_path / "prompt.txt"))) -> Called:
        return run_main(["inspect", *prompt, "-c", str(run_yaml), "--mean-tokens", "48", "--raw", *arguments], capsys)

    return run


def test_terminal_output_for_extremes_and_for_one_head(call: Call) -> None:
    result = call()
    assert (result.code, result.err) == (0, "")
    for text in ("180 of prompt, 20 generated", "sliding window of 24", "Slots per head over 19 decode steps"):
        assert text in result.out
    assert result.out.count("pass by pass") == 2
    one = call("--layer", "3", "--head", "1")
    assert one.out.count("pass by pass") == 1
    assert "Layer 3, KV head 1: positions 0 to 195, pass by pass" in one.out


def test_json_files_and_the_picture(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'hardkv[plot]'")
    saved, html, plot = (tmp_path / name for name in ("trace.json", "trace.html", "trace.png"))
    files = ("-o", str(saved), "--html", str(html), "--plot", str(plot))
    result = call("--json", "--every", "4", *files)
    found = json.loads(result.out)
    assert found == json.loads(saved.read_text())
    assert set(found) == {"command", "versions", "machine", "settings", "trace"}
    assert found["command"].startswith("hardkv inspect -f ")
    assert found["settings"]["budget"]["mean_tokens"] == 48
    kept = Trace.from_dict(found["trace"])
    assert kept.prompt_tokens == 180
    assert "".join(kept.tokens).startswith("The quick brown fox")
    assert kept.mean_kept() == pytest.approx(48, rel=0.05)
    assert plot.read_bytes().startswith(b"\x89PNG")
    seen = Scripts()
    seen.feed(html.read_text())
    assert json.loads(seen.scripts[0]) == found


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--layer", "1"], "--layer and --head go together"),
        (["--layer", "4", "--head", "0"], "layer 4: the model has layers 0 to 3"),
        (["--layer", "1", "--head", "2"], "head 2: the model has KV heads 0 to 1"),
        (["--layer", "0", "--head", "0"], "layer 0 attends a sliding window of 24 tokens and is not compressed"),
        (["--html", "no/such/page.html"], "--html no/such/page.html: its folder does not exist"),
        (["-o", "no/such/trace.json"], "--output no/such/trace.json: its folder does not exist"),
        (["--plot", "trace.txt"], "--plot trace.txt: expected a name that ends in .png, .svg, .pdf"),
        (["--every", "0"], "--every"),
        (["--max-new-tokens", "0"], "generation.max_new_tokens"),
    ],
)
def test_errors_come_before_generation(call: Call, arguments: list[str], text: str) -> None:
    result = call(*arguments)
    assert (result.code, result.out) == (2, "")
    assert text in result.err


def test_a_prompt_is_needed_and_matplotlib_for_a_picture(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the prompt is empty" in call(prompt=(" ",)).err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = call("--plot", "trace.png")
    assert result.code == 2
    assert "--plot needs matplotlib, which is not installed: pip install 'hardkv[plot]'" in result.err
