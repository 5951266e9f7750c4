"""The result of `hardkv eval fidelity`: rows that are on the disk as soon as they are measured, and can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hardkv.errors import InputError
from hardkv.evaluation.faithful.panel import LAYER_KEYS, Row, RowKey, Task, key_of

KIND = "fidelity"
DEFAULT = "default"


class Results:
    """Rows by their key; `path` is written anew, whole or not at all, with every one.

    `head`: what the result says of itself. Its `settings` decide about every row.
    """

    def __init__(self, head: Mapping[str, Any], path: Path | None) -> None:
        self.head, self.path = dict(head), path
        self.rows: dict[RowKey, Row] = {}

    def resume(self) -> None:
        """Take over the rows of the file, if there is one.

        Raises:
            InputError: it is no such result, or was made with other settings; names the first that differs.
        """
        before = _read(self.path)
        if before is None:
            return
        if before.get("kind") != KIND:
            raise InputError(f"--resume: {self.path} is no result of 'hardkv eval fidelity'; give another --output")
        differs = first_difference(before["settings"], _plain(self.head["settings"]))
        if differs is not None:
            raise InputError(
                f"--resume: {self.path} was made with other settings: {differs}. Give those, or another --output"
            )
        self.rows = {key_of(row): row for row in before["rows"]}

    def check_unbroken(self) -> None:
        """Refuse to overwrite a result that was broken off.

        Raises:
            InputError: says how to go on.
        """
        before = _read(self.path)
        if before is not None and before.get("kind") == KIND and not before.get("complete"):
            raise InputError(f"--output {self.path}: holds an unfinished result; --resume continues it, or delete it")

    def has(self, task: Task, pending: Collection[RowKey]) -> bool:
        """Whether the row is there and whole, or its layers are `pending`; one that failed is not.

        Raises:
            InputError: it was measured with other settings.
        """
        row = self.rows.get(task.key)
        if row is None or row["kl"] is None:
            return False
        solved = {name.split(".")[1]: value for name, value in row["solved"].items()}
        components = {**task.method.components, "budget": {**task.method.components["budget"], **solved}}
        asked = _plain({**components, "cache": task.method.cache})
        differs = first_difference({**row["components"], "cache": row["cache"]}, asked)
        if differs is not None:
            raise InputError(
                f"--resume: row '{row['method']}' of {self.path} was made with other settings: {differs}. Give those,"
                " another name, or another --output"
            )
        return not self.head["settings"]["layers"] or row[LAYER_KEYS[0]] is not None or task.key in pending

    def put(self, row: Row, complete: bool = False) -> None:
        """Add or replace a row, and write."""
        self.rows[key_of(row)] = _plain(row)
        self.write(complete)

    def write(self, complete: bool) -> None:
        """Write the file, if there is to be one.

        Raises:
            InputError: it cannot be written.
        """
        if self.path is None:
            return
        part = self.path.with_name(f"{self.path.name}.part")
        try:
            part.write_text(json.dumps(self.found(complete), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(part, self.path)
        except OSError as error:
            raise InputError(f"--output {self.path}: cannot be written: {error.strerror}") from None

    def found(self, complete: bool) -> dict[str, Any]:
        """The result for JSON; `complete`: whether every row had its turn."""
        rows = sorted(self.rows.values(), key=lambda row: (row["rounds"], -(row["mean_budget"] or 1 << 62)))
        return {**_plain(self.head), "complete": complete, "rows": [self._with_ratios(row) for row in rows]}

    def _with_ratios(self, row: Row) -> Row:
        """The default's row says how its KL compares with each other's, at the same rounds and mean budget."""
        if row["method"] != DEFAULT or row["kl"] is None:
            return row
        others = [other for key, other in self.rows.items() if key[:2] == key_of(row)[:2] and other is not row]
        ratios = {other["method"]: row["kl"] / other["kl"] for other in others if other["kl"]}
        return {**row, "kl_ratio_to": ratios}


def first_difference(theirs: Any, ours: Any, path: str = "") -> str | None:
    """The first setting that is another, as `path: a there, b now`; None where all are equal."""
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return None if theirs == ours else f"{path}: {theirs!r} there, {ours!r} now"
    inner = (
        first_difference(theirs.get(key), ours.get(key), f"{path}.{key}" if path else key)
        for key in dict.fromkeys([*theirs, *ours])
    )
    return next((found for found in inner if found is not None), None)


def _read(path: Path | None) -> dict[str, Any] | None:
    if path is None or not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(value))
