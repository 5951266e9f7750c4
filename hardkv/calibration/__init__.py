"""Calibrators: scores of any scorer to probabilities that mean the same in every head, in the same order."""
