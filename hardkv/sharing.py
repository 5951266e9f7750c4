"""How a number of bytes is shared over sequences: by need, up to one level."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def fair_level(needs: Sequence[int], cost: Callable[[int, int], int], room: int, least: int) -> int | None:
    """The highest level at which all fit: the sum of `cost(need, level)` is at most `room`.

    `needs`: tokens that each will see. `cost` does not fall with the level, and stops rising at the need. None when
    they don't even fit at the level `least`.
    """

    def fits(level: int) -> bool:
        return sum(cost(need, level) for need in needs) <= room

    if not fits(least):
        return None
    low, high = least, max(least, *needs)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
