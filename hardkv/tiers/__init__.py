"""Tiers of the cascade cache: dense, sparse, and the last tier that takes what a rewrite drops."""
