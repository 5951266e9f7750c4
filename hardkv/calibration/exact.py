"""Calibrator `exact`: rank matching, no solver."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from hardkv.calibration.ranking import normalise_reference, rank_match
from hardkv.interfaces import Calibrator


class Exact(Calibrator):
    """Rank matching: the token that the scorer ranks r-th receives the r-th largest raw probability of its row.

    So `M_k(calibrated) = M_k(raw)` for every k at once, where `M_k` is the mass of the k largest: top-p at any p keeps
    exactly as many tokens as it would keep from raw attention, and they are the scorer's best. Ties go to the newer
    token (higher slot). A row whose reference is all zero (never written) comes out all zero. Keeps no state.

    Source: ours; it solves HARD-KV's condition (arXiv 2606.28831) for all k where a temperature solves it for one.
    """

    name: ClassVar[str] = "exact"

    def calibrate(self, scores: Tensor, reference: Tensor | None, valid: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Give probabilities `[B, H, R, N]` from `scores` and `reference` of that shape; `state` is left alone."""
        return rank_match(scores, normalise_reference(reference, valid), valid)
