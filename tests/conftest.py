"""Hypothesis profiles, seeded generators and one thread, for every test here."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("dev", max_examples=25, deadline=None, print_blob=True)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Tensors here are small: handing them to a second thread costs more than it saves, and changes the order of sums.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same global generator; what varies comes from Hypothesis."""
    torch.manual_seed(0)
