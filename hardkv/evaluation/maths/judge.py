"""A process of its own that scores answers: one JSON object a line in, one out.

Run by path, apart from the package, so that it starts without torch. math-verify stops what takes too long with a
signal, which only a main thread may have, and which cannot stop one long call into C; whoever runs this can end it.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

_ANCHORED = ("$", "\\(", "\\[", "\\boxed")


def _score(math_verify: Any, reference: str, answer: str | None, seconds: int) -> dict[str, Any]:
    """Compare; without an answer, only read the reference."""
    latex = math_verify.LatexExtractionConfig(boxed_match_priority=0)
    config = [latex, math_verify.ExprExtractionConfig()]
    options = {"extraction_config": config, "parsing_timeout": seconds, "raise_on_error": True}
    boxed = reference if any(anchor in reference for anchor in _ANCHORED) else f"\\boxed{{{reference}}}"
    gold = math_verify.parse(boxed, **options)
    if not gold:
        return {"failure": "the reference answer holds no expression"}
    if answer is None:
        return {}
    found = math_verify.parse(answer, **options)
    if not found:
        return {"correct": False}
    same = math_verify.verify(gold, found, timeout_seconds=seconds, raise_on_error=True)
    return {"correct": bool(same), "extracted": str(found[-1])[:200]}


def main() -> None:
    """Serve until standard input ends."""
    # The folder of this file is no place to import from: its names are those of a package.
    del sys.path[0]
    answers, sys.stdout = sys.stdout, sys.stderr

    math_verify = importlib.import_module("math_verify")
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            found = _score(math_verify, asked["reference"], asked["answer"], asked["seconds"])
        # Its TimeoutException is no Exception, and sympy raises whatever there is.
        except BaseException as error:
            found = {"failure": f"{type(error).__name__}: {error}"[:200]}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
