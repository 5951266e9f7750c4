"""A scorer for hardkv: newer tokens score higher."""
