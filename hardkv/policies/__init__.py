"""Policies: what a token is worth (`scorers`) and how many tokens a head may keep (`budgets`)."""
