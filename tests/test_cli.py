"""The command line: results, exit codes, error texts, JSON; never a traceback unless asked for."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from hardkv import __version__
from hardkv.cli.app import app
from hardkv.cli.prompting import about_document
from hardkv.config import HardKVConfig, load_config
from hardkv.errors import CapacityError, HardKVError, PluginError
from hardkv.registry import load_registry
from hardkv.runtime import HardKVRuntime
from tests.command_line import Call, Called, run_main

WORDS = ["<end>", "<unknown>", *(f"w{number}" for number in range(62))]
TEMPLATE = "{% for message in messages %}w1 {{ message['content'] }} {% endfor %}w2"
PROMPT = " ".join(f"w{number % 60}" for number in range(150))
SMALL = {"cache": {"interval": 16, "query_rows": 16, "page_slots": 8}, "budget": {"mean_tokens": 64}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random llama with a tokenizer of 64 words and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=0,
        bos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unknown>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run_yaml(model: str, tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    settings = {
        **SMALL,
        "model": {"id": model, "dtype": "float32"},
        "budget": {"name": "threshold", "mean_tokens": 64},
        "generation": {"max_new_tokens": 24, "ignore_eos": True},
    }
    path.write_text(json.dumps(settings))
    return str(path)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    def run(*arguments: str, stdin: str = "") -> Called:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return run_main(arguments, capsys)

    # `main` says so through the environment, which transformers read when these tests imported it.
    transformers_logging.disable_progress_bar()
    capsys.readouterr()
    return run


def test_version_and_help(call: Call) -> None:
    assert call("--version").out == f"hardkv {__version__}\n"
    for arguments in (["--help"], []):
        result = call(*arguments)
        assert result.code == 0
        assert all(name in result.out for name in ("generate", "info", "plugins", "config", "Exit codes"))


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, hardkv; from hardkv.cli import main; assert main(['generate', '--help']) == 0;"
        " assert main(['--version']) == 0; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--mean-tokens" in done.stdout


def test_a_process_writes_the_text_and_nothing_else(run_yaml: str) -> None:
    code = "import sys; from hardkv.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "generate", PROMPT, "--raw", "-c", run_yaml]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 24


def test_every_parameter_has_help() -> None:
    def check(command: Any, path: str) -> int:
        if not path.endswith(" config"):
            assert command.help, path
        for parameter in command.params:
            assert parameter.help, f"{path}: {parameter.name}"
        return 1 + sum(check(inner, f"{path} {name}") for name, inner in getattr(command, "commands", {}).items())

    assert check(typer.main.get_command(app), "hardkv") >= 15


def test_json_result_has_text_tokens_and_statistics(call: Call, run_yaml: str) -> None:
    result = call("generate", PROMPT, "--raw", "-c", run_yaml, "--json")
    assert (result.code, result.err) == (0, "")
    found = result.json
    assert set(found) == {"text", "token_ids", "finish_reason", "logprobs", "stats", "error", "runtime"}
    assert len(found["token_ids"]) == 24
    assert found["finish_reason"] == "length"
    assert found["stats"]["prompt_tokens"] == 150
    assert found["runtime"]["compressions"] >= 1
    assert found["runtime"]["mean_tokens_after_compression"] == pytest.approx(64, rel=0.02)
    assert set(found["runtime"]["seconds"]) == {"prefill", "prefill_compression", "decode", "compression"}


def test_live_text_is_that_of_the_json(call: Call, run_yaml: str) -> None:
    live = call("generate", PROMPT, "--raw", "-c", run_yaml, "--stats")
    assert live.out == call("generate", PROMPT, "--raw", "-c", run_yaml, "--json").json["text"] + "\n"
    assert "24 (ended by: length)" in live.err
    assert "prompt tokens" in live.err


def test_options_change_the_configuration(call: Call, run_yaml: str) -> None:
    options = ["--max-new-tokens", "5", "--seed", "3", "--temperature", "1.5", "--mean-tokens", "80"]
    changed = call("generate", PROMPT, "--raw", "-c", run_yaml, "--json", *options).json
    assert len(changed["token_ids"]) == 5
    assert changed["runtime"]["mean_tokens_after_compression"] == pytest.approx(80, rel=0.02)
    same = call("generate", PROMPT, "--raw", "-c", run_yaml, "--json", *options).json
    assert same["token_ids"] == changed["token_ids"]
    full = call("generate", PROMPT, "--raw", "-c", run_yaml, "--json", "--no-compression").json
    assert full["runtime"]["compressions"] == 0
    assert full["stats"]["tokens_kept"] == [[173, 173], [173, 173]]


def test_prompt_comes_from_argument_file_or_stdin(call: Call, run_yaml: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    common = ["-c", run_yaml, "--raw", "--json"]
    wanted = call("generate", PROMPT, *common).json["token_ids"]
    for arguments in (["-f", str(file)], ["-"], []):
        assert call("generate", *arguments, *common, stdin=PROMPT + "\n").json["token_ids"] == wanted
    twice = call("generate", "-f", str(file), "-f", str(file), *common).json
    assert twice["stats"]["prompt_tokens"] == 300


def test_chat_template_is_the_default(call: Call, run_yaml: str) -> None:
    def count(*options: str) -> int:
        result = call("generate", "w5 w6", "-c", run_yaml, "--json", "--max-new-tokens", "1", *options)
        return int(result.json["stats"]["prompt_tokens"])

    assert (count("--raw"), count(), count("--chat")) == (2, 4, 4)
    question = about_document("w5 w6", "w7")
    assert question == "Read the document and answer the question.\n\nw5 w6\n\nQuestion: w7"
    assert count("--raw", "--question", "w7") == len(question.split())


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--frob"], 2, "No such option: --frob"),
        (["generat"], 2, "No such command 'generat'"),
        (["generate"], 2, "the prompt is empty"),
        (["generate", "w1", "-f", "x"], 2, "both PROMPT and --prompt-file"),
        (["generate", "-f", "missing.txt"], 2, "missing.txt: no such file"),
        (["generate", "w1", "--question", " "], 2, "--question is empty"),
        (["generate", "w1", "-c", "missing.yaml"], 2, "missing.yaml: no such file"),
        (["generate", "w1", "--set", "cache.sinks"], 2, "expected KEY.PATH=VALUE"),
        (["generate", "w1", "--set", "cache.sinks=-1"], 2, "cache.sinks: Input should be greater than or equal to 0"),
        (["generate", "w1", "--set", "cache.sink=1"], 2, "cache.sink: unknown key (got 1). Did you mean 'sinks'?"),
        (["generate", "w1", "--set", "seed.x=1"], 2, "seed"),
        (["generate", "w1", "--set", "scorer.name=snapvk"], 2, "Did you mean 'snapkv'? "),
        (["generate", "w1", "--max-new-tokens", "0"], 2, "generation.max_new_tokens"),
        (["generate", "w1", "--mean-tokens", "0"], 2, "budget.mean_tokens"),
        (["generate", "w1", "--model", "/no/such/model"], 3, "'/no/such/model': no such folder"),
        (["plugins", "snapvk"], 2, "no component is called 'snapvk'. Did you mean 'snapkv'?"),
        (["config", "check", "missing.yaml"], 2, "missing.yaml: no such file"),
    ],
)
def test_errors_are_one_paragraph_and_an_exit_code(call: Call, arguments: list[str], code: int, text: str) -> None:
    result = call(*arguments)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("error: ")
    assert text in result.err
    assert "\n\n" not in result.err


def test_too_long_a_prompt_and_too_small_a_pool(call: Call, run_yaml: str) -> None:
    long = call("generate", " ".join([PROMPT] * 4), "--raw", "-c", run_yaml)
    assert long.code == 2
    assert "prompt 0 has 600 tokens; the model has 512 positions" in long.err
    small = call("generate", PROMPT, "--raw", "-c", run_yaml, "--set", "cache.pool_bytes=1KiB")
    assert small.code == 4
    assert "cache.pool_bytes is 1,024" in small.err


@pytest.mark.parametrize(
    ("error", "code"),
    [(HardKVError("odd"), 1), (PluginError("odd"), 1), (CapacityError("odd"), 4), (RuntimeError("odd"), 1)],
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_errors_while_running(
    call: Call, run_yaml: str, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, options: list[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("hardkv.cache.CascadeCache.compress", fail)
    result = call("generate", PROMPT, "--raw", "-c", run_yaml, *options)
    assert result.code == code
    assert "odd" in result.err
    assert "Traceback" in call("generate", PROMPT, "--raw", "-c", run_yaml, "--debug", *options).err


def test_interrupt(call: Call, run_yaml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HardKVRuntime, "stream", interrupt)
    result = call("generate", PROMPT, "-c", run_yaml)
    assert result.code == 130
    assert result.err.strip() == "interrupted"


def test_name_drops_the_options_of_what_it_replaces_in_any_order(call: Call, run_yaml: str) -> None:
    changes = ["--set", "budget.mean_tokens=72", "--set", "budget.name=top_k"]
    found = call("generate", PROMPT, "--raw", "-c", run_yaml, "--json", *changes).json
    assert found["runtime"]["mean_tokens_after_compression"] == pytest.approx(72, rel=0.02)


def test_local_plugin_next_to_the_file(call: Call, run_yaml: str) -> None:
    source = (
        "import hardkv, torch\n"
        "class Recency(hardkv.ImportanceScorer):\n"
        "    '''Newest first.'''\n"
        "    name = 'recency_here'\n"
        "    def score(self, view):\n"
        "        return view.positions.float()[:, :, None]\n"
        "@hardkv.hookimpl\n"
        "def hardkv_components():\n"
        "    return [Recency]\n"
    )
    Path(run_yaml).with_name("recency_here.py").write_text(source)
    Path(run_yaml).write_text(json.dumps({**json.loads(Path(run_yaml).read_text()), "plugins": ["recency_here"]}))
    assert "recency_here" in call("plugins", "-c", run_yaml).out
    changes = ["--set", "scorer.name=recency_here"]
    assert call("generate", PROMPT, "--raw", "-c", run_yaml, *changes).code == 0


def test_info(call: Call, run_yaml: str) -> None:
    found = call("info", "-c", run_yaml, "--json").json
    assert found["versions"]["hardkv"] == __version__
    assert found["versions"]["torch"] == torch.__version__
    expected = {"full_layers": 2, "sliding_layers": 0, "kv_heads": 2, "group": 2, "head_dim": 8, "max_positions": 512}
    assert {key: found["model"][key] for key in expected} == expected
    assert all(value > 0 for value in found["costs"].values())
    (row,) = found["memory"]["contexts"]
    assert row["context_tokens"] == 512
    assert row["compressed"]["sequence_bytes"] < row["uncompressed"]["sequence_bytes"]
    assert row["compressed"]["sequences"] > row["uncompressed"]["sequences"] > 0
    text = call("info", "-c", run_yaml).out
    assert all(word in text for word in ("transformers", "kv_heads", "c_read", "Memory plan", "512"))


def test_plugins_lists_every_component_and_its_options(call: Call) -> None:
    text, listed = call("plugins").out, call("plugins", "--json").json
    entries = load_registry().all()
    assert [(row["slot"], row["name"]) for row in listed] == [(entry.slot, entry.name) for entry in entries]
    for entry in entries:
        assert entry.name in text
        details = call("plugins", entry.name).out
        for option in entry.component.Config.model_fields:
            assert f"{entry.slot}.{option}" in details
    (budget,) = call("plugins", "threshold", "--json").json
    floor = next(option for option in budget["options"] if option["name"] == "floor_share")
    assert floor["allowed"] == "number >= 0.0 <= 1.0"
    assert floor["default"] == 0.2


def test_config_round_trip(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    assert call("config", "init", str(path)).code == 0
    assert call("config", "init").out == call("config", "init", "-").out == path.read_text()
    assert load_config(path).config == HardKVConfig()
    assert call("config", "check", str(path)).out.startswith(f"{path}: valid (smollm2; attention_power, exact,")
    path.write_text("seed: 7\n")
    refused = call("config", "init", str(path))
    assert refused.code == 2
    assert "--force" in refused.err
    assert path.read_text() == "seed: 7\n"
    assert call("config", "init", str(path), "--force").code == 0
    assert load_config(path).config.seed == 0


def test_config_check_names_every_fault(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("cache: {sinks: -1, intervall: 3}\n")
    result = call("config", "check", str(path))
    assert result.code == 2
    assert "2 faults" in result.err
    assert "Did you mean 'interval'?" in result.err


def test_config_schema(call: Call) -> None:
    schema = call("config", "schema").json
    assert set(schema["properties"]) == set(HardKVConfig.model_fields)
    assert "scorer_snapkv" in schema["$defs"]
