"""A compression pass decides the same however its layers are grouped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardkv import HardKVRuntime, compression
from tests.tiny_models import loaded

CONFIG = {
    "model": {"id": "tiny", "dtype": "float32"},
    "cache": {"interval": 16, "local_window": 8, "page_slots": 8},
    "budget": {"name": "threshold", "mean_tokens": 24},
}


@pytest.mark.parametrize("scorer", ["attention_power", "snapkv"])
def test_groups_of_layers_change_nothing(monkeypatch: pytest.MonkeyPatch, scorer: str) -> None:
    groups: list[int] = []
    passes: list[compression.Decision] = []
    group, decide = compression.Compressor._groups, compression.Compressor.decide

    def counted(self: Any, widths: Any) -> list[slice]:
        found = group(self, widths)
        groups.append(len(found))
        return found

    def twice(self: Any, cascade: Any) -> compression.Decision:
        monkeypatch.setattr(compression, "_CPU_WORKSPACE_BYTES", 0)
        alone = decide(self, cascade)
        monkeypatch.setattr(compression, "_CPU_WORKSPACE_BYTES", 8 << 20)
        together = decide(self, cascade)
        assert torch.equal(alone.report.wait(), together.report.wait())
        for name in ("stays", "shown"):
            assert torch.equal(getattr(alone.moves, name), getattr(together.moves, name))
        passes.append(together)
        return together

    monkeypatch.setattr(compression.Compressor, "_groups", counted)
    monkeypatch.setattr(compression.Compressor, "decide", twice)
    runtime = HardKVRuntime.from_config({**CONFIG, "scorer": {"name": scorer}}, loaded=loaded())
    runtime.generate([list(range(1, 90)), list(range(100, 240))], max_new_tokens=40, ignore_eos=True)
    assert [one.selects for one in passes] == [True] * 4
    assert groups == [4, 1] * 4
