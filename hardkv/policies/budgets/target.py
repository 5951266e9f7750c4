"""What budgets with a target share: the target itself, and one threshold that meets it."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import Self

from hardkv.interfaces import Options
from hardkv.policies.budgets.best_row import BestRowBudget
from hardkv.types import Claims, Limits
from hardkv_kernels import threshold_budget


class TargetOptions(Options):
    """A target in tokens per head, or as a share of the tokens seen."""

    mean_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Mean tokens kept per head after a compression, sinks and local window included.",
    )
    mean_share: float | None = Field(
        default=None, gt=0.0, le=1.0, description="The same as a share of the tokens seen; give one of the two."
    )

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.mean_tokens is None) == (self.mean_share is None):
            raise ValueError("give exactly one of mean_tokens (a count) and mean_share (a share of the tokens seen)")
        return self

    def target_tokens(self, seen_tokens: int) -> int:
        """Tokens per head that the mean should meet."""
        if self.mean_tokens is not None:
            return self.mean_tokens
        assert self.mean_share is not None
        return max(1, round(self.mean_share * seen_tokens))


class FlooredTargetOptions(TargetOptions):
    """A target with a share of it that every head is given first."""

    floor_share: float = Field(
        default=0.2, ge=0.0, le=1.0, description="Share of the target that every head gets whatever its scores."
    )


class PooledBudget(BestRowBudget):
    """One threshold on each token's best row, solved so that a mean target is met; subclasses say over what."""

    per_layer: ClassVar[bool]
    """Whether each layer meets the target by itself, or the model as a whole."""

    class Config(FlooredTargetOptions):
        """Options."""

    config: Config

    def counts(self, claims: Claims, limits: Limits) -> Tensor:
        target = self.config.target_tokens(limits.seen_tokens)
        return threshold_counts(claims, target, self.config.floor_share, limits, self.per_layer)

    def target_tokens(self, seen_tokens: int) -> int | None:
        return self.config.target_tokens(seen_tokens)


def threshold_counts(claims: Claims, target: int, floor_share: float, limits: Limits, per_layer: bool) -> Tensor:
    """Counts `[L, H]` such that one threshold meets the mean target, for the whole model or in each layer.

    A head keeps its protected tokens and those whose value
    reaches tau, clamped to [floor, cap]; tau is bisected over the bits of a non-negative float32, so it is exact. Ties
    at tau are shared out in proportion. Layers not scored yet (`limits.total_layers`) leave their tokens to the others,
    so a later call, with more layers, only ever lowers a count.
    """
    layers, heads, slots = claims.value.shape
    groups = layers if per_layer else 1
    shape = (groups, -1, slots)
    # abs, because -0.0 has the bits of a negative number.
    value = claims.value.clamp_min(0.0).abs().masked_fill(~claims.valid | claims.protected, -1.0).reshape(shape)
    resident = claims.resident.reshape(groups, -1)
    protected = (claims.protected & claims.valid).sum(-1).reshape(groups, -1)
    cap = torch.maximum(resident.clamp(max=limits.upper), protected)
    floor = torch.minimum(protected.clamp(min=max(1, round(floor_share * target))), cap)
    total = torch.full_like(cap.sum(-1), target * heads * (1 if per_layer else limits.total_layers))
    total = torch.minimum(torch.maximum(total, floor.sum(-1)), cap.sum(-1))

    counts: Tensor = threshold_budget(value, protected, floor, cap, total)
    return counts.reshape(layers, heads)
