"""Turns a growing list of token ids into text, piece by piece, and watches for stop texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT_TOKENS = 6


class Detokenizer:
    """Incremental decoding of one sequence; gives only text that later tokens cannot change."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, [text for text in stop if text]
        self.token_ids: list[int] = []
        self.stopped = False
        self._decoded_from = 0
        self._known = 0
        self._pending = ""

    def add(self, token_id: int) -> str:
        """Take one token; gives the text that is now certain. Sets `stopped` when a stop text has appeared."""
        self.token_ids.append(token_id)
        before = self._decode(self.token_ids[self._decoded_from : self._known])
        now = self._decode(self.token_ids[self._decoded_from :])
        if now.endswith("\ufffd"):  # part of a character: more bytes are to come
            return ""
        self._pending += now[len(before) :]
        self._decoded_from = max(self._known - _CONTEXT_TOKENS, 0)
        self._known = len(self.token_ids)
        return self._release()

    def flush(self) -> str:
        """The rest, once no token follows."""
        before = self._decode(self.token_ids[self._decoded_from : self._known])
        rest = self._pending + self._decode(self.token_ids[self._decoded_from :])[len(before) :]
        self._pending, self._known = "", len(self.token_ids)
        return "" if self.stopped else rest

    def _release(self) -> str:
        found = [(self._pending.find(text), text) for text in self.stop if text in self._pending]
        if found:
            self.stopped = True
            certain, self._pending = self._pending[: min(found)[0]], ""
            return certain
        held = max((_overlap(self._pending, text) for text in self.stop), default=0)
        cut = len(self._pending) - held
        certain, self._pending = self._pending[:cut], self._pending[cut:]
        return certain

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
