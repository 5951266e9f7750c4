"""Routes a model's attention calls to whoever serves them, through the public attention interface of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from hardkv.types import AttentionCall

NAME = "hardkv"
SERVER_ARGUMENT = "hardkv_server"
HIDDEN_ARGUMENT = "hardkv_hidden_states"


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
    dropout: float = 0.0,  # before scaling, as in transformers' own: wrappers of kvpress pass it by place
    scaling: float | None = None,
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
        module=module,
        hidden_states=arguments.get(HIDDEN_ARGUMENT),
    )
    return server.attend(call, arguments.get("sliding_window")), None


@contextmanager
def serving(model: PreTrainedModel, telling: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Within the block the model calls its attention through hardkv; afterwards it is as it was.

    `telling`: attention modules whose calls carry their input, `hidden_states`, as well.
    No mask function is registered for the name, so models build no mask: positions and padding are the server's.
    """
    AttentionInterface.register(NAME, _attention)
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        with ExitStack() as hooks:
            for module in telling:
                handle = module.register_forward_pre_hook(_tell_hidden_states, with_kwargs=True)
                hooks.callback(handle.remove)
            yield
    finally:
        config._attn_implementation = before


def _tell_hidden_states(
    module: nn.Module, positional: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand a module's input on, through the arguments that reach its attention call."""
    hidden_states = positional[0] if positional else arguments["hidden_states"]
    return positional, {**arguments, HIDDEN_ARGUMENT: hidden_states}
