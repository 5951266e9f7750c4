"""The operators against float64 oracles over ragged, shuffled and dirty inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from hardkv_kernels import attend_slots, causal_attention, merge_states, paged_attention, reference

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


def draw_pages(
    rng: torch.Generator, owners: int, pages: int, slots: int, dim: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Pages in any order, some owned by nobody and full of large finite rubbish, slots masked, merged or plain."""
    owner = torch.randint(0, owners + 1, (pages,), generator=rng)
    keys, values = torch.randn(2, pages, slots, dim, generator=rng).to(dtype)
    kind = torch.randint(0, 4, (pages, slots), generator=rng)
    log_bias = torch.rand(pages, slots, generator=rng) * 3
    bias = torch.where(kind == 0, float("-inf"), torch.where(kind == 1, log_bias, 0.0))
    bias[torch.rand(pages, generator=rng) < 0.2] = float("-inf")
    nobody = owner == owners
    keys[nobody], values[nobody] = 3e4, -3e4
    return {"keys": keys, "values": values, "bias": bias, "owner": owner}


def paged_oracle(
    query: Tensor, pages: dict[str, Any], scaling: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor, float]:
    """Output and probabilities in float64, owner by owner, and the largest logit."""
    owners, group, dim = query.shape
    keys, values, bias, owner = (pages[name] for name in ("keys", "values", "bias", "owner"))
    out = torch.zeros(owners, group, dim, dtype=torch.float64)
    probabilities = torch.zeros(len(owner), group, keys.shape[1], dtype=torch.float64)
    largest = 0.0
    for index in range(owners):
        mine = owner == index
        flat_keys, flat_values = keys[mine].double().flatten(0, 1), values[mine].double().flatten(0, 1)
        logits = cap(query[index].double() @ flat_keys.T * scaling, softcap)
        largest = max(largest, float(logits.abs().max()) if logits.numel() else 0.0)
        weights = softmax_with_sink(logits + bias[mine].flatten(), None if sinks is None else sinks[index])
        out[index] = weights @ flat_values
        probabilities[mine] = weights.view(group, -1, keys.shape[1]).transpose(0, 1)
    return out, probabilities, largest


@given(
    seed=SEEDS,
    owners=st.integers(1, 5),
    pages=st.integers(0, 12),
    slots=st.sampled_from([1, 4, 16]),
    group=st.integers(1, 16),
    dim=HEAD_DIMS,
    dtype=DTYPES,
    softcap=SOFTCAPS,
    with_sinks=st.booleans(),
    strength=st.sampled_from([1.0, 4.0]),
)
def test_paged_attention(
    seed: int,
    owners: int,
    pages: int,
    slots: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    softcap: float | None,
    with_sinks: bool,
    strength: float,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    table = draw_pages(rng, owners, pages, slots, dim, dtype)
    query = (torch.randn(owners, group, dim, generator=rng) * strength).to(dtype)
    sinks = torch.randn(owners, group, generator=rng) * 2 if with_sinks else None
    copies = {name: tensor.clone() for name, tensor in table.items()}
    scaling = dim**-0.5
    arguments = (query, table["keys"], table["values"], table["bias"], table["owner"], scaling, softcap, sinks)
    out, _, probabilities = paged_attention(*arguments, True)
    expected, expected_probabilities, largest = paged_oracle(query, table, scaling, softcap, sinks)
    assert out.dtype == dtype
    assert probabilities.dtype == torch.float32
    assert probabilities.shape == (pages, group, slots)
    owned = table["owner"] < owners
    top = float(table["values"][owned].abs().max()) if bool(owned.any()) else 0.0
    assert_near(out, expected, dtype, largest, top)
    assert_near(probabilities[owned], expected_probabilities[owned], dtype, largest, 1.0)
    for name, tensor in table.items():
        assert torch.equal(tensor, copies[name])
    if sinks is None:
        for index in range(owners):
            mine = table["owner"] == index
            alive = bool((table["bias"][mine] > float("-inf")).any())
            total = probabilities[mine].sum((0, 2))
            torch.testing.assert_close(total, torch.full((group,), float(alive)), rtol=0.0, atol=1e-5)
    again, _, nothing = paged_attention(*arguments, False)
    assert torch.equal(again, out)
    assert nothing.shape == (0,)


@given(seed=SEEDS, group=st.integers(1, 4))
def test_the_order_of_pages_and_strangers_pages_do_not_matter(seed: int, group: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    table = draw_pages(rng, 3, 10, 4, 16, torch.float32)
    query = torch.randn(3, group, 16, generator=rng)
    order = torch.randperm(10, generator=rng)
    before, _, _ = paged_attention(query, *table.values(), 0.25)
    after, _, _ = paged_attention(query, *(tensor[order] for tensor in table.values()), 0.25)
    torch.testing.assert_close(after, before, rtol=0.0, atol=1e-5)
    others = table["owner"] != 0
    table["keys"][others], table["values"][others] = 1e4, -1e4
    alone, _, _ = paged_attention(query, *table.values(), 0.25)
    torch.testing.assert_close(alone[0], before[0], rtol=0.0, atol=1e-5)


def test_huge_logits_stay_finite_and_pick_the_largest() -> None:
    keys = torch.tensor([[[3e4], [2e4]], [[1e4], [-3e4]]])
    values = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    bias, owner = torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)
    query = torch.tensor([[[1e4], [-1e4]]])
    out, lse, probabilities = paged_attention(query, keys, values, bias, owner, 1.0, None, None, True)
    assert out.tolist() == [[[1.0], [4.0]]]
    assert probabilities.tolist() == [[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]]
    assert lse.tolist() == [[3e8, 3e8]]


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


@given(seed=SEEDS, parts=st.integers(1, 4), size=st.integers(0, 5), offset=st.sampled_from([0.0, 80.0, -80.0]))
def test_merge_states_is_one_softmax(seed: int, parts: int, size: int, offset: float) -> None:
    """Also where parts are empty, and where sums of exponentials would overflow."""
    rng, dim = torch.Generator().manual_seed(seed), 8
    query = torch.randn(1, 3, dim, generator=rng)
    keys, values = torch.randn(2, parts, size, dim, generator=rng)
    bias = torch.full((size,), offset)
    states = [attend_slots(query, keys[part][None], values[part][None], bias[None], 1.0) for part in range(parts)]
    states.append((torch.zeros(1, 3, dim), torch.full((1, 3), float("-inf"))))
    out, lse = merge_states([state[0] for state in states], [state[1] for state in states])
    logits = query[0].double() @ keys.flatten(0, 1).double().T + offset
    expected = softmax_with_sink(logits, None) @ values.flatten(0, 1).double()
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse[0].double(), torch.logsumexp(logits, -1), rtol=1e-5, atol=1e-4)


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


def op_calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every custom operator with arguments of each kind it takes."""
    rng = torch.Generator().manual_seed(0)
    table = tuple(draw_pages(rng, 2, 5, 4, 8, torch.float32).values())
    query, sinks = torch.randn(2, 3, 8, generator=rng), torch.zeros(2, 3)
    keys, values = torch.randn(2, 2, 6, 8, generator=rng)
    return {
        "paged": (paged_attention, (query, *table, 0.5, None, None, False)),
        "paged_probabilities": (paged_attention, (query, *table, 0.5, 4.0, sinks, True)),
        "attend_slots": (attend_slots, (query, keys, values, torch.zeros(2, 6), 0.5, None)),
        "attend_slots_softcap": (attend_slots, (query.bfloat16(), keys, values, torch.zeros(2, 6), 0.5, 4.0)),
    }


@pytest.mark.parametrize("label", list(op_calls()))
def test_operators_keep_torchs_rules(label: str) -> None:
    """Schema (what is mutated), autograd registration, and the fake: shapes, dtypes and strides as the real one's."""
    operator, arguments = op_calls()[label]
    outcome = torch.library.opcheck(operator, arguments)
    assert set(outcome.values()) == {"SUCCESS"}
    assert len(outcome) == 4


@pytest.mark.parametrize("with_probabilities", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_no_reference_waits_for_the_device(with_probabilities: bool, softcap: float | None, with_sinks: bool) -> None:
    """FakeTensorMode knows no values: a read-back or a shape that depends on data raises."""
    with FakeTensorMode():
        query, keys = torch.empty(4, 3, 8), torch.empty(6, 16, 8)
        bias, owner = torch.empty(6, 16), torch.empty(6, dtype=torch.int64)
        sinks = torch.empty(4, 3) if with_sinks else None
        paged = reference.paged_attention(query, keys, keys, bias, owner, 0.5, softcap, sinks, with_probabilities)
        assert paged[0].shape == (4, 3, 8)
        assert paged[1].shape == (4, 3)
        assert paged[2].shape == ((6, 3, 16) if with_probabilities else (0,))
        out, lse = reference.attend_slots(query, keys[:4], keys[:4], bias[:4], 0.5, softcap)
        merged = merge_states([out, out], [lse, lse])
        assert merged[0].shape == (4, 3, 8)
        assert merged[1].shape == (4, 3)
        rows = torch.empty(4, 3, 5, 8)
        assert causal_attention(rows, keys[:4], keys[:4], 0.5, 7, softcap, sinks).shape == (4, 3, 5, 8)
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
