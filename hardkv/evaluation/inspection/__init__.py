"""Looks inside one generation: what each head keeps, pass by pass, and how full the tiers are, step by step."""

from __future__ import annotations

from hardkv.evaluation.inspection.recording import Recorder, record
from hardkv.evaluation.inspection.trace import Pass, Step, Trace

__all__ = ["Pass", "Recorder", "Step", "Trace", "record"]
