"""Reads a model's attention geometry by watching one forward pass, and refuses what cannot be served."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hardkv.errors import UnsupportedModelError
from hardkv.model_adapter.attention import SERVER_ARGUMENT, serving
from hardkv.model_adapter.rotary import PROBED_POSITIONS, read_frequencies
from hardkv.types import AttentionCall, ModelGeometry

_MOST_CUDA_GROUP = 16
_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}


class _Watcher:
    """Records every attention call of one forward pass."""

    def __init__(self) -> None:
        self.calls: list[tuple[AttentionCall, int | None]] = []

    def attend(self, call: AttentionCall, sliding_window: int | None) -> Tensor:
        self.calls.append((call, sliding_window))
        return torch.zeros_like(call.query).transpose(1, 2)


def read_geometry(model: PreTrainedModel) -> ModelGeometry:
    """Find layers, heads, windows and sizes of a decoder.

    Raises:
        UnsupportedModelError: naming the model type and the reason.
    """
    config = model.config.get_text_config()
    kind = str(getattr(config, "model_type", type(model).__name__))
    _refuse_by_config(kind, config, model)
    watcher = _Watcher()
    embeddings: Any = model.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    probe = torch.full((1, 2), vocabulary // 2, dtype=torch.long, device=model.device)
    positions = torch.tensor([PROBED_POSITIONS], device=model.device)
    try:
        with serving(model), torch.no_grad():
            model(input_ids=probe, position_ids=positions, use_cache=False, **{SERVER_ARGUMENT: watcher})
    except (TypeError, KeyError, AttributeError, RuntimeError, ValueError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"model type '{kind}' cannot be served: a forward pass through the standard attention call failed "
            f"({type(error).__name__}: {error})"
        ) from error
    return _geometry_from_calls(kind, config, model, watcher.calls)


def _refuse_by_config(kind: str, config: object, model: PreTrainedModel) -> None:
    def refuse(reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"model type '{kind}' cannot be served: {reason}. Served: decoders whose layers use the standard attention "
            "call (llama, qwen2, qwen3, mistral, gemma2, gemma3_text, phi3, smollm3, gpt_oss, olmo2 are tested)"
        )

    if getattr(config, "is_encoder_decoder", False):
        raise refuse("it is an encoder-decoder")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise refuse("it uses multi-head latent attention (MLA), which expands K and V after the cache")
    other = set(getattr(config, "layer_types", None) or []) - _SERVED_LAYER_TYPES
    if other:
        raise refuse(f"it has layers of type {', '.join(sorted(other))}")
    if not getattr(model, "_supports_attention_backend", False):
        raise refuse("it does not use the standard attention call of transformers")


def _geometry_from_calls(
    kind: str, config: object, model: PreTrainedModel, calls: list[tuple[AttentionCall, int | None]]
) -> ModelGeometry:
    layers = int(getattr(config, "num_hidden_layers", len(calls)))
    if [call.layer for call, _ in calls] != list(range(layers)):
        raise UnsupportedModelError(
            f"model type '{kind}' cannot be served: {len(calls)} of its {layers} layers used the standard "
            "attention call"
        )
    shapes = {(call.keys.shape[1], call.query.shape[1], call.keys.shape[3], call.values.shape[3]) for call, _ in calls}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"model type '{kind}' cannot be served: its layers differ in heads or head size {shapes}"
        )
    heads, query_heads, head_dim, value_dim = shapes.pop()
    if head_dim != value_dim or query_heads % heads:
        raise UnsupportedModelError(
            f"model type '{kind}' cannot be served: keys of size {head_dim} and values of size {value_dim} on {heads} "
            f"KV heads for {query_heads} query heads"
        )
    positions = int(getattr(config, "max_position_embeddings", 0) or 1 << 30)
    windows = tuple(window if window is not None and window < positions else None for _, window in calls)
    if all(window is not None for window in windows):
        raise UnsupportedModelError(
            f"model type '{kind}' has only sliding-window layers here: its cache is bounded already, there is nothing "
            "to compress"
        )
    call = calls[0][0]
    modules = tuple(call.module for call, _ in calls if call.module is not None)
    if call.keys.device.type == "cuda" and query_heads // heads > _MOST_CUDA_GROUP:
        raise UnsupportedModelError(
            f"model type '{kind}' cannot be served on CUDA: {query_heads // heads} query heads per KV head, the "
            f"kernels serve up to {_MOST_CUDA_GROUP}"
        )
    return ModelGeometry(
        windows=windows,
        heads=heads,
        group=query_heads // heads,
        head_dim=head_dim,
        dtype=call.keys.dtype,
        device=call.keys.device,
        max_positions=positions,
        hidden_size=int(getattr(config, "hidden_size", 0)),
        modules=modules,
        output_weights=tuple(_output_weight(module, query_heads * head_dim) for module in modules),
        frequencies=tuple(read_frequencies(model, call.query[0]) for call, _ in calls),
    )


def _output_weight(module: nn.Module, columns: int) -> Tensor | None:
    """The weight `[M, columns]` of an attention module's output projection; None where it is no plain one."""
    projection = getattr(module, "o_proj", None)
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[1] != columns:
        return None
    return weight.detach()
