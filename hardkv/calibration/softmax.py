"""Calibrator `softmax`: temperature 1, the uncalibrated baseline."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hardkv.interfaces import Calibrator


class Softmax(Calibrator):
    """Plain softmax of the scores over valid slots: `p_j = exp(s_j) / sum exp(s)`.

    The baseline that shows selection collapse: what top-p keeps depends on the scorer's scale, not on the head's needs.
    Not scale-free. It reads no reference, so it can't tell a row that was never written: that row comes out uniform.

    Source: the T = 1 case of HARD-KV (arXiv 2606.28831, figure 2).
    """

    name: ClassVar[str] = "softmax"
    needs_reference: ClassVar[bool] = False

    def calibrate(self, scores: Tensor, reference: Tensor | None, valid: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Give probabilities `[B, H, R, N]`; `reference` and `state` are left alone."""
        masked = scores.float().masked_fill(~valid[:, :, None], float("-inf"))
        # A head without one valid slot has a softmax of NaN; the mask turns it to zeros.
        return torch.softmax(masked, -1).masked_fill(~valid[:, :, None], 0.0)
