"""Measures speed and memory of hardkv beside its peers, each in a process of its own, on the same weights."""

from __future__ import annotations

from hardkv.evaluation.speed.crew import Crew
from hardkv.evaluation.speed.decode import DecodeRow, measure_decode
from hardkv.evaluation.speed.fidelity import FidelityRow, measure_peers
from hardkv.evaluation.speed.memory import MemoryRow, measure_memory
from hardkv.evaluation.speed.plan import FULL, PRESETS, QUICK, Plan, plan_from
from hardkv.evaluation.speed.prefill import PrefillRow, measure_prefill
from hardkv.evaluation.speed.process import PeerError, PeerProcess
from hardkv.evaluation.speed.prompts import check_room, saved_model
from hardkv.evaluation.speed.results import case_ratios, document, headline
from hardkv.evaluation.speed.ways import Environments, Way, all_ways, choose_ways

__all__ = [
    "FULL",
    "PRESETS",
    "QUICK",
    "Crew",
    "DecodeRow",
    "Environments",
    "FidelityRow",
    "MemoryRow",
    "PeerError",
    "PeerProcess",
    "Plan",
    "PrefillRow",
    "Way",
    "all_ways",
    "case_ratios",
    "check_room",
    "choose_ways",
    "document",
    "headline",
    "measure_decode",
    "measure_memory",
    "measure_peers",
    "measure_prefill",
    "plan_from",
    "saved_model",
]
