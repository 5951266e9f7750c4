"""Calibrator `my_method`: scores become probabilities by a softmax of standard scores."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

import hardkv


class MyMethod(hardkv.Calibrator):
    """Softmax of the scores in standard deviations, so that a scorer's scale doesn't matter."""

    name = "my_method"
    # With True, `reference` is the raw attention of the same rows; else it may be None.
    needs_reference: ClassVar[bool] = False

    class Config(hardkv.Options):
        """What a configuration may set beside `name`."""

        temperature: float = Field(
            default=0.5, gt=0.01, le=100.0, description="Standard deviations that make a factor e; small is sharp."
        )

    config: Config

    def calibrate(
        self,
        scores: torch.Tensor,
        reference: torch.Tensor | None,
        valid: torch.Tensor,
        state: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Give probabilities `[B, H, R, N]` of `scores [B, H, R, N]`: zero where not `valid [B, H, N]`."""
        shown = valid[:, :, None]
        # Slots that are not valid may hold anything, NaN too: mask them before a number of theirs spreads.
        clean = scores.double().masked_fill(~shown, 0.0)
        count = shown.sum(-1, keepdim=True).clamp_min(1)
        centred = (clean - clean.sum(-1, keepdim=True) / count).masked_fill(~shown, 0.0)
        # In units of the largest deviation first: squares of huge scores would overflow, of tiny ones vanish.
        largest = centred.abs().amax(-1, keepdim=True)
        relative = centred / largest.clamp_min(torch.finfo(torch.float64).tiny)
        deviation = (relative.square().sum(-1, keepdim=True) / count).sqrt().clamp_min(1e-6)
        logits = (relative / deviation / self.config.temperature).masked_fill(~shown, float("-inf"))
        # A head without a valid slot has a softmax of NaN; the mask turns it to zeros.
        return torch.softmax(logits, -1).float().masked_fill(~shown, 0.0)


@hardkv.hookimpl
def hardkv_components() -> list[type[hardkv.Component]]:
    """Give what this plugin offers."""
    return [MyMethod]
