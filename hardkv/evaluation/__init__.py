"""Compares methods: how far each moves the model's predictions, at equal mean budget, on given texts."""

from __future__ import annotations

from hardkv.evaluation.bench import Bench, Reference, Row, measure, measure_reference
from hardkv.evaluation.fidelity import Differences, Predictions
from hardkv.evaluation.methods import Method, all_methods, choose
from hardkv.evaluation.report import provenance, ranked
from hardkv.evaluation.workload import Schedule, Workload, bundled_texts, chosen_texts, read_workload, schedule

__all__ = [
    "Bench",
    "Differences",
    "Method",
    "Predictions",
    "Reference",
    "Row",
    "Schedule",
    "Workload",
    "all_methods",
    "bundled_texts",
    "choose",
    "chosen_texts",
    "measure",
    "measure_reference",
    "provenance",
    "ranked",
    "read_workload",
    "schedule",
]
