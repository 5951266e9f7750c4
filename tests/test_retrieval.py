"""`hardkv eval retrieval`: samples from a seed, their lengths and places, scoring, and the command on a tiny model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import logging as transformers_logging

import hardkv.evaluation.retrieval.running as running
from hardkv.cli.command_lines import spread
from hardkv.config import HardKVConfig
from hardkv.errors import InputError
from hardkv.evaluation.retrieval import (
    DIFFICULTIES,
    FULL,
    TASKS,
    Answer,
    build,
    cells,
    chosen_difficulty,
    chosen_methods,
    read_frame,
    score,
    standard_error,
    summary,
)
from hardkv.registry import load_registry
from tests.command_line import Call, Called, run_main
from tests.tiny_models import loaded, save_tiny, tiny_tokenizer

TOKENS = 900
BROKEN = """
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
    config = {
        "model": {"id": model, "dtype": "float32"},
        "cache": {"sinks": 2, "local_window": 8, "query_rows": 32, "page_slots": 8},
        "budget": {"name": "threshold", "mean_tokens": 64},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    capsys.readouterr()
    small = ("--contexts", "600", "--depths", "0.2", "0.9", "--samples", "1", "--tasks", "needle")

    def run(*arguments: str) -> Called:
        return run_main(["eval", "retrieval", "-c", str(tmp_path / "run.yaml"), *small, *arguments], capsys)

    return run


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("chat", [True, False])
def test_a_sample_has_its_length_and_what_is_asked_for(task: str, chat: bool) -> None:
    tokenizer = tiny_tokenizer()
    frame = read_frame(tokenizer, chat)
    for depth in (0.0, 0.37, 1.0):
        sample = build(frame, task, DIFFICULTIES["easy"], TOKENS, depth, 0, 7)
        # A word of English has at most 16 bytes, which are this tokenizer's tokens.
        assert TOKENS - 16 < len(sample.prompt_ids) <= TOKENS
        text = str(tokenizer.decode(sample.context_ids))
        assert all(text.count(number) == 1 for number in sample.expected)
        assert text.startswith("user: Read") == chat
        ending = tokenizer.decode(sample.question_ids)
        assert not any(number in ending for number in sample.expected)
        assert ("?\nassistant: " in ending) == chat


@settings(max_examples=10, deadline=None)
@given(depth=st.floats(0.0, 1.0), index=st.integers(0, 9))
def test_the_needle_lies_at_its_depth(depth: float, index: int) -> None:
    tokenizer = tiny_tokenizer()
    sample = build(read_frame(tokenizer, False), "needle", DIFFICULTIES["easy"], 4000, depth, index, 0)
    text = tokenizer.decode(sample.context_ids)
    # The nearest boundary of a sentence; the longest of the texts has some 400 letters.
    assert text.index("The secret code") / len(text) == pytest.approx(depth, abs=0.08)


def test_a_sample_is_named_by_its_arguments() -> None:
    frame = read_frame(tiny_tokenizer())

    def hash_of(task: str = "needle", tokens: int = TOKENS, depth: float = 0.5, index: int = 0, seed: int = 0) -> str:
        return build(frame, task, DIFFICULTIES["normal"], tokens, depth, index, seed).prompt_hash

    others = [hash_of("multi_needle"), hash_of(tokens=1000), hash_of(depth=0.25), hash_of(index=1), hash_of(seed=1)]
    assert hash_of() == hash_of()
    assert len({hash_of(), *others}) == 6


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
@pytest.mark.parametrize("task", TASKS)
def test_the_right_answer_is_scored_right(task: str, difficulty: str) -> None:
    puzzle = TASKS[task](random.Random(3), DIFFICULTIES[difficulty], 0.5)
    assert score(puzzle.rest, puzzle.expected) == 1.0
    assert len(puzzle.expected) == (DIFFICULTIES[difficulty].needles if task == "multi_needle" else 1)


def test_the_chain_of_variables_ends_in_the_number() -> None:
    puzzle = TASKS["variable_tracking"](random.Random(0), DIFFICULTIES["hard"], 0.5)
    told = dict(re.findall(r"variable (\w+) is equal to (\w+)", " ".join(placed.text for placed in puzzle.placed)))
    name = re.findall(r"variable (\w+)", puzzle.question)[0]
    hops = 0
    while name in told:
        name, hops = told[name], hops + 1
    assert ([name], hops - 1) == (puzzle.expected, DIFFICULTIES["hard"].hops)
    assert len(told) == DIFFICULTIES["hard"].hops + 1 + DIFFICULTIES["hard"].distractors


def test_too_short_a_context_and_a_chat_without_template_are_refused() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(InputError, match="--contexts 100: too short for task 'needle': the placed sentences alone"):
        build(read_frame(tokenizer), "needle", DIFFICULTIES["easy"], 100, 0.5, 0, 0)
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="--chat: this model's tokenizer has no chat template"):
        read_frame(tokenizer, True)


@pytest.mark.parametrize(
    ("answer", "expected", "correct"),
    [
        (" 4821.", ["4821"], 1.0),
        (" 4,821, I think", ["4821"], 1.0),
        (" 48210.", ["4821"], 0.0),
        (" not 1234 but 4821", ["4821"], 0.0),
        (" equal to B7. It is 4821", ["4821"], 1.0),
        (" 2222 and 1111", ["1111", "2222", "3333", "4444"], 0.5),
        ("", ["4821"], 0.0),
    ],
)
def test_score(answer: str, expected: list[str], correct: float) -> None:
    assert score(answer, expected) == correct


def test_standard_error_is_wilsons() -> None:
    """The interval's ends solve (p - mean)^2 = p (1 - p) / n."""
    for scores in ([1.0] * 4, [1.0, 0.0, 0.0], [0.0] * 9):
        count, mean = len(scores), sum(scores) / len(scores)
        centre, error = (mean + 1 / (2 * count)) / (1 + 1 / count), standard_error(scores)
        for end in (centre - error, centre + error):
            assert (end - mean) ** 2 == pytest.approx(end * (1 - end) / count, abs=1e-12)


def _answer(method: str, index: int, correct: float) -> Answer:
    return Answer(method, "needle", 512, 0.5, index, f"hash {index}", 512, ["1"], "1", correct, 3, 64.0, None)


def test_cells_and_summary_count_and_compare_with_the_same_samples() -> None:
    full = [_answer(FULL, index, correct) for index, correct in enumerate((1.0, 0.5, 1.0, 1.0))]
    part = [_answer("config", 0, 1.0), _answer("config", 1, 0.5)]
    assert [(cell["method"], cell["accuracy"], cell["samples"]) for cell in cells([*full, *part])] == [
        (FULL, 0.875, 4),
        ("config", 0.75, 2),
    ]
    first, second = summary([*full, *part])
    assert (first["full_cache_accuracy"], first["share_of_full_cache"]) == (0.875, 1.0)
    assert (second["full_cache_accuracy"], second["share_of_full_cache"]) == (0.75, 1.0)


def test_methods_share_the_mean_budget() -> None:
    registry, config = load_registry(()), HardKVConfig()
    (own,) = chosen_methods(registry, config, 2048, None, [])
    assert own.components["budget"]["mean_tokens"] == 1024
    several = chosen_methods(registry, config, 2048, 96, ["snapkv+top_k"])
    assert [(one.name, one.components["budget"]["mean_tokens"]) for one in several] == [
        ("config", 96),
        ("snapkv+top_k", 96),
    ]
    top_p = HardKVConfig.model_validate({"budget": {"name": "top_p"}})
    with pytest.raises(InputError, match="budget 'top_p' has no target to share; give --mean-budget"):
        chosen_methods(registry, top_p, 2048, None, ["snapkv"])
    with pytest.raises(InputError, match=r"'config' cannot be set to a mean budget of 96 tokens: budget\.p would have"):
        chosen_methods(registry, top_p, 2048, 96, [])


def test_automatic_difficulty_is_easy_for_a_small_model() -> None:
    tiny = loaded()
    assert (chosen_difficulty("auto", tiny), chosen_difficulty("hard", tiny)) == ("easy", "hard")


def test_several_values_after_one_option() -> None:
    assert spread(["--depths", "0", "1", "--json"], {"--depths"}) == ["--depths", "0", "--depths", "1", "--json"]


@pytest.mark.parametrize("after", [[], ["--compress-before", "last"], ["--compress-before", "question"]])
def test_with_an_unlimited_budget_answers_are_those_of_the_full_cache(call: Call, after: list[str]) -> None:
    result = call("--mean-budget", "2000", "--json", *after)
    assert result.code == 0, result.err
    answers = json.loads(result.out)["answers"]
    full, compressed = answers[:2], answers[2:]
    assert [one["method"] for one in answers] == [FULL, FULL, "config", "config"]
    assert [one["answer"] for one in full] == [one["answer"] for one in compressed]
    assert all(one["answer_tokens"] > 0 for one in answers)


def test_the_question_is_read_before_or_after_the_compression(call: Call) -> None:
    before = json.loads(call("--json").out)
    last = json.loads(call("--json", "--compress-before", "last").out)
    after = json.loads(call("--json", "--compress-before", "question").out)
    for found, fed in ((before, 0), (last, 1), (after, 100)):
        compressed = [one for one in found["answers"] if one["method"] == "config"]
        assert all(one["mean_tokens"] == pytest.approx(64, rel=0.05) for one in compressed)
        full = [one for one in found["answers"] if one["method"] == FULL]
        assert all(one["mean_tokens"] <= one["prompt_tokens"] - fed for one in full)
    hashes = [[one["prompt_hash"] for one in found["answers"]] for found in (before, last, after)]
    assert hashes[0] == hashes[1] == hashes[2]


def test_an_unknown_moment_is_refused(call: Call) -> None:
    result = call("--compress-before", "lats")
    assert result.code == 2
    assert "--compress-before lats: expected one of answer, last, question. Did you mean 'last'?" in result.err


def test_tables_files_and_picture(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'hardkv[plot]'")
    saved, plot = tmp_path / "found.json", tmp_path / "found.png"
    result = call("--against", "streaming+top_k", "-o", str(saved), "--plot", str(plot))
    assert result.code == 0, result.err
    found = json.loads(saved.read_text())
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [row["method"] for row in found["summary"]] == [FULL, "config", "streaming+top_k"]
    assert [(cell["depth"], cell["samples"]) for cell in found["cells"]] == [(0.2, 1), (0.9, 1)] * 3
    assert found["methods"]["600"]["streaming+top_k"]["budget"] == {"name": "top_k", "mean_tokens": 64}
    assert (found["complete"], found["plan"]["difficulty"], found["plan"]["level"]["digits"]) == (True, "easy", 4)
    assert found["command"].startswith("hardkv eval retrieval -c ")
    for text in ("in float32, easy", "needle", "depth", "streaming+top_k: accuracy ", "; full cache "):
        assert text in result.out
    assert f"{FULL}, 600 tokens: " in result.err
    assert list(tmp_path.glob("*.part")) == []


def test_failed_answers_count_as_wrong_and_end_with_1(call: Call, tmp_path: Path) -> None:
    (tmp_path / "broken_plugin.py").write_text(BROKEN)
    result = call("--set", "plugins=[broken_plugin]", "--set", "scorer.name=broken_here", "--json")
    assert result.code == 1
    assert "2 answers failed and count as wrong: scorer 'broken_here' raised ValueError: bang" in result.err
    assert [one["correct"] for one in json.loads(result.out)["answers"]][2:] == [0.0, 0.0]


def test_an_interrupt_shows_what_there_is(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = running.Trial.run

    def interrupted(self: Any, name: str, *arguments: Any) -> Any:
        if name != FULL:
            raise KeyboardInterrupt
        return whole(self, name, *arguments)

    monkeypatch.setattr(running.Trial, "run", interrupted)
    result = call("--json")
    found = json.loads(result.out)
    assert (result.code, found["complete"]) == (130, False)
    assert [row["method"] for row in found["summary"]] == [FULL]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tasks", "needel"], "--tasks needel: expected one of needle, multi_needle, key_value, variable_tracking"),
        (["--difficulty", "harder"], "--difficulty harder: expected one of auto, easy, normal, hard"),
        (["--contexts", "2048"], "--contexts 2048: the model has 2048 positions, and answers need some"),
        (["--against", "snapvk"], "no method is called 'snapvk'. Did you mean 'snapkv'?"),
        (["--output", "no/such/folder.json"], "--output no/such/folder.json: its folder does not exist"),
        (["--mean-budget", "8"], "cache.sinks"),
    ],
)
def test_faults_are_found_before_any_work(call: Call, arguments: list[str], text: str) -> None:
    result = call(*arguments)
    assert (result.code, result.out) == (2, "")
    assert text in result.err
