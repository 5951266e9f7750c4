"""hardkv as a model of lm_eval, on local tasks and data: against lm_eval's own model of the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hardkv.cli import main
from hardkv.errors import HardKVError, InputError
from tests.tiny_models import loaded

# What lm_eval, its metrics and its data library warn of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")
lm_eval: Any = pytest.importorskip("lm_eval", reason="lm_eval is not installed: make bridges")
instance: Any = pytest.importorskip("lm_eval.api.instance")
huggingface: Any = pytest.importorskip("lm_eval.models.huggingface")
adapter: Any = pytest.importorskip("hardkv.evaluation.lm_eval_adapter")

RUN = """\
model: {id: %s, dtype: float32}
cache: {sinks: 2, local_window: 8, query_rows: 16, interval: 16, page_slots: 8}
budget: {name: threshold, mean_tokens: 40}
"""
COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{text}}",
    "metadata": {"version": 1.0},
}
CHOICE = {
    "task": "local_choice",
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}
WRITE = {
    "task": "local_write",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["|", "</s>"], "max_gen_toks": 24, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}
ROLLING = {
    "task": "local_rolling",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}],
}


def words(seed: int, count: int) -> str:
    drawn = torch.randint(97, 123, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return "".join(chr(code) if code % 5 else " " for code in drawn).strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model, its configuration and the data, all in files."""
    folder = tmp_path_factory.mktemp("harness")
    model = loaded("llama")
    model.model.save_pretrained(str(folder / "model"))
    model.tokenizer.save_pretrained(str(folder / "model"))
    (folder / "run.yaml").write_text(RUN % (folder / "model"))
    choices = [" abc", " a longer answer than the others", "a", "b"]
    rows = [{"text": words(seed, 100 + 30 * seed), "choices": choices, "answer": seed % 4} for seed in range(3)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = os.environ.get("HF_DATASETS_CACHE")
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    yield folder
    if before is None:
        del os.environ["HF_DATASETS_CACHE"]
    else:
        os.environ["HF_DATASETS_CACHE"] = before


def task(folder: Path, part: dict[str, Any]) -> dict[str, Any]:
    return {**COMMON, **part, "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}}}


def model(folder: Path, **arguments: Any) -> Any:
    return adapter.HardKVLM(config=str(folder / "run.yaml"), **arguments)


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    return huggingface.HFLM(pretrained=str(folder / "model"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    return model(folder, compression=False)


def evaluate(lm: Any, *tasks: dict[str, Any], **arguments: Any) -> Any:
    return lm_eval.simple_evaluate(lm, tasks=list(tasks), bootstrap_iters=0, **arguments)


def answers(results: Any, name: str) -> list[Any]:
    return [answer for sample in results["samples"][name] for answer in sample["resps"]]


def ask(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    return [instance.Instance(kind, {}, each, 0, (None, None, 1)) for each in arguments]


def test_every_kind_of_task_agrees_with_the_stock_model(folder: Path, stock: Any, whole: Any) -> None:
    tasks = [task(folder, part) for part in (CHOICE, WRITE, ROLLING)]
    ours, theirs = evaluate(whole, *tasks), evaluate(stock, *tasks)
    for mine, reference in zip(answers(ours, "local_choice"), answers(theirs, "local_choice"), strict=True):
        assert mine[0][0] == pytest.approx(reference[0][0], abs=1e-3)
        assert mine[0][1] == reference[0][1]
    assert len(answers(ours, "local_choice")) == 12
    assert answers(ours, "local_write") == answers(theirs, "local_write")
    assert all(len(text) > 4 for (text,) in answers(ours, "local_write"))
    for mine, reference in zip(answers(ours, "local_rolling"), answers(theirs, "local_rolling"), strict=True):
        assert mine[0] == pytest.approx(reference[0], abs=1e-3)
    assert ours["results"]["local_choice"] == theirs["results"]["local_choice"]


def test_results_say_what_they_were_made_with(folder: Path) -> None:
    lm = model(folder, mean_tokens=30, batch_size=2, **{"cache.interval": 32})
    found = lm_eval.simple_evaluate("hardkv", model_args={"config": str(folder / "run.yaml")}, **small(folder))
    usage = found["config"]["hardkv"]["usage"]
    # Each prompt is longer than the budget's 40 tokens, and 24 tokens after it fill the dense tier once more.
    assert (usage["sequences"], usage["compressions"]) == (3, 6)
    assert found["config"]["hardkv"]["config"]["budget"] == {"name": "threshold", "mean_tokens": 40}
    assert set(found["config"]["hardkv"]["versions"]) == {"hardkv", "torch", "transformers", "python"}
    config = lm.runtime.config
    assert (config.budget.options["mean_tokens"], config.cache.max_sequences, config.cache.interval) == (30, 2, 32)


def small(folder: Path) -> dict[str, Any]:
    settings = {"until": [], "max_gen_toks": 24, "ignore_eos": True}
    return {
        "tasks": [task(folder, {**WRITE, "generation_kwargs": settings})],
        "bootstrap_iters": 0,
        "batch_size": 1,
        "device": "cuda:0",
    }


def test_rolling_windows_agree_with_the_stock_model(folder: Path) -> None:
    text = words(9, 150)
    theirs = huggingface.HFLM(pretrained=str(folder / "model"), dtype="float32", device="cpu", max_length=48)
    ours = model(folder, compression=False, max_length=48)
    expected = theirs.loglikelihood_rolling(ask("loglikelihood_rolling", (text,), ("ab",)), disable_tqdm=True)
    found = ours.loglikelihood_rolling(ask("loglikelihood_rolling", (text,), ("ab",)), disable_tqdm=True)
    assert found == pytest.approx(expected, abs=1e-3)


def test_long_contexts_lose_their_beginning_as_with_the_stock_model(folder: Path, caplog: Any) -> None:
    theirs = huggingface.HFLM(pretrained=str(folder / "model"), dtype="float32", device="cpu", max_length=48)
    ours = model(folder, compression=False, max_length=48)
    pair, write = (words(3, 90), " abc"), (words(4, 90), {"until": [], "max_gen_toks": 8, "do_sample": False})
    expected = theirs.loglikelihood(ask("loglikelihood", pair), disable_tqdm=True)[0]
    assert ours.loglikelihood(ask("loglikelihood", pair), disable_tqdm=True)[0][0] == pytest.approx(
        expected[0], abs=1e-3
    )
    texts = [lm.generate_until(ask("generate_until", write), disable_tqdm=True) for lm in (theirs, ours)]
    assert texts[0] == texts[1]
    assert caplog.text.count("1 contexts do not fit in 48 tokens and lose their beginning") == 2


def test_compression_touches_a_first_token_only_where_the_context_is_decoded(folder: Path, whole: Any) -> None:
    context = words(5, 200)
    pairs = ask("loglikelihood", (context, "a"), (context, "b"), (context, " a longer answer"))
    full = [found for found, _ in whole.loglikelihood(pairs, disable_tqdm=True)]
    usual = [found for found, _ in model(folder).loglikelihood(pairs, disable_tqdm=True)]
    assert usual[:2] == pytest.approx(full[:2], abs=1e-4)
    assert abs(usual[2] - full[2]) > 1e-2
    decoded = [found for found, _ in model(folder, decoded_context_tokens=32).loglikelihood(pairs, disable_tqdm=True)]
    assert min(abs(one - other) for one, other in zip(decoded, full, strict=True)) > 1e-2


def test_decoding_the_context_changes_nothing_without_compression(folder: Path, whole: Any) -> None:
    pairs = ask("loglikelihood", (words(6, 60), " abc"), ("", "xyz"), ("a", "b"))
    other = model(folder, compression=False, decoded_context_tokens=500)
    full = whole.loglikelihood(pairs, disable_tqdm=True)
    found = other.loglikelihood(pairs, disable_tqdm=True)
    assert [one for one, _ in found] == pytest.approx([one for one, _ in full], abs=1e-3)


def test_choices_that_differ_in_their_last_token_share_one_sequence(folder: Path, stock: Any) -> None:
    lm = model(folder, compression=False)
    pairs = ask("loglikelihood", *(("which one", f" {letter}") for letter in "ABCD"))
    found = lm.loglikelihood(pairs, disable_tqdm=True)
    expected = stock.loglikelihood(pairs, disable_tqdm=True)
    assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], abs=1e-3)
    assert lm.usage.sequences == 1


def test_chats_agree_with_the_stock_model(folder: Path, stock: Any, whole: Any) -> None:
    chats = [evaluate(lm, task(folder, WRITE), apply_chat_template=True) for lm in (whole, stock)]
    assert answers(chats[0], "local_write") == answers(chats[1], "local_write")
    first = chats[0]["samples"]["local_write"][0]["arguments"][0][0]
    assert first.startswith("user: ")
    assert first.endswith("\nassistant: ")
    assert whole.tokenizer_name == stock.tokenizer_name


def test_repeats_of_a_sampled_request_differ_and_runs_repeat(folder: Path) -> None:
    lm = model(folder, **{"cache.max_sequences": 1})
    request = ("abc", {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0})
    asked = ask("generate_until", *[request] * 6)
    texts = lm.generate_until(asked, disable_tqdm=True)
    assert len(set(texts)) == 6  # in two calls of the runtime
    assert lm.generate_until(asked, disable_tqdm=True) == texts


def test_errors_are_raised(folder: Path, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="hardkv has no setting 'top_n'"):
        whole.generate_until(ask("generate_until", ("a", {"until": [], "top_n": 3})), disable_tqdm=True)
    with pytest.raises(InputError, match=r"max_gen_toks \(5000\) leaves no room for a context in 2048 tokens"):
        whole.generate_until(ask("generate_until", ("a", {"until": [], "max_gen_toks": 5000})), disable_tqdm=True)
    with pytest.raises(
        InputError, match=r"model_args: max_length: expected a whole number from 2 to 2048 \(got 4096\)"
    ):
        model(folder, max_length=4096)
    with pytest.raises(InputError, match=r"decoded_context_tokens: expected a whole number from 0 \(got -1\)"):
        model(folder, decoded_context_tokens=-1)
    monkeypatch.setattr(whole.tokenizer, "chat_template", None)
    with pytest.raises(InputError, match="no chat template; leave out --apply_chat_template"):
        whole.apply_chat_template([{"role": "user", "content": "a"}])


def test_a_sequence_that_fails_ends_the_evaluation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model(folder)

    def failing(*_: object) -> torch.Tensor:
        raise HardKVError("out of patience")

    monkeypatch.setattr(lm.runtime._decoder, "prefill", failing)
    request = ("abc", {"until": [], "max_gen_toks": 8})
    with pytest.raises(HardKVError, match="out of patience"):
        lm.generate_until(ask("generate_until", request, request), disable_tqdm=True)


def test_the_command_runs_a_task_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "task.yaml").write_text(json.dumps(task(folder, CHOICE)))
    arguments = f"--model hardkv --model_args config={folder}/run.yaml,cache.interval=32 --tasks {folder}/task.yaml"
    assert main(["lm-eval", *arguments.split()]) == 0
    found = capsys.readouterr().out
    assert "|local_choice|      1|none  |     0|acc   |" in found
    assert f"hardkv ({{'config': '{folder}/run.yaml', 'cache.interval': 32}})" in found


def test_lm_evals_own_command_runs_a_task_file_that_names_the_model(folder: Path) -> None:
    text = json.dumps({**task(folder, CHOICE), "task": "named", "metadata": 0})
    named = "{version: 1.0, model: !function hardkv.evaluation.lm_eval_adapter.HardKVLM}"
    (folder / "named.yaml").write_text(text.replace('"metadata": 0', f'"metadata": {named}'))
    command = f"-m lm_eval --model hardkv --model_args config={folder}/run.yaml --tasks {folder}/named.yaml"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "|named|      1|none  |     0|acc   |" in done.stdout
