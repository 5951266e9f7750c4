"""Fewer tokens the higher the layer."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hardkv.policies.budgets.best_row import BestRowBudget
from hardkv.policies.budgets.target import TargetOptions
from hardkv.types import Claims, Limits


class PyramidOptions(TargetOptions):
    """Options of `pyramid`."""

    beta: float = Field(
        default=20.0, ge=1.0, description="The top layer gets the mean divided by this, 20 as in the paper; 1 is flat."
    )


class Pyramid(BestRowBudget):
    """Counts fall linearly from the lowest to the highest layer, the same for all heads of a layer.

    With mean T over m layers: `k[m-1] = T / beta`, `k[0] = 2 T - k[m-1]`, and an arithmetic series in between, rounded
    so that the sum is m T. The top layer's count is at least what is protected. Layers are those of full attention.

    Source: PyramidKV (arXiv 2406.02069, section 4.1).
    """

    name = "pyramid"
    scope: ClassVar[Literal["layer", "model"]] = "model"
    needs_probabilities: ClassVar[bool] = False

    class Config(PyramidOptions):
        """Options."""

    config: Config

    def counts(self, claims: Claims, limits: Limits) -> Tensor:
        wanted = self._layer_counts(limits)[: len(claims.value)]
        # Filled one by one: a tensor made of Python numbers would be copied from the host, and wait.
        counts = torch.empty(len(wanted), 1, dtype=torch.int64, device=claims.value.device)
        for layer, count in enumerate(wanted):
            counts[layer].fill_(count)
        protected = (claims.protected & claims.valid).sum(-1)
        most = claims.resident.clamp(max=limits.upper)
        return torch.maximum(torch.minimum(counts, most), protected)

    def target_tokens(self, seen_tokens: int) -> int | None:
        return self.config.target_tokens(seen_tokens)

    def _layer_counts(self, limits: Limits) -> list[int]:
        target, layers = self.config.target_tokens(limits.seen_tokens), limits.total_layers
        if layers == 1:
            return [target]
        least = max(limits.sinks + limits.local_window, 1)
        top = min(max(target / self.config.beta, least), target)
        step = 2 * (target - top) / max(layers - 1, 1)
        exact = [top + step * (layers - 1 - layer) for layer in range(layers)]
        sums = [round(total) for total in accumulate(exact, initial=0.0)]
        return [after - before for before, after in pairwise(sums)]
