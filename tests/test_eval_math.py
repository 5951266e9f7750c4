"""`hardkv eval math`: formats, scoring, figures, and a journal that loses and doubles nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging as transformers_logging

from hardkv.errors import InputError
from hardkv.evaluation.maths import (
    Journal,
    Problem,
    Sample,
    Score,
    Scorer,
    Task,
    difference,
    read_problems,
    seed_of,
    summarize,
    tasks_of,
)
from hardkv.evaluation.maths import optional as optional_module
from hardkv.runtime import HardKVRuntime
from tests.command_line import Call, Called, run_main
from tests.tiny_models import loaded, save_tiny

QUESTIONS = [{"question": f"What is {number} + 1?", "answer": f"One more.\n#### {number + 1}"} for number in range(3)]
SAMPLE = Sample("full", "p", 0, True, "7", None, "stop", 5, 10, 15, 15.0, [], 100, 1.0, "seven")
SETTINGS = {"seed": 0, "budget": {"mean_tokens": 64}}


def written(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    path = folder / name
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow", reason="pip install 'hardkv[math]'")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    else:
        path.write_text(json.dumps(rows))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def arguments(model: str, tmp_path: Path) -> list[str]:
    pytest.importorskip("math_verify", reason="pip install 'hardkv[math]'")
    settings = {
        "model": {"id": model, "dtype": "float32"},
        "cache": {"sinks": 2, "local_window": 8, "interval": 8, "query_rows": 8, "page_slots": 8},
        "budget": {"name": "threshold", "mean_tokens": 32},
        "generation": {"max_new_tokens": 24},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    data = written(tmp_path, "sums.jsonl", QUESTIONS)
    return ["eval", "math", data, "-c", str(tmp_path / "run.yaml"), "-n", "2", "--batch", "2", "--preset", "quick"]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    transformers_logging.disable_progress_bar()
    capsys.readouterr()

    def run(*arguments: str) -> Called:
        return run_main(arguments, capsys)

    return run


@pytest.fixture(scope="module")
def scorer() -> Any:
    pytest.importorskip("math_verify", reason="pip install 'hardkv[math]'")
    with Scorer() as scorer:
        yield scorer


@pytest.mark.parametrize("ending", ["json", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"problem": "1+1?", "answer": "2", "solution": "s"}, ("problem", "answer")),
        ({"ID": "2024-I-1", "Problem": "1+1?", "Answer": 2}, ("Problem", "Answer")),
        ({"question": "1+1?", "answer": "1 + 1 = 2\n#### 2"}, ("question", "answer")),
        ({"uuid": "u", "problem_statement": "1+1?", "golden_answer": "2"}, ("problem_statement", "golden_answer")),
    ],
)
def test_formats(row: dict[str, Any], fields: tuple[str, str], ending: str, tmp_path: Path) -> None:
    found = read_problems(written(tmp_path, f"data.{ending}", [row, row]))
    first, second = found.problems
    assert found.fields == fields
    assert (first.question, first.answer) == ("1+1?", "2")
    assert first.name == row.get("ID", row.get("uuid", "1"))
    assert second.key == f"{first.key}#2"


def test_a_problem_with_an_image_is_left_out(tmp_path: Path) -> None:
    rows = [{"uuid": name, "problem_statement": "q", "golden_answer": "1", "has_image": name == "b"} for name in "abc"]
    found = read_problems(written(tmp_path, "u.json", rows))
    assert [problem.name for problem in found.problems] == ["a", "c"]
    assert found.left_out == {"b": "has an image"}


def test_named_fields(tmp_path: Path) -> None:
    path = written(tmp_path, "own.json", [{"frage": "q", "antwort": 3}])
    found = read_problems(path, question_field="frage", answer_field="antwort")
    assert found.problems[0].answer == "3"
    with pytest.raises(
        InputError, match=r"no fields of a known format \(.*GSM8K: question and answer.*; it has antwort"
    ):
        read_problems(path)
    with pytest.raises(InputError, match=r"--answer-field wort: no such field in .*; it has antwort, frage"):
        read_problems(path, question_field="frage", answer_field="wort")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.json", "{", "expected UTF-8 JSON"),
        ("a.jsonl", "[1]\n", "expected a list of objects"),
        ("a.json", "{}", "expected a list of objects"),
        ("a.csv", "x", "expected a name that ends in .json, .jsonl, .parquet"),
        ("a.json", '[{"problem": "q", "answer": null}]', "problem 1: answer: expected a text or a number, got None"),
    ],
)
def test_wrong_files(name: str, content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=text):
        read_problems(str(tmp_path / name))


def test_no_file_no_hub_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"missing\.parquet: no such file"):
        read_problems("missing.parquet")
    with pytest.raises(InputError, match="nothing: expected a file"):
        read_problems("nothing")
    monkeypatch.setattr(optional_module, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"a data set of a hub needs datasets: pip install 'hardkv\[math\]'"):
        read_problems("openai/gsm8k")
    with pytest.raises(InputError, match=r"scoring needs math-verify: pip install 'hardkv\[math\]'"):
        Scorer()


def test_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Offline:
        @staticmethod
        def load_dataset(*_: Any, **__: Any) -> Any:
            raise ConnectionError("no route\nmore")

    monkeypatch.setattr("hardkv.evaluation.maths.problems.needed", lambda *_: Offline)
    with pytest.raises(InputError, match=r"gsm8k: cannot be loaded from the hub \(no route\).*give its path instead"):
        read_problems("openai/gsm8k")


@pytest.mark.parametrize(
    ("reference", "answer", "correct"),
    [
        ("72", "so it is 70, no: \\boxed{72}", True),
        ("72", "The final answer is 71. \\boxed{72}. I hope it is correct.", True),
        ("1,234", "#### 1234", True),
        ("\\frac{1}{2}", "\\boxed{0.5}", True),
        ("$x^2 + 1$", "\\boxed{1 + x^2}", True),
        ("033", "\\boxed{33}", True),
        ("72", "\\boxed{27}", False),
        ("72", "I do not know", False),
    ],
)
def test_scores(reference: str, answer: str, correct: bool, scorer: Scorer) -> None:
    score = scorer.score(reference, answer)
    assert (score.correct, score.failure) == (correct, None)
    assert (score.extracted is None) == (answer == "I do not know")


def test_scoring_works_in_a_thread_and_after_its_process_has_died(scorer: Scorer) -> None:
    found: list[Score] = []
    thread = threading.Thread(target=lambda: found.append(scorer.score("2", "\\boxed{2}")))
    thread.start()
    thread.join()
    assert scorer._process is not None
    scorer._process.kill()
    found.append(scorer.score("2", "\\boxed{2}"))
    found.append(scorer.score("2", "\\boxed{2}"))
    assert found == [Score(True, "2"), Score(failure="the scoring process ended"), Score(True, "2")]


def test_a_reference_without_an_expression_is_told(scorer: Scorer) -> None:
    assert scorer.check("3") is None
    assert scorer.check("$ $") == "the reference answer holds no expression"


def test_seeds_depend_on_problem_and_number_alone() -> None:
    problems = [Problem(name, name, "q", "1") for name in "ab"]
    tasks = tasks_of("full", problems, 3)
    assert [task.problem + str(task.number) for task in tasks] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert len({seed_of(0, task) for task in tasks} | {seed_of(1, task) for task in tasks}) == 12
    assert seed_of(5, Task("full", "a", 2)) == seed_of(5, Task("compressed", "a", 2))


def test_results_as_completed_are_those_of_single_runs() -> None:
    config = {"budget": {"name": "threshold", "mean_tokens": 64}, "model": {"dtype": "float32"}}
    runtime = HardKVRuntime.from_config(config, loaded=loaded())
    prompts, seeds = ["one", "a second prompt", "three"], [11, 22, 2**63 - 1]
    overrides: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 12}
    found = dict(runtime.as_completed(prompts, seeds=seeds, **overrides))
    single = [runtime.generate(prompt, seed=seed, **overrides) for prompt, seed in zip(prompts, seeds, strict=True)]
    assert [found[index].token_ids for index in range(3)] == [generation.token_ids for generation in single]
    with pytest.raises(InputError, match="got 3 prompts and 1 seeds"):
        runtime.as_completed(prompts, seeds=[1])
    with pytest.raises(InputError, match="seed: expected a whole number"):
        runtime.as_completed(["one"], seeds=[-1])


def test_figures_by_hand() -> None:
    def sample(problem: str, number: int, correct: bool, tokens: int, **more: Any) -> Sample:
        return replace(SAMPLE, problem=problem, number=number, correct=correct, answer_tokens=tokens, **more)

    full = [
        sample("a", 0, True, 10),
        sample("a", 1, True, 20),
        sample("b", 0, False, 60, finish_reason="length", extracted=None),
        sample("b", 1, True, 30, seconds=2.0, kv_bytes_peak=300),
    ]
    found = summarize(full, 2)
    assert (found["accuracy"], found["accuracy_error"], found["pass_at_2"]) == (0.75, 0.25, 1.0)
    assert found["answer_tokens"] == {"mean": 30, "median": 25}
    assert found["correct_tokens"] == {"mean": 20, "median": 20}
    assert (found["truncated"], found["unanswered"], found["scoring_failures"]) == (0.25, 0.25, [])
    assert (found["tokens_per_second"], found["kv_bytes_peak"], found["mean_budget"]) == (24, 300, None)
    kept = [
        sample("a", 0, False, 10, tokens_kept=5.0, tokens_after_compression=[4.0, 6.0]),
        sample("b", 0, False, 10, failure="too long", tokens_kept=10.0, tokens_after_compression=[7.0]),
    ]
    found = summarize(kept, 2)
    assert (found["mean_budget"], found["tokens_kept_share"], found["pass_at_2"]) == (6.0, 0.5, None)
    assert found["scoring_failures"] == [{"problem": "b", "number": 0, "reason": "too long"}]
    assert found["correct_tokens"] == {"mean": None, "median": None}
    # Pairs: a is lost, b is the same; b's second answer has no partner.
    assert difference(kept, full) == {"pairs": 2, "accuracy": -0.5, "accuracy_error": 0.5}


def test_a_torn_last_line_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path, SETTINGS, {}) as journal:
        journal.add(SAMPLE)
        journal.add(replace(SAMPLE, number=1))
    whole = path.read_bytes()
    for cut in (1, 30):
        path.write_bytes(whole[:-cut])
        with Journal(path, SETTINGS, {}) as journal:
            assert list(journal.samples) == [SAMPLE.task]
            journal.add(replace(SAMPLE, number=1))
        assert path.read_bytes() == whole
    head = whole[: whole.index(b"\n") + 1]
    path.write_bytes(head[:10])
    with Journal(path, SETTINGS, {}) as journal:
        assert journal.samples == {}
    assert path.read_bytes() == head


def test_a_journal_is_not_shared_mixed_or_guessed_at(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path, SETTINGS, {}) as journal:
        journal.add(SAMPLE)
        with pytest.raises(InputError, match="another process is writing to it"):
            Journal(path, SETTINGS, {})
    with pytest.raises(InputError, match=r"other settings \(budget\.mean_tokens: 64 there, 32 now\)"):
        Journal(path, {"seed": 0, "budget": {"mean_tokens": 32}}, {})
    lines = path.read_text().splitlines()
    for changed, text in (
        ([*lines, lines[1]], "line 3: .* is there twice"),
        ([lines[0], "{", lines[1]], "line 2 is damaged"),
        (["{}"], "is no record of hardkv eval math"),
        (["my notes"], "is no record of hardkv eval math"),
    ):
        path.write_text("\n".join(changed) + "\n")
        with pytest.raises(InputError, match=text):
            Journal(path, SETTINGS, {})
    path.write_text("my notes")
    with pytest.raises(InputError, match="is no record of hardkv eval math"):
        Journal(path, SETTINGS, {})
    assert path.read_text() == "my notes"


KILLED = """
import os, signal, sys
from dataclasses import asdict
from hardkv.cli import main
from hardkv.evaluation.maths import Journal
whole = Journal.add
def add(self, sample):
    if len(self.samples) == 4:
        os.write(self._file, b'{"cache": "comp')
        os.kill(os.getpid(), signal.SIGKILL)
    whole(self, sample)
Journal.add = add
main()
"""


def test_a_killed_run_goes_on_where_it_was(call: Call, arguments: list[str], tmp_path: Path) -> None:
    def answers(folder: str) -> list[dict[str, Any]]:
        lines = [line for path in sorted((tmp_path / folder).iterdir()) for line in path.read_text().splitlines()]
        return [json.loads(line) for line in lines if '"kind"' not in line]

    done = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments, "--journal", str(tmp_path / "killed")], check=False
    )
    assert done.returncode == -9
    (journal,) = (path for path in (tmp_path / "killed").iterdir() if "compressed" in path.name)
    assert len(journal.read_text().splitlines()) == 1 + 4 + 1
    result = call(*arguments, "--journal", str(tmp_path / "killed"), "--json")
    assert result.code == 0
    assert "4 of 6 answers are there" in result.err
    assert "compressed 5/6: problem" in result.err
    call(*arguments, "--journal", str(tmp_path / "whole"))
    # What else ran at the time is another matter.
    killed, uninterrupted = (
        {sample.task: replace(sample, seconds=0.0, kv_bytes_peak=0) for sample in map(Sample.from_dict, answers(name))}
        for name in ("killed", "whole")
    )
    assert len(answers("killed")) == len(killed) == 12
    assert killed == uninterrupted
    found = json.loads(result.out)
    assert found["complete"] is True
    assert found["caches"]["compressed"]["samples"] == found["caches"]["full"]["samples"] == 6
    assert found["caches"]["compressed"]["mean_budget"] == pytest.approx(32, rel=0.1)
    assert found["caches"]["full"]["tokens_kept_share"] == 1.0
    assert found["difference"]["pairs"] == 6
    assert found["settings"]["full"]["generation"]["temperature"] == 0.6
    # Another method shares the full cache's answers, and has its own.
    other = call(*arguments, "--journal", str(tmp_path / "killed"), "--set", "scorer.name=random")
    assert other.code == 0
    assert "0 of 6 answers are there" in other.err
    assert "6 of 6 answers are there" in other.err
    assert "pass@2" in other.out
    assert "Nothing was compressed" not in other.out
    assert len(list((tmp_path / "killed").iterdir())) == 3


def test_a_budget_that_no_answer_reaches_is_told(call: Call, arguments: list[str], tmp_path: Path) -> None:
    result = call(*arguments, "--journal", str(tmp_path / "j"), "--no-full", "--limit", "1", "--mean-tokens", "1500")
    assert result.code == 0
    shown = " ".join(result.out.split())
    assert "1 problem," in shown
    assert "Nothing was compressed: no answer grew beyond the budget; lower --mean-tokens." in shown


def test_a_failed_answer_is_named_and_not_recorded(
    call: Call, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = HardKVRuntime.as_completed

    def failing(self: HardKVRuntime, *given: Any, **named: Any) -> Any:
        for index, generation in whole(self, *given, **named):
            yield index, replace(generation, error="no room") if index == 1 else generation

    monkeypatch.setattr(HardKVRuntime, "as_completed", failing)
    result = call(*arguments, "--journal", str(tmp_path / "j"), "--no-full", "--json")
    assert result.code == 1
    assert "error: 1 answers failed (no room); the same command tries again" in result.err
    found = json.loads(result.out)
    assert found["failed"] == {"compressed, problem 2, answer 1": "no room"}
    assert (found["complete"], found["caches"]["compressed"]["samples"], found["difference"]) == (False, 5, None)


def test_an_interrupt_shows_what_there_is(
    call: Call, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Journal.add

    def interrupted(self: Journal, sample: Sample) -> None:
        if len(self.samples) == 2:
            raise KeyboardInterrupt
        whole(self, sample)

    monkeypatch.setattr(Journal, "add", interrupted)
    result = call(*arguments, "--journal", str(tmp_path / "j"))
    assert result.code == 130
    assert "2 to 2 problems" in result.out
    assert "the same command goes on" in result.out


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--preset", "papers"], "--preset papers: not known. Did you mean 'paper'? Known: paper, greedy, quick"),
        (["--set", "generation.temperature=0"], "--samples 2: at temperature 0 all answers to a problem are the same"),
        (["--max-new-tokens", "5000"], "the model has 2,048 positions"),
        (["--no-full", "--set", "compression=false"], "leaves nothing to run"),
        (["-o", "nowhere/r.json"], "--output nowhere/r.json: its folder does not exist"),
    ],
)
def test_errors_before_any_work(more: list[str], text: str, call: Call, arguments: list[str], tmp_path: Path) -> None:
    result = call(*arguments, "--journal", str(tmp_path / "j"), *more)
    assert result.code == 2
    assert text in result.err
    assert not (tmp_path / "j").exists() or not list((tmp_path / "j").iterdir())


def test_a_sample_survives_json() -> None:
    assert Sample.from_dict(json.loads(json.dumps(asdict(SAMPLE)))) == SAMPLE
