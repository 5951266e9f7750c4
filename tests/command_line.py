"""Calls of the command line within a test, and what came of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from hardkv.cli import main


@dataclass
class Called:
    """Exit code and what was written."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Called]


def run_main(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> Called:
    """Run one command; without --debug no traceback may show."""
    code = main(arguments)
    captured = capsys.readouterr()
    if "--debug" not in arguments:
        assert "Traceback" not in captured.out + captured.err
    return Called(code, captured.out, captured.err)
