"""Attention and cache kernels: torch custom operators with a plain-torch reference."""

from hardkv_kernels.ops import attend_slots, paged_attention
from hardkv_kernels.reference import causal_attention, merge_states

__all__ = ["attend_slots", "causal_attention", "merge_states", "paged_attention"]
