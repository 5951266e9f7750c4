"""Scorer `random`: the floor that every other scorer has to beat."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hardkv.interfaces import ImportanceScorer, Options, Space
from hardkv.types import ScoreView


class Random(ImportanceScorer):
    """Uniform random scores in [0, 1). R = 1.

    A function of (seed, layer, device, H, N) alone: every sequence of a batch gets the same draw, so a batched sequence
    scores as it would alone. Draws from its own generator and leaves the global ones untouched.

    Ours; a baseline.
    """

    name: ClassVar[str] = "random"
    space: ClassVar[Space] = "unbounded"

    class Config(Options):
        """Options of `random`."""

        seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of the draw; each layer draws its own numbers.")

    config: Config

    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero at invalid slots."""
        _, heads, slots = view.valid.shape
        generator = torch.Generator(view.valid.device)
        draws = []
        for layer in view.layers:
            # Seeds of at most 2**31 leave the upper bits of the 63 for the layer: no two pairs share a seed.
            generator.manual_seed(self.config.seed + layer * 2**31)
            draws.append(torch.rand(heads, 1, slots, generator=generator, device=view.valid.device))
        draw = torch.stack(draws).expand(view.valid.shape[0], -1, -1, -1)
        return draw.masked_fill(~view.valid[:, :, None], 0.0)
