"""The command line: `hardkv generate`, `compare`, `info`, `plugins`, `new-plugin`, `config`; one file per command."""

from __future__ import annotations

from hardkv.cli.app import main

__all__ = ["main"]
