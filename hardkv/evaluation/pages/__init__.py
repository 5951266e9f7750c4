"""Result files as one page that opens anywhere, without a network."""

from __future__ import annotations

from hardkv.evaluation.pages.page import Result, read_result, write_page

__all__ = ["Result", "read_result", "write_page"]
