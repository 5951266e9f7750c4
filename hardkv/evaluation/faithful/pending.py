"""What caches held of rows whose layers are still to be judged, on the disk, so that a kill costs no row."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hardkv.errors import InputError
from hardkv.evaluation.faithful.held import Held
from hardkv.evaluation.faithful.panel import RowKey

Runs = list[list[Held]]
"""Of one row: for each text, what was held after each compression."""


class Pending:
    """Rows by their key, in order; beside the result of `path`, while there are any, lies a file of them."""

    def __init__(self, path: Path | None) -> None:
        self.path = None if path is None else path.with_name(f"{path.name}.held")
        self.runs: dict[RowKey, Runs] = {}

    def resume(self) -> None:
        """Take over what the file holds; a damaged one holds nothing, and its rows are measured again."""
        if self.path is None or not self.path.exists():
            return
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                for number, (key, text, since) in enumerate(json.loads(str(stored["index"]))):
                    texts = self.runs.setdefault((key[0], key[1], key[2]), [])
                    if text == len(texts):
                        texts.append([])
                    texts[text].append(Held(since, stored[f"bits_{number}"]))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            self.runs = {}

    def add(self, key: RowKey, runs: Runs) -> None:
        """Hold a row's runs until they are judged."""
        self.runs[key] = runs
        self._write()

    def of(self, rounds: int) -> dict[RowKey, Runs]:
        """The rows of one number of rounds: one panel's."""
        return {key: runs for key, runs in self.runs.items() if key[0] == rounds}

    def forget(self, keys: Iterable[RowKey]) -> None:
        """Let go of rows, and of the file after the last."""
        for key in keys:
            del self.runs[key]
        if self.runs:
            self._write()
        elif self.path is not None:
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self.path is None:
            return
        each = [(key, text, held) for key, runs in self.runs.items() for text, run in enumerate(runs) for held in run]
        arrays: dict[str, Any] = {f"bits_{number}": held.bits for number, (_, _, held) in enumerate(each)}
        index = json.dumps([(key, text, held.since) for key, text, held in each])
        part = self.path.with_name(f"{self.path.name}.part")
        try:
            with part.open("wb") as file:
                np.savez_compressed(file, index=np.array(index), **arrays)
            os.replace(part, self.path)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error.strerror}") from None
