"""Hypothesis strategies that draw a case as a few numbers, so that shrinking and rebuilding are by numbers."""

from __future__ import annotations

from hypothesis import strategies as st

from hardkv.testing.cases import ClaimCase, EntryCase, RowCase, ScoreCase, SelectionCase, Step, TierCase
from hardkv.testing.draws import REGIMES

SEEDS = st.integers(0, 2**31 - 1)
REGIME = st.sampled_from(REGIMES)
SOFTCAPS = st.sampled_from([None, None, 5.0])
STEPS: tuple[Step, ...] = ("admit", "admit", "admit none", "reset")


def score_views() -> st.SearchStrategy[ScoreCase]:
    """Views of one to three layers."""
    return st.builds(
        ScoreCase,
        seed=SEEDS,
        regime=REGIME,
        layers=st.integers(1, 3),
        heads=st.integers(1, 3),
        group=st.integers(1, 3),
        rows=st.integers(1, 5),
        slots=st.integers(1, 20),
        head_dim=st.sampled_from([2, 4, 8]),
        softcap=SOFTCAPS,
        sinks=st.booleans(),
    )


def entering_tokens() -> st.SearchStrategy[EntryCase]:
    """Tokens of one to three prompts."""
    return st.builds(
        EntryCase,
        seed=SEEDS,
        regime=REGIME,
        rows=st.integers(1, 3),
        heads=st.integers(1, 3),
        group=st.integers(1, 3),
        tokens=st.integers(1, 8),
    )


def score_rows() -> st.SearchStrategy[RowCase]:
    """Scores for a calibrator."""
    return st.builds(
        RowCase,
        seed=SEEDS,
        regime=REGIME,
        layers=st.integers(1, 3),
        heads=st.integers(1, 3),
        rows=st.integers(1, 4),
        slots=st.integers(1, 40),
    )


def claims() -> st.SearchStrategy[ClaimCase]:
    """Claims for a budget, with their limits."""
    return st.builds(
        ClaimCase,
        seed=SEEDS,
        regime=REGIME,
        layers=st.integers(1, 4),
        heads=st.integers(1, 3),
        rows=st.integers(1, 3),
        slots=st.integers(1, 40),
        sinks=st.integers(0, 3),
        local_window=st.integers(1, 4),
        upper=st.integers(1, 40),
    )


def selections() -> st.SearchStrategy[SelectionCase]:
    """Selections for a regularizer, with costs and limits."""
    return st.builds(
        SelectionCase,
        seed=SEEDS,
        rounds=st.integers(1, 3),
        layers=st.integers(1, 2),
        heads=st.integers(1, 3),
        page_slots=st.integers(1, 4),
        interval=st.integers(1, 5),
        density=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
        upper=st.integers(4, 30),
        copy_seconds_per_byte=st.sampled_from([1e-12, 1e-10, 1e-7]),
    )


def token_batches() -> st.SearchStrategy[TierCase]:
    """Lives of a tier."""
    return st.builds(
        TierCase,
        seed=SEEDS,
        regime=REGIME,
        layers=st.integers(1, 3),
        heads=st.integers(1, 3),
        group=st.integers(1, 2),
        slots=st.integers(1, 8),
        softcap=SOFTCAPS,
        steps=st.lists(st.sampled_from(STEPS), max_size=6).map(tuple),
    )
