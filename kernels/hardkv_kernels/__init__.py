"""Attention and cache kernels: torch custom operators with a plain-torch form and, for CUDA, a Triton one."""

from hardkv_kernels.append import append, append_plain, open_slots
from hardkv_kernels.attend_pages import PageRun, attend_pages, page_run
from hardkv_kernels.attend_slots import attend_slots
from hardkv_kernels.causal_attention import causal_attention
from hardkv_kernels.merge_states import merge_states
from hardkv_kernels.ragged_decode import ragged_decode
from hardkv_kernels.rewrite import rewrite
from hardkv_kernels.score_update import score_update
from hardkv_kernels.threshold_budget import threshold_budget
from hardkv_kernels.topp_threshold import topp_threshold
from hardkv_kernels.window_scores import window_scores
from hardkv_kernels.work_list import plan_decode

__all__ = [
    "PageRun",
    "append",
    "append_plain",
    "attend_pages",
    "attend_slots",
    "causal_attention",
    "merge_states",
    "open_slots",
    "page_run",
    "plan_decode",
    "ragged_decode",
    "rewrite",
    "score_update",
    "threshold_budget",
    "topp_threshold",
    "window_scores",
]
