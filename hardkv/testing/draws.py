"""Seeded numbers in the regimes that break methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Regime = Literal["normal", "heavy_tailed", "tied", "one_hot", "huge", "tiny"]
REGIMES: tuple[Regime, ...] = get_args(Regime)
NAN = float("nan")


def generator(seed: int, stream: int = 0) -> torch.Generator:
    """One of several independent streams of a seed."""
    return torch.Generator().manual_seed(seed * 1009 + stream)


def draw(shape: Sequence[int], regime: Regime, rng: torch.Generator, huge: float = 1e4) -> Tensor:
    """Float32 numbers of `shape`; `one_hot` is 1 in one place of each last axis and 0 elsewhere."""
    normal = torch.randn(*shape, generator=rng)
    if regime == "heavy_tailed":
        return normal * torch.exp(normal.abs())
    if regime == "tied":
        return (normal * 2).round() / 2
    if regime == "one_hot":
        return (normal == normal.amax(-1, keepdim=True)).float()
    if regime == "huge":
        return normal * huge
    if regime == "tiny":
        return normal * 1e-30
    return normal


def draw_valid(shape: Sequence[int], rng: torch.Generator) -> Tensor:
    """A mask `[..., N]` with holes and at least one True in each last axis."""
    chance = torch.rand(*shape, generator=rng)
    return (chance < 0.7) | (chance == chance.amin(-1, keepdim=True))


def draw_attention(shape: Sequence[int], valid: Tensor, rng: torch.Generator) -> Tensor:
    """Rows of attention, zero off `valid` (which broadcasts to `shape`), each summing to 1."""
    logits = torch.randn(*shape, generator=rng) * 3
    return torch.softmax(logits.masked_fill(~valid, float("-inf")), -1)
