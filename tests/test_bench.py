"""`hardkv bench`: peers in processes of their own, what goes wrong there, turns, ratios, and the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging as transformers_logging

import hardkv.evaluation.speed
from hardkv.cli.command_lines import spread
from hardkv.config import HardKVConfig
from hardkv.errors import InputError
from hardkv.evaluation.speed import Crew, PeerError, PeerProcess, Plan, Way, measure_decode, plan_from
from hardkv.evaluation.speed import decode as decoding
from hardkv.evaluation.speed import ways as known_ways
from hardkv.evaluation.speed.prompts import Saved
from tests.command_line import Call, Called, run_main
from tests.tiny_models import save_tiny, tiny_tokenizer

FAKE = """
import json, sys, time
HELD = {"rss_bytes": 3000, "rss_peak_bytes": 5000, "device_peak_bytes": None}
SPEED, MODE = SPEED_AND_MODE
step = SPEED
for line in sys.stdin:
    request = json.loads(line)
    do, reply = request["do"], {}
    settings = request.get("settings", {})
    if do == "load":
        if settings.get("config", {}).get("compression") is False:
            step = 2 * SPEED
        reply = {"versions": {"fake": "1.5"}}
    elif do == "start":
        reply = {"prefill_seconds": 0.5, "kv_bytes": 10 * sum(map(len, request["prompts"])),
                 "compression_seconds": 0.125, "mean_tokens": 40.0}
    elif do == "steps":
        if MODE == "crash":
            print("the cause", file=sys.stderr)
            sys.exit(7)
        if MODE == "hang":
            time.sleep(60)
        if MODE == "garbage":
            print("WARNING: hello", flush=True)
            continue
        if MODE == "error":
            reply = {"error": "ValueError: bang"}
        else:
            reply = {"seconds": step * request["count"], "step_seconds": [step] * request["count"],
                     "compression_seconds": step, "passes": 2, "kv_bytes": int(4000 / step), "mean_tokens": 40.0}
    elif do == "force":
        reply = {"kl": 0.25, "top1_agreement": 0.75, "mean_tokens": 40.0}
    print(json.dumps({**HELD, **reply}), flush=True)
"""


def worker(path: Path, mode: str = "fine", speed: float = 0.5) -> Path:
    path.write_text(FAKE.replace("SPEED_AND_MODE", repr((speed, mode))))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    transformers_logging.disable_progress_bar()
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def call(model: str, capsys: pytest.CaptureFixture[str]) -> Call:
    def run(kind: str, *arguments: str, sizes: tuple[str, ...] = ("--context", "96", "--mean-budget", "48")) -> Called:
        capsys.readouterr()
        return run_main(["bench", kind, "-m", model, "--dtype", "float32", *sizes, *arguments], capsys)

    return run


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers that pretend: hardkv's and transformers' work, kvpress's answers with an error."""
    monkeypatch.setattr(known_ways, "WORKERS", tmp_path)
    worker(tmp_path / "with_hardkv.py")
    worker(tmp_path / "with_transformers.py", speed=2.0)
    worker(tmp_path / "with_kvpress.py", "error")
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("crash", "steps: the process ended with code 7: the cause"),
        ("hang", "steps: no answer within 2 s; raise --timeout"),
        ("garbage", "steps: expected a line of JSON, got 'WARNING: hello'"),
        ("error", "steps: ValueError: bang"),
    ],
)
def test_what_goes_wrong_in_a_peer_is_one_sentence(tmp_path: Path, mode: str, text: str) -> None:
    process = PeerProcess([sys.executable, str(worker(tmp_path / "peer.py", mode))], 30.0)
    try:
        assert process.ask("load", settings={})["versions"] == {"fake": "1.5"}
        process.timeout_s = 2.0
        with pytest.raises(PeerError) as error:
            process.ask("steps", count=1)
        assert str(error.value) == text
    finally:
        process.close()
    assert process._process.returncode is not None


def test_an_interpreter_that_is_not_there() -> None:
    with pytest.raises(PeerError, match=r"^/no/such/python: cannot be started: No such file"):
        PeerProcess(["/no/such/python", "peer.py"], 1.0)


def saved(weight_bytes: int = 1000) -> Saved:
    return Saved(Path("unused"), tiny_tokenizer(), 64, weight_bytes, 2048)


def crew(ways: list[Way], said: list[str]) -> Crew:
    return Crew(ways, Path("unused"), HardKVConfig(), 30.0, said.append)


@pytest.mark.parametrize(("weights", "first"), [(1000, ["a", "b", "a", "b"]), (10**15, ["a", "a", "b", "b"])])
def test_ways_take_turns_where_memory_allows_it(tmp_path: Path, weights: int, first: list[str]) -> None:
    ways = [
        Way("a", worker(tmp_path / "a.py", speed=0.5), whole_intervals=True),
        Way("b", worker(tmp_path / "b.py", speed=2.0)),
    ]
    said: list[str] = []
    plan = Plan((2,), (10,), 5, interval=16, rounds=2, steps=20)
    with crew(ways, said) as team:
        rows = measure_decode(team, saved(weights), plan, 2, 10)
    assert [line[0] for line in said if "turn" in line] == first
    assert [row.tokens_per_s for row in rows] == [4.0, 1.0]
    assert [len(row.tokens_per_s_turns) for row in rows] == [2, 2]
    # A pass of half a second in each turn of 32 steps (two intervals), and of 20.
    assert [row.compression_share for row in rows] == [1 / 32, 1 / 20]
    assert (rows[0].step_ms, rows[0].compression_ms, rows[0].passes, rows[0].mean_tokens) == (500.0, 250.0, 4, 40.0)
    assert (rows[0].kv_bytes, rows[0].rss_loaded_bytes, rows[0].rss_peak_bytes) == (8000, 3000, 5000)
    assert decoding.ratios(rows, "a") == {"b": {"median": 4.0, "low": 4.0, "high": 4.0}}
    assert decoding.ratios(rows, "hardkv") == {}


def test_one_that_fails_leaves_and_stays_out(tmp_path: Path) -> None:
    ways = [
        Way("broken", worker(tmp_path / "broken.py", "crash")),
        Way("absent", tmp_path / "x.py", obstacle="no interpreter"),
        Way("fine", worker(tmp_path / "fine.py")),
    ]
    said: list[str] = []
    with crew(ways, said) as team:
        for _ in range(2):
            rows = measure_decode(team, saved(), Plan((1,), (10,), 5, rounds=1), 1, 10)
            assert [row.note for row in rows] == [
                "not run: steps: the process ended with code 7: the cause",
                "not run: no interpreter",
                None,
            ]
            assert [row.tokens_per_s for row in rows] == [None, None, 2.0]
    assert said.count("broken: loading") == 1


def test_presets_and_what_replaces_them() -> None:
    full = plan_from("full", rounds=5, steps=None)
    assert (full.batches, full.contexts, full.mean_tokens, full.interval, full.rounds) == ((8,), (7000,), 1024, 128, 5)
    assert [full.steps_of(True), full.steps_of(False), full.new_tokens(True)] == [128, 12, 646]
    assert plan_from("quick", batches=(4, 1), contexts=(600, 400)).cases == [(1, 400), (1, 600), (4, 400), (4, 600)]
    with pytest.raises(InputError, match="--preset huge: expected quick or full"):
        plan_from("huge")
    with pytest.raises(InputError, match="--mean-budget 256: expected fewer than the 200 tokens of a prompt"):
        plan_from("quick", contexts=(200, 4000))


def test_several_values_after_one_option() -> None:
    assert spread(["--batch", "1", "4", "--json", "--ways=x", "y"], {"--batch", "--ways"}) == [
        *("--batch", "1", "--batch", "4"),
        "--json",
        *("--ways=x", "--ways", "y"),
    ]


def test_decode_table_json_and_picture(call: Call, fakes: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'hardkv[plot]'")
    save, plot = fakes / "decode.json", fakes / "decode.png"
    python = ("--kvpress-python", sys.executable)
    options = ("--batch", "1", "2", "--rounds", "2", "--fidelity", "--fidelity-tokens", "96", "--fidelity-budget", "48")
    result = call("decode", *options, *python, "--json", "-o", str(save), "--plot", str(plot))
    found = json.loads(result.out)
    assert result.code == 0
    assert found == json.loads(save.read_text())
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [found[key] for key in ("kind", "complete", "batch", "context_tokens", "interval", "mean_tokens")] == [
        *("decode", True, 2, 96, 128, 40.0)
    ]
    assert found["tokens_per_s"] == {
        "hardkv": 4.0, "uncompressed": 2.0, "transformers": 1.0, "transformers_static": 1.0
    }  # fmt: skip
    assert (found["ratio_vs_uncompressed"], found["ratio_vs_transformers"], found["kv_bytes_share"]) == (2.0, 4.0, 2.0)
    assert [row["note"] for row in found["rows"] if row["way"] == "kvpress:SnapKVPress"] == [
        "not run: steps: ValueError: bang"
    ] * 2
    assert {row["note"] for row in found["rows"] if row["way"] == "vllm"} == {
        "not run: no interpreter with vllm was given: --vllm-python PATH"
    }
    assert len(found["ratios"]) == 6
    assert [(row["way"], row["kl"]) for row in found["fidelity"]] == [("hardkv", 0.25), ("kvpress:SnapKVPress", 0.25)]
    assert found["fidelity_settings"]["mean_budget"] == 48
    assert found["peer_versions"]["hardkv"] == {"fake": "1.5"}
    assert found["command"].startswith("hardkv bench decode -m ")
    assert "kvpress:SnapKVPress: not run: steps: ValueError: bang" in result.err


def test_prefill_and_memory(call: Call, fakes: Path) -> None:
    ways = ("--ways", "hardkv", "transformers", "--batch", "2")
    found = json.loads(call("prefill", *ways, "--json").out)
    (ours, _) = found["rows"]
    assert (found["kind"], ours["first_token_seconds"], ours["tokens_per_s"]) == ("prefill", 0.5, 384.0)
    assert (ours["transient_bytes"], ours["kv_bytes"], ours["compression_seconds"]) == (2000, 1920, 0.125)
    assert len(ours["first_token_seconds_turns"]) == 2
    found = json.loads(call("memory", *ways, "--room", "1 MB", "--json").out)
    (ours, theirs) = found["rows"]
    assert (found["kind"], found["room_bytes"]) == ("memory", 1_000_000)
    assert (ours["kv_bytes"], ours["kv_bytes_per_sequence"], ours["sequences_in_room"]) == (8000, 4000.0, 250)
    assert (theirs["sequences_in_room"], theirs["rss_growth_bytes"], theirs["rss_peak_growth_bytes"]) == (1000, 0, 2000)
    text = call("memory", *ways, "--room", "1 GiB").out
    assert "sequences that fit in 1 GiB of cache" in text


def test_the_table_shows_cases_ratios_and_why(call: Call, fakes: Path) -> None:
    worker(fakes / "with_transformers.py", "hang")
    result = call("decode", "--batch", "1", "--ways", "hardkv", "uncompressed", "transformers", "--timeout", "4")
    assert result.code == 0
    assert "not run: steps: no answer within 4 s; raise --timeout" in result.out
    assert "1 x 96: hardkv / uncompressed 2.00 x (turns 2.00-2.00)" in result.out
    assert "in float32 on cpu, mean budget 48, interval 128, 2 turns each" in result.out


def test_an_interrupt_keeps_the_cases_that_are_done(call: Call, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hardkv.evaluation.speed.measure_decode

    def interrupted(team: Any, kept: Any, plan: Any, batch: int, context: int) -> Any:
        if batch == 2:
            raise KeyboardInterrupt
        return whole(team, kept, plan, batch, context)

    monkeypatch.setattr(hardkv.evaluation.speed, "measure_decode", interrupted)
    result = call("decode", "--batch", "1", "2", "--ways", "hardkv", "--json")
    found = json.loads(result.out)
    assert (result.code, found["complete"], [row["batch"] for row in found["rows"]]) == (130, False, [1])


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        ("decode", ["--preset", "huge"], "--preset huge: expected quick or full"),
        ("decode", ["--mean-budget", "96"], "--mean-budget 96: expected fewer than the 96 tokens of a prompt"),
        ("decode", ["--ways", "hardkv", "transfomers"], "no way is called 'transfomers'. Did you mean 'transformers'?"),
        ("prefill", ["--kvpress-python", "no/python"], "--kvpress-python no/python: expected a Python interpreter"),
        ("memory", ["--vllm-python", "no/python"], "--vllm-python no/python: expected a Python interpreter"),
        ("memory", ["--room", "much"], "--room: expected bytes as a whole number or with a unit"),
        ("decode", ["--output", "no/such/folder.json"], "--output no/such/folder.json: its folder does not exist"),
        ("prefill", ["--plot", "plot.gif"], "--plot plot.gif: expected a name that ends in .png, .svg, .pdf"),
        ("decode", ["--fidelity", "--fidelity-budget", "3000"], "--fidelity-budget 3000: expected fewer than the 2048"),
        ("decode", ["--set", "budget.name=top_p"], "mean_tokens"),
        ("decode", ["--context", "2000"], "a prompt and the steps after it take 2262 tokens; the model has 2048"),
    ],
)
def test_errors_come_before_any_work(call: Call, kind: str, arguments: list[str], text: str) -> None:
    result = call(kind, *arguments)
    assert (result.code, result.out) == (2, "")
    assert text in result.err
    assert "case 1" not in result.err


def test_real_processes_of_hardkv_and_transformers(call: Call) -> None:
    """The worker scripts themselves, on a tiny model; its caches' sizes are known."""
    options = ("--batch", "2", "--interval", "16", "--rounds", "2", "--steps", "4", "--ways", "hardkv", "transformers")
    found = json.loads(call("decode", *options, "--json").out)
    ours, theirs = found["rows"]
    assert (ours["note"], theirs["note"]) == (None, None)
    assert ours["mean_tokens"] == pytest.approx(48, rel=0.02)
    # Each sequence is compressed once in every turn of one interval.
    assert ours["passes"] == 4
    assert 0 < ours["compression_share"] < 1
    assert theirs["kv_bytes"] == 2 * (96 + 4 + 2 * 4) * 4 * 2 * 2 * 16 * 4
    assert 0 < ours["kv_bytes"] < theirs["kv_bytes"] * 2
    assert len(theirs["tokens_per_s_turns"]) == 2
    assert set(found["peer_versions"]["transformers"]) == {"torch", "transformers"}


@pytest.mark.slow
def test_real_process_of_kvpress(call: Call) -> None:
    python = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"
    if not python.exists():
        pytest.skip("kvpress has no environment here: make peers")
    press = ("--presses", "KnormPress", "--ways", "kvpress:KnormPress", "--kvpress-python", str(python))
    fidelity = ("--fidelity", "--fidelity-tokens", "96", "--fidelity-budget", "48")
    found = json.loads(call("decode", "--batch", "2", "--interval", "16", *press, *fidelity, "--json").out)
    (row,) = found["rows"]
    assert (row["note"], row["mean_tokens"], row["passes"]) == (None, 48.0, 4)
    # Steps since the last pass are held besides the budget, and as many inputs of the layers.
    assert row["kv_bytes"] == 2 * 4 * (52 * 2 * 2 * 16 + 4 * 64) * 4
    (measured,) = found["fidelity"]
    assert measured["kl"] > 0.001
    assert measured["mean_tokens"] == 48
    assert found["peer_versions"]["kvpress:KnormPress"]["kvpress"] == "0.5.5"
