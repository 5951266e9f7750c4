"""Scorer `kvpress` against the library kvpress; skipped where that is not installed, `make bridges` installs it."""
