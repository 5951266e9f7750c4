"""Regularizers: how a ragged selection becomes a static layout."""
