"""What authors of plugins test with: contracts of the five interfaces, a check for capture, and a tiny model.

Needs the `test` extra (Hypothesis, pytest); nothing in hardkv imports it.
"""

from __future__ import annotations

from hardkv.testing.capture import assert_capture_safe
from hardkv.testing.contracts import (
    BudgetContract,
    CalibratorContract,
    RegularizerContract,
    ScorerContract,
    TierContract,
)
from hardkv.testing.tiny_model import tiny_sink_model

__all__ = [
    "BudgetContract",
    "CalibratorContract",
    "RegularizerContract",
    "ScorerContract",
    "TierContract",
    "assert_capture_safe",
    "tiny_sink_model",
]
