"""Positions as marks on a line, for pictures."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hardkv.evaluation.inspection.trace import Ranges

Shares = npt.NDArray[np.float64]


def marked(ranges: Ranges, positions: int) -> npt.NDArray[np.bool_]:
    """Which of the first `positions` positions the ranges hold."""
    marks = np.zeros(positions, dtype=bool)
    for start, end in zip(ranges[::2], ranges[1::2], strict=True):
        marks[start:end] = True
    return marks


def shares(marks: npt.NDArray[np.bool_], bins: int) -> Shares:
    """Share of marked positions in each of `bins` equal parts, at most one part per position."""
    return np.array([part.mean() for part in np.array_split(marks, min(bins, len(marks)))])
