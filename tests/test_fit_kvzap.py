"""The example that fits networks for `kvzap`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hardkv import EnteringTokens, HardKVRuntime
from tests.tiny_models import loaded

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("fit_kvzap", ROOT / "examples" / "fit_kvzap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_target_is_what_later_queries_pay(example: Any) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 9, 4).unbind(0)
    queries = torch.randn(1, 2, 3, 9, 4)
    tokens = EnteringTokens(0, keys, values, queries, torch.arange(9)[None])
    found = example.target(tokens)
    for h in range(2):
        mean = values[0, h].mean(0)
        for j in range(8):
            total = 0.0
            for a in range(3):
                for i in range(j + 1, 9):
                    weights = torch.softmax(keys[0, h, : i + 1] @ queries[0, h, a, i] * 0.5, -1)
                    total += float(weights[j]) ** 4 / (8 - j)
            expected = torch.tensor(total).pow(0.25) * (values[0, h, j] - mean).norm()
            torch.testing.assert_close(found[h, j], expected.log(), rtol=1e-4, atol=1e-4)


def test_a_fit_finds_a_linear_law(example: Any) -> None:
    torch.manual_seed(0)
    law, bias = torch.randn(2, 6), torch.randn(2)
    states = torch.randn(200, 6)
    samples = [(states[:120], states[:120] @ law.T + bias), (states[120:], states[120:] @ law.T + bias)]
    weight, level = example.fit(samples, 1e-9)
    torch.testing.assert_close(weight, law, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(level, bias, rtol=1e-3, atol=1e-3)
    assert example.explained(samples, weight, level) > 0.999


def test_it_writes_what_the_scorer_reads(example: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    model = loaded()
    monkeypatch.setattr(example, "load_model", lambda *_: model)
    paths = []
    for index in range(3):
        paths.append(tmp_path / f"text{index}.txt")
        paths[-1].write_text(f"{index} one two three four five six seven " * 12, encoding="utf-8")
    out = tmp_path / "networks.safetensors"
    monkeypatch.setattr(sys, "argv", ["fit_kvzap.py", "--tokens", "300", "--out", str(out), *map(str, paths)])
    example.main()
    assert "4 layers; variance explained on text2.txt: mean 0." in capsys.readouterr().out
    assert {name: tuple(tensor.shape) for name, tensor in load_file(out).items()} == {
        **{f"layers.{layer}.weight": (2, 64) for layer in range(4)},
        **{f"layers.{layer}.bias": (2,) for layer in range(4)},
    }
    config = {"model": {"dtype": "float32"}, "scorer": {"name": "kvzap", "weights": str(out)}}
    runtime = HardKVRuntime.from_config({**config, "budget": {"name": "threshold", "mean_tokens": 64}}, loaded=model)
    answer = runtime.generate("one two three " * 20, max_new_tokens=4, ignore_eos=True)
    assert answer.stats.mean_tokens_after_compression == [64.0]
