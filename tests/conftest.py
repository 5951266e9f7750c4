"""Hypothesis profiles, seeded generators and one thread for every test here; which process runs the kernels' tests."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("dev", max_examples=25, deadline=None, print_blob=True)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Tensors here are small: handing them to a second thread costs more than it saves, and changes the order of sums.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """`-m interp` alone runs the interpreter, which Triton chooses once, as it is imported."""
    if config.option.markexpr.strip() == "interp":
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of the interpreter need it, tests of the compiler need it off; neither passes without having run."""
    wanted = {marker.name for marker in item.iter_markers()} & {"interp", "aot"}
    if not wanted:
        return
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install 'triton>=3.7' (Linux)")
    from hardkv_kernels._triton import interprets

    if wanted == {"interp"} and not interprets():
        pytest.fail("needs Triton's interpreter: run `pytest -m interp` in a process of its own", pytrace=False)
    if wanted == {"aot"} and interprets():
        pytest.fail("needs Triton's compiler: run `pytest -m aot` without TRITON_INTERPRET", pytrace=False)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same global generator; what varies comes from Hypothesis."""
    torch.manual_seed(0)
