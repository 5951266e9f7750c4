"""Blocks of a decoder with fewer calls for the same sums, for decoding in bfloat16 on a CPU.

A step of one token per sequence spends more time on starting small operations than in them. A block is found by what it
is made of, and replaced only where both forms gave the same on a probe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hardkv.model_adapter.attention import HIDDEN_ARGUMENT, SERVER_ARGUMENT, AttentionServer, serving
from hardkv.model_adapter.packing import fits_in_memory, packed_linear
from hardkv.types import AttentionCall

logger = logging.getLogger(__name__)
_QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_PROBED_POSITIONS = (7, 1000)
_TOLERANCE = 2**-6
"""Share of the largest number by which two forms may differ: a few roundings to bfloat16."""


def fuse_blocks(model: PreTrainedModel) -> int:
    """Replace the forward pass of every block that has a fused form; gives how many were.

    Q, K and V come from one product, and so do gate and up; a rotation of Q and K takes four operations, an RMS norm
    three. As with packed weights, a later change to a parameter is not seen. Attention blocks are fused for hardkv's
    own steps of one token, all else goes through the forward pass they had.
    """
    modules = list(model.modules())
    attentions = [module for module in modules if _made_of(module, (*_QUERY_KEY_VALUE, "o_proj"))]
    feeds = [module for module in modules if _made_of(module, (*_GATE_UP, "down_proj"), "act_fn")]
    joined = [part for module in attentions for part in _parts(module, _QUERY_KEY_VALUE)]
    joined += [part for module in feeds for part in _parts(module, _GATE_UP)]
    if not fits_in_memory(joined):
        return 0
    found = _fuse_attentions(model, attentions) if attentions else 0
    with torch.inference_mode():
        found += sum(_fuse_feed(module) for module in feeds)
        found += sum(_fuse_norm(module) for module in modules)
    logger.debug("%d blocks are fused", found)
    return found


def _made_of(module: nn.Module, linears: tuple[str, ...], activation: str | None = None) -> bool:
    """Whether these are all the children of a module without parameters of its own."""
    children = dict(module.named_children())
    other = {name for name in children if name not in linears}
    plain = all(type(children.get(name)) is nn.Linear for name in linears)
    own = next(module.parameters(recurse=False), None) is None
    return plain and own and other <= {activation} and (activation is None or activation in other)


def _parts(module: nn.Module, names: tuple[str, ...]) -> list[nn.Linear]:
    parts = [getattr(module, name) for name in names]
    assert all(isinstance(part, nn.Linear) for part in parts)
    return parts


def _together(linears: list[nn.Linear]) -> Callable[[Tensor], Tensor] | None:
    """One product in place of several of the same input; their outputs end to end."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(linears)):
        return None
    weight = torch.cat([linear.weight.detach() for linear in linears])
    return packed_linear(weight, torch.cat([bias.detach() for bias in biases]) if biases else None)


def _agree(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    gap = (first.float() - second.float()).abs().max()
    return bool(gap <= _TOLERANCE * second.float().abs().max())


def _install(module: nn.Module, forward: Callable[..., Any]) -> None:
    setattr(module, "forward", forward)  # noqa: B010 (mypy refuses the plain assignment)


class _Recorder:
    """Keeps the attention calls of a pass, by layer, and answers each with its queries."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[AttentionCall, int | None]] = {}

    def attend(self, call: AttentionCall, sliding_window: int | None) -> Tensor:
        self.calls[call.layer] = call, sliding_window
        return call.query.transpose(1, 2).contiguous()


def _fuse_attentions(model: PreTrainedModel, modules: list[nn.Module]) -> int:
    """Fuse the attention modules whose fused form makes the same call and gives the same, on one token in two rows."""
    inputs: dict[nn.Module, dict[str, Any]] = {}
    outputs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, positional: tuple[Any, ...], arguments: dict[str, Any], output: Any) -> None:
        if not positional:
            inputs[module], outputs[module] = arguments, output[0]

    embeddings: Any = model.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    ids = torch.tensor([[vocabulary // 3], [vocabulary // 2]])
    recorder = _Recorder()
    hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in modules]
    try:
        with serving(model), torch.inference_mode():
            positions = torch.tensor(_PROBED_POSITIONS)[:, None]
            model(input_ids=ids, position_ids=positions, use_cache=False, **{SERVER_ARGUMENT: recorder})
            found = 0
            for module in modules:
                recorded = recorder.calls.get(getattr(module, "layer_idx", -1))
                if module in inputs and recorded is not None and recorded[0].module is module:
                    found += _fuse_attention(module, inputs[module], outputs[module], *recorded)
            return found
    except (TypeError, KeyError, AttributeError, RuntimeError, ValueError, NotImplementedError) as error:
        logger.info("attention is not fused: a forward pass through the standard attention call failed (%s)", error)
        return 0
    finally:
        for hook in hooks:
            hook.remove()


def _fuse_attention(
    module: nn.Module, arguments: Mapping[str, Any], output: Tensor, call: AttentionCall, window: int | None
) -> bool:
    turning = arguments.get("position_embeddings")
    project = _together(_parts(module, _QUERY_KEY_VALUE))
    head_dim = call.query.shape[-1]
    if turning is None or project is None or any(part.shape[-1] != head_dim for part in turning):
        return False
    fused = _attention_form(module, project, call, window)
    again = _Recorder()
    got, _ = fused(**{**arguments, SERVER_ARGUMENT: again})
    other = again.calls[call.layer][0]
    pairs = ((other.query, call.query), (other.keys, call.keys), (other.values, call.values), (got, output))
    if not all(_agree(*pair) for pair in pairs):
        return False
    _install(module, fused)
    return True


def _attention_form(
    module: nn.Module, project: Callable[[Tensor], Tensor], call: AttentionCall, window: int | None
) -> Callable[..., tuple[Tensor, None]]:
    """The fused forward pass of an attention module that makes calls like `call`."""
    whole, give = module.forward, module.get_submodule("o_proj")
    layer, scaling, softcap, sinks = call.layer, call.scaling, call.softcap, call.sink_logits
    query_heads, half = call.query.shape[1], call.query.shape[3] // 2
    turned = query_heads + call.keys.shape[1]
    sign = torch.ones(2 * half, dtype=call.query.dtype)
    sign[:half] = -1.0

    def forward(
        hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **arguments: Any
    ) -> tuple[Tensor, None]:
        server: AttentionServer | None = arguments.get(SERVER_ARGUMENT)
        if server is None or position_embeddings is None or hidden_states.shape[1] != 1:
            answer: tuple[Tensor, None] = whole(hidden_states, position_embeddings=position_embeddings, **arguments)
            return answer
        cosine, sine = position_embeddings
        mixed = project(hidden_states)
        mixed = mixed.view(*mixed.shape[:-1], -1, 2 * half)  # [B, 1, H*G + 2*H, D]
        both = mixed[:, :, :turned]
        swapped = torch.cat((both[..., half:], both[..., :half]), -1)
        both = (both * cosine[:, :, None]).addcmul_(swapped, (sine * sign)[:, :, None]).transpose(1, 2)
        attended = server.attend(
            AttentionCall(
                layer=layer,
                query=both[:, :query_heads],
                keys=both[:, query_heads:],
                values=mixed[:, :, turned:].transpose(1, 2),
                scaling=scaling,
                softcap=softcap,
                sink_logits=sinks,
                module=module,
                hidden_states=arguments.get(HIDDEN_ARGUMENT),
            ),
            window,
        )
        return give(attended.flatten(2)), None

    return forward


def _fuse_feed(module: nn.Module) -> bool:
    """Fuse gate and up of a gated feed-forward block, whose own packed copies then go."""
    gate, up = _parts(module, _GATE_UP)
    down, activate = module.get_submodule("down_proj"), module.get_submodule("act_fn")
    project = _together([gate, up])
    if project is None or gate.out_features != up.out_features:
        return False

    def forward(x: Tensor) -> Tensor:
        gates, ups = project(x).chunk(2, -1)
        out: Tensor = down(activate(gates) * ups)
        return out

    probe = torch.linspace(-2.0, 2.0, 3 * gate.in_features).view(3, -1).sin().to(gate.weight.dtype)
    if not _agree(forward(probe), module(probe)):
        return False
    _install(module, forward)
    for part in (gate, up):
        vars(part).pop("forward", None)
    return True


def _fuse_norm(module: nn.Module) -> bool:
    """Fuse an RMS norm: over x and -x end to end it is a layer norm, for which torch has one operation."""
    weights = dict(module.named_parameters())
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if set(weights) != {"weight"} or weights["weight"].ndim != 1 or not isinstance(epsilon, float):
        return False
    if any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return False
    size = weights["weight"].shape[0]
    twice = weights["weight"].detach().repeat(2)

    def forward(hidden_states: Tensor) -> Tensor:
        both = torch.cat((hidden_states, -hidden_states), -1)
        return torch.layer_norm(both, (2 * size,), twice, None, epsilon)[..., :size]

    probe = torch.linspace(-2.0, 2.0, 3 * size).view(3, -1).sin().to(twice.dtype)
    probe = probe * torch.tensor([[1.0], [30.0], [epsilon**0.5]]).to(twice.dtype)
    if not all(_agree(forward(row), module(row)) for row in probe):
        return False
    _install(module, forward)
    return True
