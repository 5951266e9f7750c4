"""Attention of a prompt and of one tier against float64 oracles, and how the package is laid out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from hardkv_kernels import attend_slots, causal_attention
from tests.operators import check_operator

SEEDS = st.integers(0, 2**31 - 1)
HEAD_DIMS = st.sampled_from([64, 80, 96, 128])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SOFTCAPS = st.sampled_from([None, 5.0])
REPOSITORY = Path(__file__).parents[1]


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def softmax_with_sink(logits: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax over the last axis; `sink [...]` joins the denominator. Rows of -inf alone give zeros."""
    if sink is not None:
        return torch.softmax(torch.cat([logits, sink.double()[..., None]], -1), -1)[..., :-1]
    return torch.softmax(logits, -1).nan_to_num(0.0)


def assert_near(
    found: Tensor, expected: Tensor, dtype: torch.dtype, largest_logit: float, largest_value: float
) -> None:
    """Within what rounding logits, weights and outputs to `dtype` may cost."""
    eps = torch.finfo(dtype).eps
    tolerance = (4 + 2 * largest_logit) * eps * max(largest_value, 1e-3)
    if dtype == torch.float32:
        tolerance *= 16  # sums of some hundred terms
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=tolerance)


@given(
    seed=SEEDS,
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    slots=st.integers(0, 20),
    dtype=DTYPES,
    softcap=SOFTCAPS,
)
def test_attend_slots(seed: int, heads: int, group: int, slots: int, dtype: torch.dtype, softcap: float | None) -> None:
    """NaN in masked slots changes nothing; a head with no slot answers zeros and -inf."""
    rng, dim = torch.Generator().manual_seed(seed), 16
    query = torch.randn(heads, group, dim, generator=rng).to(dtype)
    keys, values = torch.randn(2, heads, slots, dim, generator=rng).to(dtype)
    live = torch.rand(heads, slots, generator=rng) < 0.7
    live[0] = False
    bias = torch.where(live, torch.rand(heads, slots, generator=rng), float("-inf"))
    keys[~live], values[~live] = float("nan"), float("inf")
    out, lse = attend_slots(query, keys, values, bias, 0.25, softcap)
    assert out.dtype == lse.dtype == torch.float32
    assert not out[0].any()
    assert torch.isneginf(lse[0]).all()
    for head in range(heads):
        logits = cap(query[head].double() @ keys[head][live[head]].double().T * 0.25, softcap) + bias[head][live[head]]
        expected = softmax_with_sink(logits, None) @ values[head][live[head]].double()
        torch.testing.assert_close(out[head].double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[head].double(), torch.logsumexp(logits, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plain", [False, True])  # neither softcap nor sinks: torch's own attention
@given(
    seed=SEEDS,
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    tokens=st.integers(1, 24),
    share=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
    window=st.sampled_from([None, 1, 2, 5, 40]),
    softcap=SOFTCAPS,
    with_sinks=st.booleans(),
    block_rows=st.sampled_from([1, 3, 256]),
    dtype=DTYPES,
)
def test_causal_attention_of_the_last_rows(
    plain: bool,
    seed: int,
    heads: int,
    group: int,
    tokens: int,
    share: float,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    block_rows: int,
    dtype: torch.dtype,
) -> None:
    rng, dim = torch.Generator().manual_seed(seed), 16
    rows = max(1, round(share * tokens))
    query = torch.randn(heads, group, rows, dim, generator=rng).to(dtype)
    keys, values = torch.randn(2, heads, tokens, dim, generator=rng).to(dtype)
    softcap = None if plain else softcap
    sinks = torch.randn(heads, group, generator=rng) if with_sinks and not plain else None
    out = causal_attention(query, keys, values, 0.25, window, softcap, sinks, block_rows)
    assert out.dtype == dtype
    assert out.shape == query.shape
    for head in range(heads):
        for row in range(rows):
            at = tokens - rows + row
            first = 0 if window is None else max(0, at - window + 1)
            seen_keys, seen_values = (tensor[head, first : at + 1].double() for tensor in (keys, values))
            logits = cap(query[head, :, row].double() @ seen_keys.T * 0.25, softcap)
            expected = softmax_with_sink(logits, None if sinks is None else sinks[head]) @ seen_values
            largest, top = float(logits.abs().max()), float(seen_values.abs().max())
            assert_near(out[head, :, row], expected, dtype, largest, top)


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_attend_slots_keeps_torchs_rules(softcap: float | None) -> None:
    """Schema, autograd registration, and the fake: shapes, dtypes and strides as the real one's."""
    query, keys, values = torch.randn(2, 3, 8), *torch.randn(2, 2, 6, 8)
    check_operator(attend_slots, (query, keys, values, torch.zeros(2, 6), 0.5, softcap))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_prefill_attention_never_waits_for_the_device(softcap: float | None, with_sinks: bool) -> None:
    """FakeTensorMode knows no values: a read-back or a shape that depends on data raises."""
    with FakeTensorMode():
        keys, rows = torch.empty(4, 16, 8), torch.empty(4, 3, 5, 8)
        sinks = torch.empty(4, 3) if with_sinks else None
        assert causal_attention(rows, keys, keys, 0.5, 7, softcap, sinks).shape == (4, 3, 5, 8)
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        bool(torch.empty(1).sum() > 0)


def test_the_kernels_folder_does_not_shadow_the_package_transformers_looks_for() -> None:
    """At the repository's root `import kernels` finds our folder; transformers asks whether such a package exists."""
    program = """
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
import torch, hardkv_kernels
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32)
model = LlamaForCausalLM(config).eval()
with torch.no_grad():
    print(tuple(model(torch.arange(5)[None]).logits.shape), hardkv_kernels.__name__)
"""
    environment = {"PATH": "", "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(  # our own interpreter and our own text
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("(1, 5, 32) hardkv_kernels", 0), done.stderr
