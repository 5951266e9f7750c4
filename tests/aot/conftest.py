"""Compiles every case once for all tests, and prints what the compiler made of them."""

from __future__ import annotations

import pytest

from tests.aot.harness import Compiled
from tests.aot.table import compile_all, text

Results = dict[tuple[int, int], list[Compiled] | Exception]
RESULTS = pytest.StashKey[Results]()


@pytest.fixture(scope="session")
def compiled(pytestconfig: pytest.Config) -> Results:
    """What each case, by its place in `CASES`, compiles to for each target; an error where it does not."""
    return pytestconfig.stash.setdefault(RESULTS, compile_all())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    results = config.stash.get(RESULTS, {})
    table = [kernel.row for kernels in results.values() if not isinstance(kernels, Exception) for kernel in kernels]
    if table:
        terminalreporter.section("kernels, compiled ahead of time")
        terminalreporter.write_line(text(table))
