"""A model small enough for a test whose heads behave like those of a real one: sinks, a previous token, copying."""

from __future__ import annotations

import math
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from hardkv.model_adapter import LoadedModel

BEGIN, END, PAD, VOCABULARY = 256, 257, 258, 259
HEADS, GROUP, HEAD_DIM, LAYERS = 2, 2, 16, 3
# The residual stream: a token's code, the code of the token before, what to say next, a mark of the first token, one
# constant. Each code is 16 numbers wide.
CODE, BEFORE, NEXT, FIRST, CONSTANT, WIDTH = slice(0, 16), slice(16, 32), slice(32, 48), 48, 49, 64
# Rotary pairs are (i, i + 8); from the fourth on they hardly turn within thousands of tokens at this base.
ROPE_THETA = 1e10
STILL = [3, 4, 5, 6, 11, 12, 13, 14]  # places of a head for half a code
SINK = 7  # place of the mark, in the stillest pair
# What the norm before attention multiplies by in layer 0, and later, where the code before has come in.
GAIN = (math.sqrt(WIDTH / 3), math.sqrt(WIDTH / 5))
COPIED = 0.3  # length of what one layer copies, in codes: small, so that it hardly moves the next norm


def tiny_sink_model(seed: int = 0) -> LoadedModel:
    """A three-layer Llama of float32 with attention sinks, and a tokenizer of bytes that begins with `<s>`.

    Built, not trained: equal seeds give equal weights. Layer 0 fetches the previous token's code, with half of its
    heads. The others copy: they look for earlier places where the current token came before, and say what followed.
    A head that finds none attends the first token, whose value is zero, so that it adds nothing; without that token
    its attention falls on the likeliest wrong places, and what they say is believed. Prompts must begin with `<s>`,
    as those that the tokenizer makes.
    """
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS * GROUP,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PAD,
        tie_word_embeddings=False,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 if parameter.ndim == 1 else 0.0)  # norms scale by 1, all else starts at nothing
        codes = _codes(rng)
        _embed(model, codes, rng)
        _look_back(model.model.layers[0].self_attn)
        for layer, match_logit in zip(model.model.layers[1:], (40.0, 30.0), strict=True):
            _copy(layer.self_attn, match_logit)
    model.eval()
    return LoadedModel(model, _tokenizer())


def _codes(rng: torch.Generator) -> Tensor:
    """A code `[V, 16]` for every token, each half of unit length; none for the first token.

    Halves repel each other, so that no two tokens are alike.
    """
    halves = torch.nn.functional.normalize(torch.randn(2, VOCABULARY, 8, generator=rng), dim=-1)
    for _ in range(100):
        weights = torch.softmax(12.0 * halves @ halves.mT - 100.0 * torch.eye(VOCABULARY), -1)
        halves = torch.nn.functional.normalize(halves - 0.1 * weights @ halves, dim=-1)
    codes = halves.transpose(0, 1).flatten(1)
    codes[BEGIN] = 0.0
    return codes


def _embed(model: Any, codes: Tensor, rng: torch.Generator) -> None:
    """Tokens in, codes out: what the copying heads say, and a mild preference of each token for some others."""
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding[:, CODE] = codes
    embedding[:, CONSTANT] = 1.0
    embedding[BEGIN, FIRST] = math.sqrt(2.0)  # as long as the others, after the norm
    head[:, NEXT] = codes * 3.0
    head[:, CODE] = torch.randn(VOCABULARY, 16, generator=rng) * 0.3
    head[BEGIN:] = 0.0
    head[BEGIN:, CONSTANT] = -8.0


def _look_back(attention: Any) -> None:
    """Head 0 attends the token before; head 1 the first token alone, and says the mean of what it sees."""
    query, key = attention.q_proj.weight, attention.k_proj.weight
    value, out = attention.v_proj.weight, attention.o_proj.weight
    for pair, weight in ((0, 6.0), (1, 20.0), (2, 20.0)):
        # A query turned back by one position meets the key of the token before.
        angle = ROPE_THETA ** (-pair / 8)
        key[pair, CONSTANT] = 1.0
        for group in range(GROUP):
            query[group * HEAD_DIM + pair, CONSTANT] = math.cos(angle) * weight
            query[group * HEAD_DIM + pair + 8, CONSTANT] = -math.sin(angle) * weight
    key[HEAD_DIM + SINK, FIRST] = 1.0
    for group in range(GROUP):
        query[(GROUP + group) * HEAD_DIM + SINK, CONSTANT] = 2.0
    for place in range(HEAD_DIM):
        value[place, CODE.start + place] = value[HEAD_DIM + place, CODE.start + place] = 1.0
        for group in range(GROUP):
            out[BEFORE.start + place, group * HEAD_DIM + place] = 1.0 / (GROUP * GAIN[0])
            out[NEXT.start + place, (GROUP + group) * HEAD_DIM + place] = 1.0 / (GROUP * GAIN[0])


def _copy(attention: Any, match_logit: float) -> None:
    """Each KV head compares half of the current code with half of each place's code before; on a match it copies."""
    query, key = attention.q_proj.weight, attention.k_proj.weight
    value, out = attention.v_proj.weight, attention.o_proj.weight
    to_query = match_logit * math.sqrt(HEAD_DIM) / GAIN[1]
    for head in range(HEADS):
        key[head * HEAD_DIM + SINK, FIRST] = 1.0 / (math.sqrt(2.0) * GAIN[0])
        for index, place in enumerate(STILL):
            key[head * HEAD_DIM + place, BEFORE.start + head * 8 + index] = 1.0 / GAIN[1]
        for place in range(HEAD_DIM):
            value[head * HEAD_DIM + place, CODE.start + place] = 1.0
        for group in range(GROUP):
            row = (head * GROUP + group) * HEAD_DIM
            # The first token's logit lies between that of a match and that of the nearest other code.
            query[row + SINK, CONSTANT] = to_query * (0.82 - 0.03 * group)
            for index, place in enumerate(STILL):
                query[row + place, CODE.start + head * 8 + index] = to_query
            for place in range(HEAD_DIM):
                out[NEXT.start + place, row + place] = COPIED / (HEADS * GROUP * GAIN[1])


def _tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, `<s>` before the first."""
    symbols = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=symbols, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>", "<pad>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left"
    )
