"""Budgets pooled within a layer."""

from __future__ import annotations

from typing import ClassVar

from hardkv.policies.budgets.target import PooledBudget


class Ada(PooledBudget):
    """Heads of a layer compete for its tokens, each with a guaranteed share (Ada-KV, arXiv 2407.11550, algorithm 1)."""

    name = "ada"
    per_layer: ClassVar[bool] = True
