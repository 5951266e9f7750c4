"""Budget `my_method`: early layers keep more tokens than late ones."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

import hardkv


class MyMethod(hardkv.Budget):
    """Each head keeps its best tokens; how many falls evenly from the first layer to the last."""

    name = "my_method"
    # The layers share a target, so `counts` must see all of them; "layer" for a budget that can judge one by itself.
    scope: ClassVar[Literal["layer", "model"]] = "model"
    # Only the order of the scores matters here; with True they come as probabilities, from the calibrator.
    needs_probabilities: ClassVar[bool] = False

    class Config(hardkv.Options):
        """What a configuration may set beside `name`."""

        mean_tokens: int = Field(
            default=1024, ge=1, description="Mean tokens kept per head, sinks and local window included."
        )
        taper: float = Field(
            default=0.3, ge=0.0, le=0.9, description="How far above the mean the first layer is, and the last below."
        )

    config: Config

    def claim(self, probabilities: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reduce `[B, H, R, N]` over the rows to each token's value, and no votes: its best row speaks for it."""
        value = probabilities.amax(2)
        return value, torch.zeros_like(value, dtype=torch.int32)

    def counts(self, claims: hardkv.Claims, limits: hardkv.Limits) -> torch.Tensor:
        """Give tokens to keep `[L, H]`; `claims` may hold only the first layers of `limits.total_layers`."""
        scored = claims.value.shape[0]
        layer = torch.arange(scored, device=claims.value.device)
        place = 1 - 2 * layer / max(limits.total_layers - 1, scored - 1, 1)  # 1 in the first layer, -1 in the last
        wanted = (self.config.mean_tokens * (1 + self.config.taper * place)).round().long()[:, None]
        # Protected tokens stay whatever a budget says, and no head can keep more than it holds.
        protected = (claims.protected & claims.valid).sum(-1)
        most = claims.resident.clamp(max=limits.upper)
        return torch.minimum(torch.maximum(torch.minimum(wanted, most), protected), claims.resident)

    def target_tokens(self, seen_tokens: int) -> int | None:
        """Mean tokens per head that `counts` aims at."""
        return self.config.mean_tokens


@hardkv.hookimpl
def hardkv_components() -> list[type[hardkv.Component]]:
    """Give what this plugin offers."""
    return [MyMethod]
