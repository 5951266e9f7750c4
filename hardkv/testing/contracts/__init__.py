"""One contract for each interface: subclass it, name your component, and its properties become tests."""

from __future__ import annotations

from hardkv.testing.contracts.base import Contract as Contract
from hardkv.testing.contracts.base import Property as Property
from hardkv.testing.contracts.budget import BudgetContract as BudgetContract
from hardkv.testing.contracts.calibrator import CalibratorContract as CalibratorContract
from hardkv.testing.contracts.regularizer import RegularizerContract as RegularizerContract
from hardkv.testing.contracts.scorer import ScorerContract as ScorerContract
from hardkv.testing.contracts.tier import TierContract as TierContract
