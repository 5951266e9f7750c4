"""What budgets with a target share: the target itself, and one threshold that meets it."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import Self

from hardkv.interfaces import Budget, Options
from hardkv.types import Claims, Limits


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


class PooledBudget(Budget):
    """One threshold on each token's best row, solved so that a mean target is met; subclasses say over what."""

    per_layer: ClassVar[bool]
    """Whether each layer meets the target by itself, or the model as a whole."""

    class Config(FlooredTargetOptions):
        """Options."""

    config: Config

    def claim(self, probabilities: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        value = probabilities.amax(2)
        return value, torch.zeros_like(value, dtype=torch.int32)

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
    # The order of non-negative floats is that of their bits; abs, because -0.0 has the bits of a negative number.
    value = claims.value.clamp_min(0.0).abs().masked_fill(~claims.valid | claims.protected, -1.0).reshape(shape)
    bits = value.contiguous().view(torch.int32)
    resident = claims.resident.reshape(groups, -1)
    protected = (claims.protected & claims.valid).sum(-1).reshape(groups, -1)
    cap = torch.maximum(resident.clamp(max=limits.upper), protected)
    floor = torch.minimum(torch.maximum(protected, protected.new_tensor(max(1, round(floor_share * target)))), cap)
    total = torch.full_like(cap.sum(-1), target * heads * (1 if per_layer else limits.total_layers))
    total = torch.minimum(torch.maximum(total, floor.sum(-1)), cap.sum(-1))

    def count(tau: Tensor) -> Tensor:
        reached = (bits >= tau[:, None, None]).sum(-1)
        return torch.minimum(torch.maximum(reached + protected, floor), cap)

    low = torch.zeros_like(total, dtype=torch.int32)  # count(low) >= total
    high = torch.full_like(low, torch.iinfo(torch.int32).max)  # count(high) <= total
    for _ in range(32):
        middle = low + (high - low) // 2
        enough = count(middle).sum(-1) >= total
        low = torch.where(enough, middle, low)
        high = torch.where(enough, high, middle)
    fewer, more = count(high), count(low)
    return (fewer + _share_out(more - fewer, total - fewer.sum(-1))).reshape(layers, heads)


def _share_out(ties: Tensor, missing: Tensor) -> Tensor:
    """Give `missing [groups]` tokens to heads with `ties [groups, heads]` to offer, in proportion, the same shape.

    The r-th token of a head that offers t is taken at level (r - 1/2) / t, lower levels first, then earlier heads: one
    fixed order, so that a head never gains when others join and less is missing. Proportions rounded anew would let it.
    """
    below = torch.zeros_like(missing, dtype=torch.float64)  # tokens at this level <= missing
    above = torch.ones_like(below)  # tokens at this level >= missing

    def taken(level: Tensor) -> Tensor:
        return torch.floor(ties * level[:, None] + 0.5).long()

    for _ in range(52):
        middle = (below + above) / 2
        few = taken(middle).sum(-1) <= missing
        below = torch.where(few, middle, below)
        above = torch.where(few, above, middle)
    base = taken(below)
    offered = taken(above) - base
    left = (missing - base.sum(-1))[:, None]
    return base + torch.minimum((left - torch.cumsum(offered, -1) + offered).clamp_min(0), offered)
