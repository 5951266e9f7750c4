"""Routes a model's attention calls to whoever serves them, through the public attention interface of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from hardkv.types import AttentionCall

NAME = "hardkv"
SERVER_ARGUMENT = "hardkv_server"


class AttentionServer(Protocol):
    """Answers one layer's attention."""

    def attend(self, call: AttentionCall, sliding_window: int | None) -> Tensor:
        """Give the attention output `[B, S, H*G, D]`."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[Tensor, None]:
    server: AttentionServer = arguments[SERVER_ARGUMENT]
    layer = module.layer_idx
    assert isinstance(layer, int)
    call = AttentionCall(
        layer=layer,
        query=query,
        keys=key,
        values=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=arguments.get("softcap"),
        sink_logits=arguments.get("s_aux"),
    )
    return server.attend(call, arguments.get("sliding_window")), None


@contextmanager
def serving(model: PreTrainedModel) -> Iterator[None]:
    """Within the block the model calls its attention through hardkv; afterwards it is as it was.

    No mask function is registered for the name, so models build no mask: positions and padding are the server's.
    """
    AttentionInterface.register(NAME, _attention)
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
