"""What is read from lm_eval's arguments and which tokens are fed; needs no lm_eval."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardkv.cli import main
from hardkv.config import load_config
from hardkv.config.assigning import load_assigned
from hardkv.errors import ConfigError, InputError
from hardkv.evaluation.lm_eval_scoring import CallLimits, fit, plan_calls, plan_runs, score
from hardkv.evaluation.lm_eval_settings import read_arguments, read_device, read_generation, read_sequences

TOKENS = st.lists(st.integers(0, 3), max_size=6)
PAIRS = st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=6), TOKENS), max_size=12)


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("cache: {interval: 64}\nscorer: {name: snapkv, rows: 16}\n")
    return str(path)


# Model arguments


def test_keys_are_assigned_on_top_of_the_file_as_set_does(run_yaml: str) -> None:
    keys = {"cache.interval": 32, "cache.lower": "null", "compression": False, "scorer.kernel": 5}
    config = read_arguments(run_yaml, keys, {"budget.mean_tokens": 99, "model.device": None}).config
    assert (config.cache.interval, config.cache.lower, config.compression) == (32, None, False)
    assert config.scorer.options == {"rows": 16, "kernel": 5}
    assert config.budget.options["mean_tokens"] == 99
    assert config.model.device == "cpu"


def test_a_new_name_drops_the_options_of_the_old_one(run_yaml: str) -> None:
    assert read_arguments(run_yaml, {"scorer.name": "h2o"}, {}).config.scorer.options == {}


def test_without_arguments_the_defaults_hold() -> None:
    assert read_arguments(None, {}, {"model.device": None}).config == load_config({}).config


@pytest.mark.parametrize(
    ("keys", "shortcuts", "message"),
    [
        ({"pretrained": "x"}, {}, "pretrained: unknown key"),
        ({"cache.intervall": 3}, {}, "cache.intervall: unknown key (got 3). Did you mean 'interval'?"),
        ({"cache.interval": 0}, {}, "cache.interval"),
        ({"seed.x": 1}, {}, "model_args seed.x: 'seed' holds 3, no keys"),
        (
            {"budget.mean_tokens": 40},
            {"budget.mean_tokens": 50},
            "model_args: budget.mean_tokens is given twice, as 40 and as 50; give it once",
        ),
        ({"cache.lower": "[1"}, {}, "model_args cache.lower: '[1' is not a YAML value"),
    ],
)
def test_wrong_arguments_are_named(
    keys: dict[str, object], shortcuts: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 3\n")
    with pytest.raises((ConfigError, InputError)) as caught:
        read_arguments(str(path), keys, shortcuts)
    assert message in str(caught.value)


def test_assignments_name_where_they_come_from() -> None:
    with pytest.raises(ConfigError, match=r"^--set seed\.x\.y: 'seed\.x' holds 2, no keys$"):
        load_assigned(None, [("seed.x", 2), ("seed.x.y", 1)], "--set")


@pytest.mark.parametrize(
    ("batch_size", "most", "sequences"),
    [(None, None, None), (1, None, None), ("1", None, None), (8, None, 8), ("8", None, 8), ("auto:4", 16, 16)],
)
def test_batch_size_is_max_sequences(batch_size: int | str | None, most: int | None, sequences: int | None) -> None:
    assert read_sequences(batch_size, most) == sequences


def test_a_wrong_batch_size_is_named() -> None:
    with pytest.raises(InputError, match=r"^batch_size: expected a whole number from 1 or 'auto' \(got 'many'\)$"):
        read_sequences("many", None)


def test_the_device_that_nobody_chose_leaves_the_configuration_alone() -> None:
    assert [read_device(device) for device in (None, "cuda:0", "cpu", "cuda:1")] == [None, None, "cpu", "cuda:1"]


# Generation settings


def test_greedy_and_sampled_settings() -> None:
    greedy = {"do_sample": False, "temperature": 0.7, "until": ["\n", ""], "max_gen_toks": 9, "num_beams": 1}
    assert read_generation(greedy, {}) == {"max_new_tokens": 9, "temperature": 0.0, "stop": ["\n"]}
    sampled = {"do_sample": True, "until": [], "max_gen_toks": 9, "top_p": 0.9, "seed": 4}
    assert read_generation(sampled, {}) == {
        "max_new_tokens": 9,
        "temperature": 1.0,
        "stop": [],
        "top_p": 0.9,
        "seed": 4,
    }


def test_a_stop_text_that_is_a_special_token_stops_by_its_id() -> None:
    settings = {"do_sample": False, "until": ["<end>", "."], "max_gen_toks": 9, "stop_token_ids": [3]}
    found = read_generation(settings, {"<end>": 7})
    assert (found["stop"], found["stop_token_ids"]) == (["."], [3, 7])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("top_pp", 0.5, "hardkv has no setting 'top_pp'. Did you mean 'top_p'?"),
        ("num_beams", 4, "no setting 'num_beams'"),
    ],
)
def test_an_unknown_setting_is_named(name: str, value: object, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_generation({"do_sample": False, "until": [], "max_gen_toks": 1, name: value}, {})
    assert str(caught.value).startswith("generation_kwargs: ")
    assert message in str(caught.value)


# Log-likelihoods


def test_the_last_token_is_predicted_not_fed() -> None:
    assert fit(([1, 2, 3], [4, 5]), 4, 0) == ([1, 2, 3], [4, 5])
    assert fit(([1, 2, 3], [4, 5]), 3, 0) == ([2, 3], [4, 5])
    assert fit(([], [4]), 3, 0) == ([0], [4])
    with pytest.raises(InputError, match="a continuation has 4 tokens; at most 3 fit"):
        fit(([1], [4, 5, 6, 7]), 3, 0)


@given(PAIRS, st.integers(0, 8))
def test_each_pair_is_scored_by_the_tokens_before_it(pairs: list[tuple[list[int], list[int]]], decoded: int) -> None:
    runs = plan_runs(pairs, decoded)
    members = [index for run in runs for index in run.members]
    assert sorted(members) == [index for index, (_, continuation) in enumerate(pairs) if continuation]
    for run in runs:
        assert run.prompt
        for index in run.members:
            context, continuation = pairs[index]
            assert [*run.prompt, *run.forced][:-1] == [*context, *continuation[:-1]]
            assert len(run.forced) == min(decoded, len(context) - 1) + len(continuation)
    keys = {(tuple(pairs[run.members[0]][0]), tuple(pairs[run.members[0]][1][:-1])) for run in runs}
    assert len(keys) == len(runs)


@given(PAIRS, st.integers(1, 4), st.integers(1, 16), st.integers(1, 16))
def test_calls_hold_every_run_once_within_the_limits(
    pairs: list[tuple[list[int], list[int]]], sequences: int, positions: int, rows: int
) -> None:
    runs = plan_runs(pairs, 0)
    calls = list(plan_calls(runs, CallLimits(sequences, positions, rows)))
    assert [run for call in calls for run in call] == runs
    for call in calls:
        assert call
        if len(call) > 1:
            assert len(call) <= sequences
            assert max(len(run.prompt) for run in call) + max(len(run.forced) for run in call) <= positions
            assert sum(len(run.forced) for run in call) <= rows


def test_a_score_reads_the_last_rows() -> None:
    logprobs = torch.tensor([[9.0, 9.0], [-0.5, -1.0], [-3.0, -0.25]])
    assert score(logprobs, [0, 1]) == (-0.75, True)
    assert score(logprobs, [1]) == (-0.25, True)
    assert score(logprobs, [0, 0]) == (-3.5, False)


# The command


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_the_command_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lm-eval", "--model", "hardkv", "--tasks", "x.yaml"]) == 2
    expected = "error: hardkv lm-eval needs lm-evaluation-harness: pip install 'hardkv[lm-eval]'\n"
    assert capsys.readouterr().err == expected
