"""Lets an object of ours stand where a Hugging Face generation loop expects its cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from hardkv.model_adapter.attention import NAME, SERVER_ARGUMENT, AttentionServer, serving

_CACHE_ARGUMENTS = ("cache", "past_key_values")
_BRIDGED = "_hardkv_bridge"


class _Layer(CacheLayerMixin):
    """A layer that stores nothing: K and V pass through to the attention call, where they are taken in."""

    is_sliding = False

    def __init__(self, owner: BridgeCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated there
        self.owner = owner
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        return None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.owner.seen_tokens + int(query_length), 0

    def get_seq_length(self) -> int:
        return self.owner.seen_tokens

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        return None


class BridgeCache(Cache):
    """A `transformers.Cache` whose content lives elsewhere."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_Layer(self) for _ in range(layers)])

    @property
    @abstractmethod
    def seen_tokens(self) -> int:
        """Tokens in each row so far, padding included."""

    @property
    def telling(self) -> Sequence[nn.Module]:
        """Attention modules whose calls carry their input as well."""
        return ()

    @abstractmethod
    def begin_forward(self, token_ids: Tensor, attention_mask: Tensor | None) -> AttentionServer:
        """Prepare for one forward pass of the model over `token_ids [B, S]`."""

    @abstractmethod
    def end_forward(self) -> None:
        """Finish the pass."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("HardKVCache does not support beam search; use num_beams=1")

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(
            "HardKVCache cannot be cropped: dropped tokens are gone (assisted decoding needs crop)"
        )


def bridge(model: PreTrainedModel) -> None:
    """Make the model's forward pass recognise a `BridgeCache`; passes with any other cache are left alone."""
    if getattr(model, _BRIDGED, False):
        return
    blocks: list[Any] = []

    def before(module: Any, positional: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        cache = next((arguments[name] for name in _CACHE_ARGUMENTS if arguments.get(name) is not None), None)
        if not isinstance(cache, BridgeCache):
            return None
        token_ids = arguments.get("input_ids")
        if token_ids is None:
            token_ids = positional[0]
        mask = arguments.get("attention_mask")
        server = cache.begin_forward(token_ids, mask if isinstance(mask, Tensor) and mask.ndim == 2 else None)
        block = serving(model, cache.telling)
        block.__enter__()
        blocks.append((block, cache))
        return positional, {**arguments, SERVER_ARGUMENT: server}

    def after(module: Any, positional: tuple[Any, ...], output: Any) -> None:
        if blocks and model.config.get_text_config()._attn_implementation == NAME:
            block, cache = blocks.pop()
            block.__exit__(None, None, None)
            if output is not None:
                cache.end_forward()

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, always_call=True)
    setattr(model, _BRIDGED, True)
