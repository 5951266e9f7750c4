"""Fidelity over a sweep of budgets and rounds: predictions, attention layer by layer, free running, resumable."""

from __future__ import annotations

from hardkv.evaluation.faithful.choosing import methods_at, tasks_of
from hardkv.evaluation.faithful.panel import FULL, Panel, Row, Task, check_room
from hardkv.evaluation.faithful.pending import Pending
from hardkv.evaluation.faithful.results import DEFAULT, KIND, Results
from hardkv.evaluation.faithful.variants import Variant, read_variants

__all__ = [
    "DEFAULT",
    "FULL",
    "KIND",
    "Panel",
    "Pending",
    "Results",
    "Row",
    "Task",
    "Variant",
    "check_room",
    "methods_at",
    "read_variants",
    "tasks_of",
]
