"""Packed linear weights give the same sums, leave the parameters alone, and are refused where they do not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hardkv.model_adapter.packing import can_pack, pack_linears
from tests.tiny_models import tiny_model


def bfloat16_model() -> Any:
    model: Any = tiny_model("llama")
    return model.to(torch.bfloat16)


def test_packed_weights_give_the_same_logits() -> None:
    plain, packed = bfloat16_model(), bfloat16_model()
    if not can_pack(packed):
        pytest.skip("this build of torch has no oneDNN")
    before = {name: weight.clone() for name, weight in packed.state_dict().items()}
    linears = [module for module in packed.modules() if type(module) is torch.nn.Linear]
    assert pack_linears(packed) == sum(module.weight.nbytes for module in linears)
    for tokens in (1, 3, 40):
        ids = torch.arange(tokens)[None]
        with torch.no_grad():
            expected, got = plain(ids).logits, packed(ids).logits
        spread = float(expected.float().abs().max())
        torch.testing.assert_close(got, expected, atol=spread * 2**-6, rtol=2**-6)
    assert all(torch.equal(weight, before[name]) for name, weight in packed.state_dict().items())


def test_only_bfloat16_is_packed() -> None:
    assert not can_pack(tiny_model("llama"))


def test_nothing_is_packed_where_the_copies_would_crowd_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    model = bfloat16_model()
    assert pack_linears(model) == 0
    assert not any("forward" in vars(module) for module in model.modules())
