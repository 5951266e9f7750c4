"""One threshold for the whole model, solved to meet a mean budget."""

from __future__ import annotations

from typing import ClassVar, Literal

from hardkv.policies.budgets.target import PooledBudget


class Threshold(PooledBudget):
    """Keep what any row gives a probability of at least tau; one tau meets the mean over all layers and heads. Ours."""

    name = "threshold"
    scope: ClassVar[Literal["layer", "model"]] = "model"
    per_layer: ClassVar[bool] = False
