"""Checks on a GPU what no other machine can: results on the device, speed, and that nothing waits or grows.

Each part runs in a process of its own, so that one that crashes takes no other with it. The results are written after
every row; the exit status is 0 when nothing was wrong. A missed target is reported, and is not an error.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.plan import DRY, REAL, Plan
from benchmarks.gpu_check.reporting import (
    FAILED,
    PASSED,
    ROOT,
    Part,
    how_to_install,
    machine,
    missing_packages,
    print_part,
    read_json,
    versions,
    write_json,
)

WEIGHTS = {"parity": 3.0, "layout": 2.0, "endurance": 1.5, "end_to_end": 3.5}
"""The parts in their order, with their shares of the time; what one leaves, the later ones have."""
_START_SECONDS, _LEAST_SECONDS = 10.0, 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts, or one of them in this process; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where results go, after each part")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU: shows that the check runs")
    parser.add_argument("--seconds", type=float, default=460.0, help="for all parts together (default: %(default)s)")
    parser.add_argument("--parts", nargs="*", choices=list(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument("--part", choices=list(WEIGHTS), help="run this one here, in this process")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("no CUDA device here; `--dry-run` runs the same code with tiny sizes on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu") if options.dry_run else torch.device("cuda", 0)
    if options.part is not None:
        # Where a part hangs, this says in which line.
        faulthandler.dump_traceback_later(options.seconds + _START_SECONDS, file=sys.__stderr__ or sys.stderr)
        found = run_part(options.part, DRY if options.dry_run else REAL, device, options.seconds, options.json)
        faulthandler.cancel_dump_traceback_later()
        return 0 if found["status"] == PASSED else 1
    words = sys.argv[1:] if arguments is None else list(arguments)
    return run_all(options.parts, options.dry_run, options.seconds, options.json, words)


def run_part(name: str, plan: Plan, device: torch.device, seconds: float, path: Path | None) -> dict[str, Any]:
    """One part in this process; whatever goes wrong is in what it gives."""
    part = Part(name, seconds, path)
    part.fact("machine", machine(device))
    missing = missing_packages(name)
    if missing:
        part.fail(how_to_install(missing))
    else:
        try:
            _run(part, plan, device)
        except Exception:
            part.fail(traceback.format_exc())
    part.finish()
    return part.as_dict()


def _run(part: Part, plan: Plan, device: torch.device) -> None:
    """Import a part only when it runs: the first two need neither hardkv nor transformers."""
    if device.type == "cpu":
        torch.set_num_threads(1)
    if part.name == "parity":
        from benchmarks.gpu_check import parity

        parity.run(part, plan.parity, device)
    elif part.name == "layout":
        from benchmarks.gpu_check import layout

        layout.run(part, plan.layout, device)
    elif part.name == "endurance":
        from benchmarks.gpu_check import endurance

        endurance.run(part, plan.endurance, device)
    else:
        from benchmarks.gpu_check import end_to_end

        end_to_end.run(part, plan.end_to_end, device)


def child_command(name: str, path: Path, seconds: float, dry_run: bool) -> list[str]:
    """How a part is run in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.gpu_check", "--part", name, "--json", str(path)]
    return [*words, "--seconds", f"{seconds:.0f}", *(["--dry-run"] if dry_run else [])]


def run_all(names: Sequence[str], dry_run: bool, seconds: float, path: Path | None, words: Sequence[str]) -> int:
    """Every part in its own process; gives the exit status."""
    end = time.perf_counter() + seconds
    report: dict[str, Any] = {
        "command": " ".join(["python", "-m", "benchmarks.gpu_check", *words]),
        "dry_run": dry_run,
        "versions": versions(),
        "machine": {},
        "parts": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for index, name in enumerate(names):
            rest = names[index:]
            left = end - time.perf_counter()
            share = WEIGHTS[name] / sum(WEIGHTS[each] for each in rest)
            budget = max(_LEAST_SECONDS, left * share - _START_SECONDS)
            # Beyond its budget a part ends by itself; one that hangs is ended so that the others have some time.
            limit = max(left - (len(rest) - 1) * 2 * _START_SECONDS, budget + 2 * _START_SECONDS)
            print(f"{name}: up to {budget:.0f} s ...", file=sys.stderr, flush=True)
            found = in_own_process(name, Path(folder) / f"{name}.json", budget, limit, dry_run)
            report["machine"] = found["facts"].pop("machine", None) or report["machine"]
            report["parts"][name] = found
            print_part(name, found)
            if path is not None:
                write_json(path, report)
    return summary(report, path)


def in_own_process(name: str, path: Path, budget: float, limit: float, dry_run: bool) -> dict[str, Any]:
    """What a part wrote, and how it ended."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in paths if each)}
    problem: str | None = None
    started = time.perf_counter()
    try:
        status = subprocess.run(
            child_command(name, path, budget, dry_run), cwd=ROOT, env=environment, timeout=limit, check=False
        ).returncode
        if status not in (0, 1):
            problem = f"the process ended with status {status}"
    except subprocess.TimeoutExpired:
        problem = f"stopped after {limit:.0f} s"
    found = read_json(path)
    if found is None:
        found = {**Part(name, 0.0).as_dict(), "seconds": round(time.perf_counter() - started, 1)}
        problem = problem or "the process left no results"
    if problem is not None:
        found["status"] = FAILED
        found["failures"].append(problem)
    return found


def summary(report: dict[str, Any], path: Path | None) -> int:
    """Print one line for each part; gives the exit status."""
    print()
    for name, found in report["parts"].items():
        missed = sum(not target["met"] for target in found["targets"])
        print(
            f"{name:<12} {found['status']}, {len(found['rows'])} rows, {len(found['failures'])} failures, "
            f"{missed} of {len(found['targets'])} targets missed, {found['seconds']} s"
        )
    if path is not None:
        print(f"results: {path}")
    return 0 if all(found["status"] == PASSED for found in report["parts"].values()) else 1


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
