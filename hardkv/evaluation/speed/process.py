"""A peer's process: started, asked in lines of JSON, ended. Whatever goes wrong there is one sentence here."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hardkv.errors import HardKVError


class PeerError(HardKVError):
    """A peer that did not do what it was asked; the message says why."""


class PeerProcess:
    """One worker. `timeout_s` holds for every question."""

    def __init__(self, command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> None:
        self.timeout_s = timeout_s
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (until close)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                encoding="utf-8",
                errors="replace",
                env={**_inherited(command[0]), **(environment or {})},
                start_new_session=True,  # so that what it starts itself can be ended with it
            )
        except OSError as error:
            self._said.close()
            raise PeerError(f"{command[0]}: cannot be started: {error.strerror}") from None
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """Send one request and wait for its reply.

        Raises:
            PeerError: an error there, silence, the process's end, or an answer that is none.
        """
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps({"do": do, **values}) + "\n")
            stdin.flush()
        except OSError:
            raise PeerError(self._ended(do)) from None
        try:
            line = self._lines.get(timeout=self.timeout_s)
        except queue.Empty:
            raise PeerError(f"{do}: no answer within {self.timeout_s:g} s; raise --timeout") from None
        if line is None:
            raise PeerError(self._ended(do))
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise PeerError(f"{do}: expected a line of JSON, got {line.strip()[:80]!r}")
        if "error" in reply:
            raise PeerError(f"{do}: {reply['error']}")
        return reply

    def close(self) -> None:
        """End the process, with all that it started."""
        with suppress(ProcessLookupError):  # it is gone already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a request that was never read
                pipe.close()
        self._said.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(ValueError):  # closed while reading
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _ended(self, do: str) -> str:
        code = self._process.wait()
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()]
        return f"{do}: the process ended with code {code}{': ' + lines[-1] if lines else ''}"


def _inherited(python: str) -> dict[str, str]:
    """This process's environment; another interpreter shall not find our packages in place of its own."""
    ours = () if python == sys.executable else ("PYTHONPATH", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in ours}
