"""Budgets: how many tokens each head keeps."""
