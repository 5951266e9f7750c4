"""Asks for things hidden in long prompts: how much of what the full cache finds does a compressed one still find?"""

from __future__ import annotations

from hardkv.evaluation.retrieval.building import Frame, Sample, build, read_frame
from hardkv.evaluation.retrieval.running import (
    FULL,
    Answer,
    Before,
    Plan,
    Trial,
    cells,
    check_names,
    chosen_difficulty,
    chosen_methods,
    summary,
    tasks_of,
)
from hardkv.evaluation.retrieval.scoring import score, standard_error
from hardkv.evaluation.retrieval.tasks import DIFFICULTIES, TASKS, Difficulty

__all__ = [
    "DIFFICULTIES",
    "FULL",
    "TASKS",
    "Answer",
    "Before",
    "Difficulty",
    "Frame",
    "Plan",
    "Sample",
    "Trial",
    "build",
    "cells",
    "check_names",
    "chosen_difficulty",
    "chosen_methods",
    "read_frame",
    "score",
    "standard_error",
    "summary",
    "tasks_of",
]
