"""How much is measured: sizes, rounds, steps, and the two sets of defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from hardkv.errors import InputError

QUICK, FULL = "quick", "full"


@dataclass(frozen=True)
class Plan:
    """What every way is put through."""

    batches: tuple[int, ...] = (1, 4)
    contexts: tuple[int, ...] = (2048,)
    """Prompt tokens of each sequence."""
    mean_tokens: int = 256
    interval: int = 128
    rounds: int = 2
    """Turns of each way; a turn of one that compresses is whole intervals."""
    steps: int = 8
    """Decode steps of a turn, of ways whose steps are all alike."""
    warmup_steps: int = 4
    timeout_s: float = 1800.0

    @property
    def cases(self) -> list[tuple[int, int]]:
        """Batch and context of each case, smallest first."""
        return sorted(product(self.batches, self.contexts), key=lambda case: (case[0] * case[1], case))

    def steps_of(self, whole_intervals: bool) -> int:
        """Decode steps of a turn."""
        return -(-self.steps // self.interval) * self.interval if whole_intervals else self.steps

    def new_tokens(self, whole_intervals: bool) -> int:
        """Tokens of a sequence in all, so that it does not end while it is measured."""
        return self.warmup_steps + self.rounds * self.steps_of(whole_intervals) + 2


PRESETS: Mapping[str, Plan] = {
    QUICK: Plan(),
    FULL: Plan(batches=(8,), contexts=(7000,), mean_tokens=1024, rounds=3, steps=12),
}


def plan_from(preset: str, **given: Any) -> Plan:
    """A preset with what was given in place of its own values; None is not given.

    Raises:
        InputError: no such preset, or a budget that nothing would be dropped for.
    """
    if preset not in PRESETS:
        raise InputError(f"--preset {preset}: expected {' or '.join(PRESETS)}")
    chosen = {name: value for name, value in given.items() if value is not None}
    plan = Plan(**{**vars(PRESETS[preset]), **chosen})
    if plan.mean_tokens >= min(plan.contexts):
        raise InputError(
            f"--mean-budget {plan.mean_tokens}: expected fewer than the {min(plan.contexts)} tokens of a prompt, or"
            " nothing is dropped"
        )
    return plan
