"""`python -m tests.aot.table` compiles every case and prints the table; `--json FILE` writes it for the docs."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from tests.aot.cases import CASES, TARGETS
from tests.aot.harness import Compiled, Row

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "kernels_aot.json"
COMMAND = "python -m tests.aot.table --json benchmarks/results/kernels_aot.json"


def compile_one(case: int, target: int) -> list[Compiled] | Exception:
    """The kernels of one case, or why there are none."""
    try:
        return CASES[case].compile(target)
    except Exception as error:  # reported by the test of this case, not by the first that asks
        return RuntimeError(f"{type(error).__name__}: {error}")


def compile_all() -> dict[tuple[int, int], list[Compiled] | Exception]:
    """Every case by its place in `CASES` and its target, compiled by one process for each core."""
    keys = list(product(range(len(CASES)), TARGETS))
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        return dict(zip(keys, pool.map(compile_one, *zip(*keys, strict=True)), strict=True))


def rows(compiled: Iterable[list[Compiled] | Exception]) -> list[Row]:
    """The rows of the table, each once: two cases may launch the same kernel."""
    found: dict[Row, None] = {}
    for kernels in compiled:
        if isinstance(kernels, Exception):
            raise kernels
        found.update(dict.fromkeys(kernel.row for kernel in kernels))
    return list(found)


def text(table: Iterable[Row]) -> str:
    """The table as lines of text."""
    lines = [f"{'kernel':<24}{'variant':<24}{'dtype':<10}{'D':>4}  target  registers  shared bytes  spills"]
    lines += [
        f"{row.kernel:<24}{row.variant:<24}{row.dtype:<10}{row.head_dim:>4}   sm_{row.target}"
        f"  {row.registers:>9}  {row.shared_bytes:>12}  {row.spills:>6}"
        for row in table
    ]
    return "\n".join(lines)


def _written(table: list[Row]) -> dict[str, Any]:
    import triton

    return {"command": COMMAND, "versions": {"triton": triton.__version__}, "rows": [asdict(row) for row in table]}


def main() -> None:
    """Compile, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    chosen = parser.parse_args()
    table = rows(compile_all().values())
    sys.stdout.write(text(table) + "\n")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(_written(table), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
