"""Tiny random decoders of every tested family, and a tiny byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hardkv.model_adapter import LoadedModel

VOCABULARY = 259
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
_SLIDING = {"sliding_window": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "gemma2": {**_SLIDING, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        **_SLIDING,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 16,
    },
    "phi3": {"sliding_window": None},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False},
    "gpt_oss": {
        **_SLIDING,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "olmo2": {},
}


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of a family, float32, with weights large enough that attention is not flat."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_SHAPE, **FAMILIES.get(family, {}), **overrides})
    # Eager, the oracle: transformers 5.17 drops the softcap in its sdpa form without a word.
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and "embed" not in name and "lm_head" not in name:
                weight.normal_(0.0, 0.25)
            if "sinks" in name:
                weight.normal_(0.0, 1.0)
    model.eval()
    model.generation_config.eos_token_id = 257
    model.generation_config.pad_token_id = 258
    assert isinstance(model, PreTrainedModel)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


def loaded(family: str = "llama", **overrides: Any) -> LoadedModel:
    """A tiny model with its tokenizer."""
    return LoadedModel(tiny_model(family, **overrides), tiny_tokenizer())


def save_tiny(folder: Path, family: str = "llama", **overrides: Any) -> str:
    """Save a tiny model with its tokenizer, for a `model.id`; gives the folder."""
    tiny: Any = loaded(family, **overrides)
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return str(folder)


def hf_generate(model: Any, *inputs: Any, **arguments: Any) -> Any:
    """`model.generate`, whose annotations hide what it is."""
    return model.generate(*inputs, **arguments)
