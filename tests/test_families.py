"""Every tested family: with an unlimited budget the tokens are those of stock `generate`; with a budget it is met."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hardkv import HardKVCache, HardKVRuntime
from hardkv.errors import UnsupportedModelError
from hardkv.model_adapter import LoadedModel, read_geometry
from tests.tiny_models import FAMILIES, hf_generate, loaded, tiny_model

KEEP_ALL: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "cache": {"sinks": 2, "local_window": 8, "query_rows": 16, "interval": 16, "page_slots": 8},
    "compression": False,
}
NEW_TOKENS = 64


def stock(model: Any, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def prompt(seed: int, tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (tokens,), generator=generator).tolist()


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> LoadedModel:
    return loaded(str(request.param))


def test_unlimited_budget_gives_the_tokens_of_stock_generate(family: LoadedModel) -> None:
    runtime = HardKVRuntime.from_config(KEEP_ALL, loaded=family)
    prompts = [prompt(seed, tokens) for seed, tokens in ((1, 50), (2, 7), (3, 90))]
    together = runtime.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    for ids, generation in zip(prompts, together, strict=True):
        expected = stock(family.model, ids)
        shown = generation.token_ids
        agreeing = next((i for i, (a, b) in enumerate(zip(shown, expected, strict=True)) if a != b), NEW_TOKENS)
        # stock generate bars the end token until `min_new_tokens`; ours may choose it
        assert agreeing == NEW_TOKENS or shown[agreeing] == 257


def test_a_budget_nobody_reaches_changes_nothing(family: LoadedModel) -> None:
    config = {**KEEP_ALL, "compression": True, "budget": {"name": "threshold", "mean_tokens": 1000}}
    ids = prompt(4, 60)
    full = HardKVRuntime.from_config(KEEP_ALL, loaded=family).generate(ids, max_new_tokens=48, ignore_eos=True)
    same = HardKVRuntime.from_config(config, loaded=family).generate(ids, max_new_tokens=48, ignore_eos=True)
    assert same.token_ids == full.token_ids
    assert same.stats.compressions == 0


def test_chunked_prefill_equals_one_piece(family: LoadedModel) -> None:
    ids = prompt(5, 100)
    whole = HardKVRuntime.from_config(KEEP_ALL, loaded=family)
    chunked = HardKVRuntime.from_config(
        {**KEEP_ALL, "cache": {**KEEP_ALL["cache"], "prefill_chunk_tokens": 32}}, loaded=family
    )
    expected = whole.teacher_force([ids], [[1, 2, 3]])[0]
    torch.testing.assert_close(chunked.teacher_force([ids], [[1, 2, 3]])[0], expected, atol=2e-4, rtol=1e-4)


def test_a_budget_is_met_and_only_full_attention_layers_are_compressed(family: LoadedModel) -> None:
    config = {**KEEP_ALL, "compression": True, "budget": {"name": "threshold", "mean_tokens": 40}}
    runtime = HardKVRuntime.from_config(config, loaded=family)
    generation = runtime.generate(prompt(6, 150), max_new_tokens=70, ignore_eos=True)
    assert generation.stats.compressions >= 4
    for mean in generation.stats.mean_tokens_after_compression:
        assert mean == pytest.approx(40, rel=0.02)
    for layer, window in enumerate(runtime.geometry.windows):
        if window is not None:
            assert generation.stats.tokens_kept[layer] == [window, window]


def test_the_hugging_face_loop_gives_the_runtime_s_tokens(family: LoadedModel) -> None:
    config = {**KEEP_ALL, "compression": True, "budget": {"name": "threshold", "mean_tokens": 40}}
    ids = prompt(7, 120)
    ours = HardKVRuntime.from_config(config, loaded=family).generate(ids, max_new_tokens=40, ignore_eos=True)
    row = torch.tensor([ids])
    out = hf_generate(
        family.model,
        row,
        attention_mask=torch.ones_like(row),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        past_key_values=HardKVCache(family.model, config),
    )
    assert out[0, len(ids) :].tolist() == ours.token_ids


def test_left_padded_rows_equal_single_rows(family: LoadedModel) -> None:
    prompts = [prompt(8, 30), prompt(9, 75)]
    width = max(map(len, prompts))
    rows = torch.tensor([[258] * (width - len(ids)) + ids for ids in prompts])
    mask = (rows != 258).long()
    config = {**KEEP_ALL, "compression": True, "budget": {"name": "threshold", "mean_tokens": 36}}
    out = hf_generate(
        family.model,
        rows,
        attention_mask=mask,
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        past_key_values=HardKVCache(family.model, config),
    )
    runtime = HardKVRuntime.from_config(config, loaded=family)
    for row, ids in zip(out, prompts, strict=True):
        alone = runtime.generate(ids, max_new_tokens=24, ignore_eos=True)
        assert row[width:].tolist() == alone.token_ids


def test_stock_generate_is_untouched_by_ours(family: LoadedModel) -> None:
    ids = prompt(10, 40)
    before = stock(family.model, ids, 16)
    row = torch.tensor([ids])
    hf_generate(
        family.model,
        row,
        attention_mask=torch.ones_like(row),
        max_new_tokens=4,
        past_key_values=HardKVCache(family.model, KEEP_ALL),
    )
    assert stock(family.model, ids, 16) == before
    assert family.model.config._attn_implementation != "hardkv"


def test_geometry_of_a_hybrid_model() -> None:
    geometry = read_geometry(tiny_model("gemma3_text"))
    assert geometry.windows == (24, None, 24, None)
    assert geometry.full_layers == (1, 3)
    assert (geometry.heads, geometry.group, geometry.head_dim) == (2, 2, 16)


def test_multi_head_latent_attention_is_refused_by_name() -> None:
    config = AutoConfig.for_model(
        "deepseek_v3",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    )
    with pytest.raises(UnsupportedModelError, match=r"'deepseek_v3'.*multi-head latent attention"):
        read_geometry(AutoModelForCausalLM.from_config(config))


def test_a_model_without_the_standard_attention_call_is_refused_by_name() -> None:
    config = AutoConfig.for_model("mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(UnsupportedModelError, match="'mamba'"):
        read_geometry(AutoModelForCausalLM.from_config(config))


def test_a_model_of_sliding_layers_only_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="only sliding-window layers"):
        read_geometry(tiny_model("mistral", sliding_window=16))
