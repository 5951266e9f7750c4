"""Reasoning on mathematics problems: sampled answers, scored, beside the full cache's; nothing lost in a kill."""

from __future__ import annotations

from hardkv.evaluation.maths.journal import Journal
from hardkv.evaluation.maths.presets import INSTRUCTION, PRESETS, Preset, prompt_of
from hardkv.evaluation.maths.problems import Problem, Problems, read_problems
from hardkv.evaluation.maths.running import check_room, run
from hardkv.evaluation.maths.sample import Sample, Task, seed_of, tasks_of
from hardkv.evaluation.maths.scoring import Score, Scorer
from hardkv.evaluation.maths.summary import difference, per_problem, summarize

__all__ = [
    "INSTRUCTION",
    "PRESETS",
    "Journal",
    "Preset",
    "Problem",
    "Problems",
    "Sample",
    "Score",
    "Scorer",
    "Task",
    "check_room",
    "difference",
    "per_problem",
    "prompt_of",
    "read_problems",
    "run",
    "seed_of",
    "summarize",
    "tasks_of",
]
