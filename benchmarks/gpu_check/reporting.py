"""What a part found: rows, targets and failures, written to its file after each of them; and how it is printed."""

from __future__ import annotations

import importlib.util
import json
import platform
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
WHEELS = ".gpu-wheels"
_RUNTIME = {
    "numpy": "numpy",
    "pluggy": "pluggy",
    "psutil": "psutil",
    "pydantic": "pydantic",
    "transformers": "transformers",
    "typing_extensions": "typing_extensions",
    "yaml": "pyyaml",
}
NEEDED = {
    "parity": {"hypothesis": "hypothesis", "pytest": "pytest"},
    "layout": {},
    "endurance": _RUNTIME,
    "end_to_end": _RUNTIME,
}
"""What each part needs besides torch (and triton, for a GPU): modules, and the packages that have them."""
FAILED, PASSED = "failed", "passed"


class Part:
    """One part's findings. A row that failed, or a target that was missed, does not stop it."""

    def __init__(self, name: str, seconds: float, path: Path | None = None) -> None:
        self.name, self.seconds, self.path = name, seconds, path
        self.rows: list[dict[str, Any]] = []
        self.targets: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.failures: list[str] = []
        self.facts: dict[str, Any] = {}
        self._started = time.perf_counter()
        self._complete = False

    @property
    def left(self) -> float:
        """Seconds of the part's budget that are left."""
        return self.seconds - (time.perf_counter() - self._started)

    @property
    def failed(self) -> bool:
        return bool(self.failures)

    def row(self, **fields: Any) -> None:
        """Note a result."""
        self.rows.append(fields)
        self.write()

    def note(self, text: str) -> None:
        """Note what a reader must know to judge the rows."""
        self.notes.append(text)
        self.write()

    def fact(self, name: str, value: Any) -> None:
        """Note a number or a list that belongs to no row."""
        self.facts[name] = value
        self.write()

    def fail(self, text: str) -> None:
        """Note that something is wrong: the check as a whole fails."""
        self.failures.append(text)
        self.write()

    def target(self, name: str, value: float, wanted: float) -> None:
        """Note a figure that is to reach `wanted`; missing it is a finding, not a failure."""
        self.targets.append({"target": name, "wanted": wanted, "value": value, "met": bool(value >= wanted)})
        self.write()

    def attempt(self, what: str, action: Callable[[], None]) -> None:
        """Do something whose failure is noted, with its traceback, and does not stop what comes after."""
        try:
            action()
        except Exception:
            self.fail(f"{what}:\n{traceback.format_exc()}")

    def finish(self) -> None:
        self._complete = True
        self.write()

    def as_dict(self) -> dict[str, Any]:
        return {
            "status": FAILED if self.failed or not self._complete else PASSED,
            "seconds": round(time.perf_counter() - self._started, 1),
            "targets": self.targets,
            "failures": self.failures,
            "notes": self.notes,
            "facts": self.facts,
            "rows": self.rows,
        }

    def write(self) -> None:
        if self.path is not None:
            write_json(self.path, self.as_dict())


def write_json(path: Path, content: Any) -> None:
    """Write all or nothing: a run that is cut off leaves the file before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    beside.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """What was written, or None where nothing was."""
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def missing_packages(part: str) -> list[str]:
    """Packages that a part needs and this environment lacks."""
    return [package for module, package in NEEDED[part].items() if importlib.util.find_spec(module) is None]


def how_to_install(packages: list[str]) -> str:
    """What to type for the packages that are missing."""
    return (
        f"not installed: {', '.join(packages)}. `make gpu-wheels` downloads them where there is a network; then\n"
        f"  python -m pip install --no-index --find-links {WHEELS} {' '.join(packages)}"
    )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "numpy", "pydantic"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device": f"CPU, {platform.machine()}", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Rows with the same columns, aligned; a column that a row lacks stays empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= 70 else text[:67] + "..."


def print_part(name: str, found: dict[str, Any]) -> None:
    print(f"\n== {name}: {found['status']} in {found['seconds']} s, {len(found['rows'])} rows")
    if found["rows"]:
        print(table(found["rows"]))
    for target in found["targets"]:
        verdict = "met" if target["met"] else "NOT MET"
        print(f"target {target['target']}: {target['value']:.3g}, wanted {target['wanted']:.3g}: {verdict}")
    for note in found["notes"]:
        print(f"note: {note}")
    for failure in found["failures"]:
        print(f"FAILED: {failure}")
