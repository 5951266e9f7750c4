"""Scorer `kvzap`: a small trained network says at once how much a token will matter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hardkv.errors import ConfigError
from hardkv.interfaces import EntryScorer, Options, Space
from hardkv.types import EnteringTokens, ModelGeometry

# exp of scores outside of this would leave float32.
_MOST_LOG_SCORE = 80.0
_NAME = re.compile(r"layers\.(\d+)\.(?:(\d+)\.)?(weight|bias)")


class KVzap(EntryScorer):
    """A surrogate network for each layer maps a token's hidden state to one score per KV head, when the token enters.

    `s = exp(f_l(h))`, h `[M]` the attention layer's input, `f_l` linear (`W h + b`) or two layers with a GELU between
    (`W2 gelu(W1 h + b1) + b2`): whatever the file holds. It is trained on the logarithm of an attention weight, so
    that its exponential compares over heads as it is and needs no calibration, no query and no second look.

    The file is a safetensors file, or a folder with `model.safetensors`, that names `layers.<i>.weight [H, M]` and
    `.bias [H]`, or `layers.<i>.0.*` and `layers.<i>.2.*` for two layers; `<i>` counts the model's layers.

    Source: KVzap (arXiv 2601.07891, section 3), whose fixed threshold is our budget's.
    """

    name: ClassVar[str] = "kvzap"
    space: ClassVar[Space] = "probability"

    class Config(Options):
        """Options of `kvzap`."""

        weights: str = Field(
            min_length=1,
            description="File or folder with the networks, trained for this model; relative to the current folder.",
        )

    config: Config

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._networks = read_networks(Path(self.config.weights).expanduser())

    @property
    def needs_hidden_states(self) -> bool:
        """Always true: hidden states are all it reads."""
        return True

    def check_model(self, geometry: ModelGeometry) -> None:
        for layer in geometry.full_layers:
            network = self._networks.get(layer)
            if network is None:
                raise ConfigError(
                    f"scorer 'kvzap': {self.config.weights} has no layers.{layer}.weight; the model has "
                    f"{len(geometry.windows)} layers. Give weights trained for this model [scorer.weights]"
                )
            shape = (network[-1][0].shape[0], network[0][0].shape[1])
            if shape != (geometry.heads, geometry.hidden_size):
                raise ConfigError(
                    f"scorer 'kvzap': layer {layer} of {self.config.weights} maps {shape[1]} numbers to {shape[0]}; "
                    f"the model has hidden size {geometry.hidden_size} and {geometry.heads} KV heads. Give weights "
                    "trained for this model [scorer.weights]"
                )
        self._networks = {
            layer: [(weight.to(geometry.device), bias.to(geometry.device)) for weight, bias in network]
            for layer, network in self._networks.items()
        }

    def enter(self, tokens: EnteringTokens) -> Tensor:
        """Give scores `[R, H, N]`."""
        assert tokens.hidden_states is not None
        content = tokens.hidden_states.float()  # [R, N, M]
        for index, (weight, bias) in enumerate(self._networks[tokens.layer]):
            if index:
                content = torch.nn.functional.gelu(content)
            content = torch.nn.functional.linear(content, weight, bias)
        return content.clamp(-_MOST_LOG_SCORE, _MOST_LOG_SCORE).exp().transpose(1, 2)


Network = list[tuple[Tensor, Tensor]]
"""Weights `[out, in]` and biases `[out]` of one or two linear layers, float32."""


def read_networks(path: Path) -> dict[int, Network]:
    """Read the networks by model layer.

    Raises:
        ConfigError: no such file, or one with other contents.
    """
    file = path / "model.safetensors" if path.is_dir() else path
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"scorer 'kvzap': cannot read {file}: {error} [scorer.weights]") from None
    found: dict[int, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or tensor.ndim != (2 if match[3] == "weight" else 1):
            raise ConfigError(
                f"scorer 'kvzap': {file} holds '{name}' of shape {tuple(tensor.shape)}; expected layers.<i>.weight "
                "[H, M] and layers.<i>.bias [H], or layers.<i>.0.* and layers.<i>.2.* [scorer.weights]"
            )
        found.setdefault(int(match[1]), {}).setdefault(int(match[2] or 0), {})[match[3]] = tensor.float()
    return {layer: _network(file, layer, parts) for layer, parts in found.items()}


def _network(file: Path, layer: int, parts: dict[int, dict[str, Tensor]]) -> Network:
    stages = [parts[stage] for stage in sorted(parts)]
    if len(stages) > 2 or any("weight" not in stage for stage in stages):
        raise ConfigError(f"scorer 'kvzap': {file}: layer {layer} is neither linear nor two layers [scorer.weights]")
    return [(stage["weight"], stage.get("bias", torch.zeros(len(stage["weight"])))) for stage in stages]
