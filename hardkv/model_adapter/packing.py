"""Linear layers with weights in oneDNN's own layout, for decoding in bfloat16 on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
_DECODE_ROWS = 8
"""Rows per call that the layout is chosen for; other numbers work too."""
_MOST_OF_FREE_MEMORY = 0.25


def can_pack(model: PreTrainedModel) -> bool:
    """Whether this model, device and build of torch can use packed weights."""
    kernels = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return bool(kernels and torch._C._has_mkldnn and model.device.type == "cpu" and model.dtype == torch.bfloat16)


def pack_linears(model: PreTrainedModel) -> int:
    """Give every `nn.Linear` a packed copy of its weights for its forward pass; gives the bytes of the copies.

    Without it oneDNN reorders the weights again in every call.
    The parameters themselves stay, so that saving and tying work as before; a later change to them is not seen by the
    copies. Nothing is packed, and that is logged, where the copies would take over a quarter of the free memory.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    if not fits_in_memory(linears):
        return 0
    for module in linears:
        forward = packed_linear(module.weight.detach(), module.bias)
        setattr(module, "forward", forward)  # noqa: B010 (mypy refuses the plain assignment)
    return sum(module.weight.nbytes for module in linears)


def fits_in_memory(linears: list[nn.Linear]) -> bool:
    """Whether copies of these weights take up to a quarter of the free memory; if not, that is logged."""
    needed = sum(module.weight.nbytes for module in linears)
    free = psutil.virtual_memory().available
    if needed > _MOST_OF_FREE_MEMORY * free:
        logger.info("weights are not packed: the copies need %d bytes, %d are free", needed, free)
        return False
    return True


def packed_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The forward pass of a linear layer with a packed copy of `weight [N, M]`."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _DECODE_ROWS)
    # Without this, every call looks the overload up again.
    product = torch.ops.mkldnn._linear_pointwise.default

    def forward(input: Tensor) -> Tensor:
        out: Tensor = product(input, packed, bias, "none", [], "")
        return out

    return forward
