"""The documentation's table of a fidelity result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_docs import generator


def result() -> dict[str, Any]:
    """As `hardkv eval fidelity` writes it, with made-up numbers."""
    times = {"rounds": 8, "prompt_tokens": 1024, "fed_tokens": 1024}
    measured = {"top1_agreement": 0.875, "perplexity": 14.5, "attention_mass_kept": [0.75, 0.5], "mean_tokens": 192.0}
    return {
        "kind": "fidelity",
        "command": "hardkv eval fidelity -o x.json",
        "model": "tiny",
        "dtype": "float32",
        "machine": "a machine",
        "versions": {"hardkv": "9.9"},
        "texts": ["a.txt", "b.txt"],
        "rows": [
            {**times, "method": "full cache", "mean_budget": None, "perplexity": 13.25},
            {
                **times,
                **measured,
                "method": "snapkv+top_k",
                "mean_budget": 192,
                "kl": 0.25,
                "kl_standard_error": None,
                "attention_mass_kept": None,
            },
            {**times, **measured, "method": "default", "mean_budget": 192, "kl": 0.125, "kl_standard_error": 0.01}
            | {"kl_ratio_to": {"snapkv+top_k": 0.5, "h2o+top_k": 0.625, "a variant": 0.9}},
            {**times, "method": "broken", "mean_budget": 192, "kl": None, "note": "failed: bang"},
        ],
    }


def test_a_fidelity_result_is_a_table_best_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = generator()
    monkeypatch.setattr(made, "_RESULTS", tmp_path)
    (tmp_path / "fidelity.json").write_text(json.dumps(result()))
    lines = made.measurements().split("\n")
    assert lines[0] == (
        "**Fidelity, 8 rounds of compression while decoding**: `tiny`, 2 texts of 1,024 tokens, then 1,024 given ones;"
        " KL to the full cache in nats per token, lower is better, ± its standard error over texts; with the full cache"
        " the perplexity is 13.25. At 192 tokens the default has 0.50 times the KL of uniform SnapKV, 0.62 times that"
        " of `h2o+top_k`."
    )
    assert lines[4:6] == [
        "| 192 | `default` | 0.1250 ± 0.0100 | 0.875 | 14.50 | 0.625 | 192.0 |",
        "| 192 | `snapkv+top_k` | 0.2500 | 0.875 | 14.50 |  | 192.0 |",
    ]
    assert "broken" not in "\n".join(lines)
    assert lines[-1].startswith("`hardkv eval fidelity -o x.json` gives `benchmarks/results/fidelity.json` (float32, ")


def test_held_out_texts_are_a_sentence_and_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = generator()
    monkeypatch.setattr(made, "_RESULTS", tmp_path)
    (tmp_path / "held_out.json").write_text(json.dumps(result()))
    said, _, command = made.measurements().split("\n")
    assert said == (
        "The default's settings were chosen on these texts. On 2 others, after one compression, it has 0.50 times the"
        " KL of uniform SnapKV, 0.62 times that of `h2o+top_k` at 192 tokens."
    )
    assert command.startswith("`hardkv eval fidelity -o x.json` gives `benchmarks/results/held_out.json` (float32, ")


def test_the_picture_is_shown_once_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = generator()
    monkeypatch.setattr(made, "_PICTURES", tmp_path)
    assert made.PARTS["frontier"]() == ""
    (tmp_path / "fidelity.png").write_bytes(b"")
    assert made.PARTS["frontier"]().endswith("(images/fidelity.png)")
