"""Fused blocks give what the model's own give, are installed only where they do, and leave other passes alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from hardkv.model_adapter import Decoder
from hardkv.model_adapter.fusing import fuse_blocks
from hardkv.model_adapter.packing import can_pack
from hardkv.types import AttentionCall
from tests.tiny_models import tiny_model

# Blocks of a tiny model's four layers that can be fused: attention, feed-forward, norms.
EXPECTED = {
    "llama": (4, 4, 9),
    "qwen2": (4, 4, 9),
    "mistral": (4, 4, 9),
    "smollm3": (3, 4, 9),  # one layer does not rotate
    "qwen3": (0, 4, 17),  # its attention normalises queries and keys
    "olmo2": (0, 4, 17),
    "gemma2": (4, 4, 0),  # its norms multiply by 1 + weight
    "phi3": (0, 0, 9),  # joined already
    "gpt_oss": (0, 0, 9),
}


class Mean:
    """Answers each head with the mean of query, key and value, so that each of them matters."""

    def __init__(self) -> None:
        self.calls: list[tuple[AttentionCall, int | None]] = []

    def attend(self, call: AttentionCall, sliding_window: int | None) -> Tensor:
        self.calls.append((call, sliding_window))
        group = call.query.shape[1] // call.keys.shape[1]
        both = (call.keys + call.values).repeat_interleave(group, 1)
        return ((call.query + both) / 3).transpose(1, 2).contiguous()


def pair(family: str) -> tuple[Any, Any]:
    plain: Any = tiny_model(family)
    fused: Any = tiny_model(family)
    plain.to(torch.bfloat16)
    if not can_pack(fused.to(torch.bfloat16)):
        pytest.skip("this build of torch has no oneDNN")
    return plain, fused


def replaced(model: Any) -> tuple[int, int, int]:
    """Attention blocks, feed-forward blocks and norms whose forward pass was replaced."""
    names = [name.rsplit(".", 1)[-1] for name, module in model.named_modules() if "forward" in vars(module)]
    return names.count("self_attn"), names.count("mlp"), sum("norm" in name for name in names)


def assert_close(got: Tensor, expected: Tensor, roundings: int = 4) -> None:
    spread = float(expected.float().abs().max())
    torch.testing.assert_close(got, expected, atol=spread * roundings * 2**-8, rtol=0.0)


@pytest.mark.parametrize("family", EXPECTED)
def test_every_family_decodes_as_before(family: str) -> None:
    plain, fused = pair(family)
    assert fuse_blocks(fused) == sum(EXPECTED[family])
    assert replaced(fused) == EXPECTED[family]
    tokens, positions = torch.tensor([3, 250, 77]), torch.tensor([0, 41, 1900])
    before, after = Mean(), Mean()
    expected = Decoder(plain).decode(tokens, positions, before)
    got = Decoder(fused).decode(tokens, positions, after)
    assert_close(got, expected, 12)
    for (call, window), (other, other_window) in zip(after.calls, before.calls, strict=True):
        assert (call.layer, call.scaling, call.softcap, window) == (
            other.layer,
            other.scaling,
            other.softcap,
            other_window,
        )
    first, second = after.calls[0][0], before.calls[0][0]
    for name in ("query", "keys", "values"):
        assert_close(getattr(first, name), getattr(second, name))


def test_a_prompt_goes_through_the_attention_the_module_had() -> None:
    plain, fused = pair("llama")
    fuse_blocks(fused)
    asked: list[int] = []
    fused.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: asked.append(1))
    ids = torch.arange(40)
    got = Decoder(fused).prefill(ids, Mean(), 16, None)
    assert len(asked) == 3
    assert_close(got, Decoder(plain).prefill(ids, Mean(), 16, None), 12)
    with torch.no_grad():
        assert_close(fused(ids[None]).logits, plain(ids[None]).logits, 12)
    assert len(asked) == 4
    Decoder(fused).decode(ids[:2], ids[:2], Mean())
    assert len(asked) == 4


def test_the_parameters_stay_as_they_are() -> None:
    plain, fused = pair("llama")
    fuse_blocks(fused)
    assert all(torch.equal(weight, plain.state_dict()[name]) for name, weight in fused.state_dict().items())


def test_blocks_that_do_something_else_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair("llama")
    attention, feed, norm = (
        type(model.model.layers[0].get_submodule(n)) for n in ("self_attn", "mlp", "input_layernorm")
    )
    own, feeding, norming = attention.forward, feed.forward, norm.forward

    def louder(self: Any, hidden_states: Tensor, **arguments: Any) -> Any:
        far = 1.0 + (arguments["position_ids"] > 500)[..., None]
        return own(self, hidden_states * far.to(hidden_states.dtype), **arguments)

    monkeypatch.setattr(attention, "forward", louder)
    monkeypatch.setattr(feed, "forward", lambda self, x: feeding(self, x) + 1.0)
    monkeypatch.setattr(norm, "forward", lambda self, x: norming(self, x) * 1.1)
    assert fuse_blocks(model) == 0
    assert replaced(model) == (0, 0, 0)


def test_nothing_is_fused_where_the_copies_would_crowd_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair("llama")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert fuse_blocks(model) == 0
    assert replaced(model) == (0, 0, 0)
