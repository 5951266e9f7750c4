"""Finds the share at which a budget without a target keeps the mean that is wanted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hardkv.errors import ConfigError

TOLERANCE = 0.01
"""How near the mean must come, as a share of the target."""
MOST_PROBES = 12

# Log-odds beyond which a share is 0 or 1 for float32.
_LOWEST, _HIGHEST = -15.0, 15.0
# The steps that look for the other side of the target: a little further than the slope says, within bounds.
_FIRST_SLOPE, _FLATTEST, _BEYOND = 1.0, 0.01, 1.15
_SHORTEST, _LONGEST = 0.1, 6.0


@dataclass(frozen=True)
class Solved:
    """The best share that was tried, and the mean it gave."""

    share: float
    mean_tokens: float


@dataclass(frozen=True)
class _Probe:
    log_odds: float
    mean_tokens: float
    gap: float  # log(mean / target)
    weight: float  # the gap as the interpolation sees it


def solve_share(mean_at: Callable[[float], float], start: float, target: float) -> Solved:
    """Search the share in (0, 1) at which `mean_at`, which rises with it, meets `target` within `TOLERANCE`.

    From `start`, in steps of log-odds as long as the slope says, until the target is between two shares; then by false
    position (the Illinois rule). Gives the nearest of `MOST_PROBES` when none is near enough.

    Raises:
        ConfigError: no share meets the target; says what the last one keeps.
    """

    def probe(log_odds: float) -> _Probe:
        mean = mean_at(_share(log_odds))
        gap = math.log(mean / target)
        return _Probe(log_odds, mean, gap, gap)

    low, high, tried = _bracket(probe, min(max(_log_odds(start), _LOWEST), _HIGHEST), target)
    nearest = min(tried, key=_miss)
    last = tried[-1]
    for _ in range(MOST_PROBES - len(tried)):
        if _miss(nearest) <= TOLERANCE:
            break
        span = high.weight - low.weight
        found = probe(low.log_odds - low.weight * (high.log_odds - low.log_odds) / span)
        nearest = min(nearest, found, key=_miss)
        # An end that stays twice counts half from then on, or it would stay for ever.
        again = (found.gap < 0) == (last.gap < 0)
        if found.gap < 0:
            low, high = found, _halved(high) if again else high
        else:
            low, high = _halved(low) if again else low, found
        last = found
    return Solved(_share(nearest.log_odds), nearest.mean_tokens)


def _bracket(probe: Callable[[float], _Probe], start: float, target: float) -> tuple[_Probe, _Probe, list[_Probe]]:
    """Two probes around the target, and all that were made; both the same when one is near enough."""
    found = probe(start)
    tried, slope = [found], _FIRST_SLOPE
    while _miss(found) > TOLERANCE:
        edge = _HIGHEST if found.gap < 0 else _LOWEST
        if found.log_odds == edge:
            raise ConfigError(
                f"no share keeps a mean of {target:g} tokens: {_share(edge):.7g} keeps {found.mean_tokens:.1f}"
            )
        step = min(max(_BEYOND * abs(found.gap) / slope, _SHORTEST), _LONGEST)
        following = probe(min(max(found.log_odds + math.copysign(step, edge), _LOWEST), _HIGHEST))
        tried.append(following)
        if (following.gap < 0) != (found.gap < 0):
            low, high = sorted((found, following), key=lambda one: one.log_odds)
            return low, high, tried
        slope = (following.gap - found.gap) / (following.log_odds - found.log_odds)
        if slope < -TOLERANCE:
            raise ConfigError(f"cannot search a mean of {target:g} tokens: more of the share keeps fewer tokens")
        slope = max(slope, _FLATTEST)
        found = following
    return found, found, tried


def _halved(probe: _Probe) -> _Probe:
    return _Probe(probe.log_odds, probe.mean_tokens, probe.gap, probe.weight / 2)


def _miss(probe: _Probe) -> float:
    return abs(math.expm1(probe.gap))


def _share(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))


def _log_odds(share: float) -> float:
    return math.log(share / (1 - share)) if 0 < share < 1 else math.copysign(_HIGHEST, share - 0.5)
