"""The plain list that a tier is compared with, and the tensors that a tier holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hardkv.testing.cases import TierCase
from hardkv.types import TokenBatch

Held = tuple[Tensor, Tensor, Tensor]
"""`keys, values [H, N, D]` and `bias [H, N]` float32, -inf where a head has no token."""

_PLAIN = (int, float, str, bytes, type, torch.dtype, torch.device, torch.Generator)


def empty(case: TierCase) -> Held:
    """A list of no tokens."""
    nothing = torch.zeros(case.heads, 0, case.head_dim)
    return nothing, nothing, torch.zeros(case.heads, 0)


def joined(held: Held, batch: TokenBatch) -> Held:
    """The list with a batch's tokens behind the others."""
    bias = torch.zeros(batch.mask.shape).masked_fill(~batch.mask, float("-inf"))
    keys, values, old = held
    return torch.cat([keys, batch.keys], 1), torch.cat([values, batch.values], 1), torch.cat([old, bias], 1)


def buffers(thing: Any) -> list[Tensor]:
    """Every tensor that an object reaches through its attributes, lists and dicts, each once."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            found[id(one)] = one
        elif id(one) not in seen and not isinstance(one, _PLAIN):
            seen.add(id(one))
            waiting.extend(_inside(one))
    return list(found.values())


def _inside(thing: Any) -> list[Any]:
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, list | tuple | set):
        return list(thing)
    return list(getattr(thing, "__dict__", {}).values())
