"""An append-only record of finished answers that survives a kill: one JSON object a line, on the disk before the next.

The first line holds what all answers of the file share. Only one process writes at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from hardkv.errors import InputError
from hardkv.evaluation.maths.sample import Sample, Task

_KIND = "hardkv-math-1"


class Journal:
    """Opens or begins a file, and takes finished answers.

    `settings`: what decides about an answer; `origin`: what is worth knowing besides, such as versions.

    Raises:
        InputError: another process writes the file, it is no such record, or its settings are others.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], origin: Mapping[str, Any]) -> None:
        self.path = path
        self.samples: dict[Task, Sample] = {}
        """What is finished; their texts are left in the file."""
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise InputError(f"--journal {path}: cannot be opened: {error.strerror}") from None
        try:
            self._lock()
            self._read(json.loads(json.dumps(settings)), origin)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def add(self, sample: Sample) -> None:
        """Write a finished answer; it is on the disk when this returns.

        Raises:
            InputError: it cannot be written, such as to a full disk.
        """
        if sample.task in self.samples:
            raise AssertionError(f"{sample.task} is there already")
        self._write(asdict(sample))
        self.samples[sample.task] = sample.without_text()

    def close(self) -> None:
        """Let others write."""
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"--journal {self.path}: another process is writing to it; wait for it, or give another file"
            ) from None

    def _read(self, settings: Any, origin: Mapping[str, Any]) -> None:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        lines = content[:whole].splitlines()
        if not lines:
            # A kill may have left a part of the first line; anything else is somebody's file.
            if not (json.dumps({"kind": _KIND}).encode()[:-1]).startswith(content[:20]):
                raise self._not_ours()
            os.ftruncate(self._file, 0)
            self._write({"kind": _KIND, "settings": settings, "origin": dict(origin)})
            self._sync_folder()
            return
        head = self._parsed(lines[0], 1)
        if head.get("kind") != _KIND:
            raise self._not_ours()
        self._compare(head["settings"], settings)
        os.ftruncate(self._file, whole)
        for number, line in enumerate(lines[1:], start=2):
            sample = Sample.from_dict(self._parsed(line, number)).without_text()
            if sample.task in self.samples:
                raise InputError(f"--journal {self.path}: line {number}: {sample.task} is there twice; remove one")
            self.samples[sample.task] = sample

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            if number == 1:
                raise self._not_ours()
            raise InputError(f"--journal {self.path}: line {number} is damaged; remove it, and its answer is made anew")
        return found

    def _compare(self, theirs: Any, ours: Any) -> None:
        differing = _differences(theirs, ours, "")
        if differing:
            shown = "; ".join(differing[:5]) + ("; ..." if len(differing) > 5 else "")
            raise InputError(
                f"--journal {self.path}: was made with other settings ({shown}). Give those, or another file"
            )

    def _not_ours(self) -> InputError:
        return InputError(f"--journal {self.path}: is no record of hardkv eval math; give another file")

    def _write(self, value: dict[str, Any]) -> None:
        rest = memoryview(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError as error:
            raise InputError(f"--journal {self.path}: cannot be written: {error.strerror}") from None

    def _sync_folder(self) -> None:
        """Make the new file's name as lasting as its content."""
        folder = os.open(self.path.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _differences(theirs: Any, ours: Any, path: str) -> list[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        found: list[str] = []
        for key in sorted({*theirs, *ours}):
            found += _differences(theirs.get(key), ours.get(key), f"{path}.{key}" if path else key)
        return found
    return [] if theirs == ours else [f"{path}: {theirs!r} there, {ours!r} now"]
