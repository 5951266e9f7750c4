"""Top-p: as many tokens as it takes to cover a share of the attention."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import Self

from hardkv.interfaces import Budget, Options
from hardkv.types import Claims, Limits
from hardkv_kernels import topp_threshold


class TopPOptions(Options):
    """Options of `top_p`."""

    p: float = Field(default=0.95, gt=0.0, le=1.0, description="Probability mass each row's own set must cover.")
    floor_tokens: int = Field(
        default=64, ge=1, description="No head keeps fewer: without a floor, top-p measured worse than uniform."
    )
    cap_tokens: int | None = Field(default=None, ge=1, description="No head keeps more; null = `cache.upper`.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.cap_tokens is not None and self.cap_tokens < self.floor_tokens:
            raise ValueError(f"floor_tokens ({self.floor_tokens}) must not exceed cap_tokens ({self.cap_tokens})")
        return self


class TopP(Budget):
    """A token stays if any row's top-p set holds it (HARD-KV, arXiv 2606.28831, section 3.2: cautious update)."""

    name = "top_p"
    votes: ClassVar[bool] = True

    class Config(TopPOptions):
        """Options."""

    config: Config

    def claim(self, probabilities: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        tau, count = topp_threshold(probabilities, self.config.p)
        above = probabilities > tau[..., None]
        ties = probabilities == tau[..., None]
        newer_ties = ties.flip(-1).cumsum(-1).flip(-1)  # itself included: among equals the newest is chosen
        chosen = above | (ties & (newer_ties <= (count - above.sum(-1))[..., None]))
        votes = chosen & valid[:, :, None, :]
        return probabilities.amax(2), votes.sum(2, dtype=torch.int32)

    def counts(self, claims: Claims, limits: Limits) -> Tensor:
        protected = (claims.protected & claims.valid).sum(-1)
        resident = claims.resident
        wanted = (((claims.votes > 0) | claims.protected) & claims.valid).sum(-1)
        cap = limits.upper if self.config.cap_tokens is None else min(self.config.cap_tokens, limits.upper)
        wanted = wanted.clamp(min=min(self.config.floor_tokens, cap), max=cap)
        return torch.minimum(torch.maximum(wanted, protected), resident)

    def target_tokens(self, seen_tokens: int) -> int | None:
        return None
