"""Runs a causal language model: whole prompts layer by layer in chunks, then one token per sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hardkv.model_adapter.attention import SERVER_ARGUMENT, AttentionServer, serving


class Decoder:
    """A model's forward pass with an attention server in place of its cache.

    `telling`: attention modules whose calls carry their input as well.
    """

    def __init__(self, model: PreTrainedModel, telling: Sequence[nn.Module] = ()) -> None:
        self.model, self.telling = model, telling

    @property
    def device(self) -> torch.device:
        return self.model.device

    def prefill(
        self, token_ids: Tensor, server: AttentionServer, chunk_tokens: int, progress: Callable[[int, int], None] | None
    ) -> Tensor:
        """Run one prompt `[N]` from position 0; gives the logits after its last token `[1, vocabulary]` float32.

        Each layer sees the prompt in chunks before the next layer starts, so that activations are bounded by the chunk
        and only one layer's K and V are whole at a time. `progress(done, total)` counts chunks over all layers.
        """
        tokens = token_ids.shape[0]
        positions = torch.arange(tokens, device=self.device)[None]
        with chunked_layers(self._layers(), tokens, chunk_tokens, progress):
            return self._forward(token_ids[None].to(self.device), positions, server)

    def decode(self, token_ids: Tensor, positions: Tensor, server: AttentionServer) -> Tensor:
        """Run one token per sequence, `token_ids, positions [B]`; gives logits `[B, vocabulary]` float32."""
        return self._forward(token_ids[:, None], positions[:, None], server)

    def _forward(self, token_ids: Tensor, positions: Tensor, server: AttentionServer) -> Tensor:
        with serving(self.model, self.telling), torch.inference_mode():
            output = self.model(
                input_ids=token_ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=1,
                **{SERVER_ARGUMENT: server},
            )
        logits: Tensor = output.logits
        return logits[:, -1].float()

    def _layers(self) -> nn.ModuleList:
        layers = self.model.get_decoder().layers
        assert isinstance(layers, nn.ModuleList)
        return layers


@contextmanager
def chunked_layers(
    layers: nn.ModuleList, tokens: int, chunk_tokens: int, progress: Callable[[int, int], None] | None
) -> Iterator[None]:
    """Within the block every layer runs over its input in chunks along the sequence axis.

    Only the instances' `forward` is wrapped, and given back at the end.
    """
    total = len(layers) * -(-tokens // chunk_tokens)
    done = 0

    def chunk(layer: nn.Module) -> Callable[..., Any]:
        whole = layer.forward

        def forward(hidden_states: Tensor, *positional: Any, **arguments: Any) -> Any:
            nonlocal done
            parts = []
            for first in range(0, tokens, chunk_tokens):
                cut = slice(first, first + chunk_tokens)
                parts.append(
                    whole(
                        hidden_states[:, cut],
                        *(_cut(value, tokens, cut) for value in positional),
                        **{name: _cut(value, tokens, cut) for name, value in arguments.items()},
                    )
                )
                done += 1
                if progress is not None:
                    progress(done, total)
            if len(parts) == 1:
                return parts[0]
            if isinstance(parts[0], tuple):
                return (torch.cat([part[0] for part in parts], 1), *parts[0][1:])
            return torch.cat(parts, 1)

        return forward

    for layer in layers:
        layer.forward = chunk(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _cut(value: Any, tokens: int, cut: slice) -> Any:
    """The chunk's share of an argument: tensors with the sequence on axis 1 are cut, all else is passed on."""
    if isinstance(value, Tensor):
        return value[:, cut] if value.ndim >= 2 and value.shape[1] == tokens else value
    if isinstance(value, tuple):
        return tuple(_cut(part, tokens, cut) for part in value)
    return value
