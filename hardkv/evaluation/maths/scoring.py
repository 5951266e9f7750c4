"""Whether an answer is right, by math-verify in a process of its own."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from hardkv.errors import HardKVError
from hardkv.evaluation.maths.optional import require

_STAGES = 7
"""Times `seconds`: two readings and at most four comparisons, which signals inside end first, and one to spare."""

_START_SECONDS = 120


@dataclass(frozen=True)
class Score:
    """What scoring one answer gave."""

    correct: bool = False
    extracted: str | None = None
    """The expression that was compared: of the last box, else the last one; None if there was none."""
    failure: str | None = None
    """Why it could not be told; then `correct` is False and means nothing."""


class Scorer:
    """Scores answers one after the other; works from any thread, and survives whatever an answer does to sympy.

    `seconds`: time for each of parsing the reference, parsing the answer, and each comparison of two expressions.

    Raises:
        InputError: math-verify is not installed.
    """

    def __init__(self, seconds: int = 5) -> None:
        require("math_verify", "scoring")
        self.seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def score(self, reference: str, answer: str) -> Score:
        """Compare an answer with the reference."""
        return self._ask(reference, answer)

    def check(self, reference: str) -> str | None:
        """Why a reference answer cannot be compared with; None if it can."""
        return self._ask(reference, None).failure

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, reference: str, answer: str | None) -> Score:
        return self._exchange(self._started(), reference, answer, _STAGES * self.seconds)

    def _exchange(self, process: subprocess.Popen[str], reference: str, answer: str | None, limit: int) -> Score:
        assert process.stdin is not None
        assert process.stdout is not None
        asked = {"reference": reference, "answer": answer, "seconds": self.seconds}
        try:
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], limit)
            line = process.stdout.readline() if ready else ""
        except BrokenPipeError:
            ready, line = [process.stdout], ""
        if not line:
            self.close()
            return Score(failure="the scoring process ended" if ready else f"ended after {limit} s")
        return Score(**json.loads(line))

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            judge = str(Path(__file__).with_name("judge.py"))
            # A session of its own: an interrupt is for us, and we close it.
            self._process = subprocess.Popen(
                [sys.executable, judge],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
            found = self._exchange(self._process, "1", "\\boxed{1}", _START_SECONDS)
            if found != Score(True, "1"):
                self.close()
                raise HardKVError(f"math-verify does not work: it was asked whether 1 is 1 and gave {found}")
        return self._process
