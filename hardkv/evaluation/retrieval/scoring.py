"""Whether an answer is right, and how sure a share of right ones is."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<![A-Za-z\d])\d+(?:[,\u00a0\u202f']\d{3})*")


def score(answer: str, expected: Sequence[str]) -> float:
    """Share of the expected numbers among the first numbers of the answer, as many as are expected.

    `4,821` is `4821`, and `B7` is no number. Further numbers don't count, so that
    reciting the whole text finds nothing.
    """
    found = [re.sub(r"\D", "", number) for number in _NUMBER.findall(answer)][: len(expected)]
    return sum(number in found for number in expected) / len(expected)


def standard_error(scores: Sequence[float]) -> float:
    """Standard error of the mean of scores in [0, 1], by half the width of Wilson's interval at one sigma.

    It never says 0, as the plain binomial error would of a cell whose few samples are all right. For fractions it is
    an upper bound: no scores in [0, 1] with that mean spread further than zeros and ones.
    """
    count, mean = len(scores), sum(scores) / len(scores)
    return math.sqrt(mean * (1 - mean) / count + 1 / (4 * count * count)) / (1 + 1 / count)
