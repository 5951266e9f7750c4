"""Importance scorers, one per file; the file is named for the value of `name:`."""
