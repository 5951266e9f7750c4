"""Causal attention of the last rows of a prompt, exact, with sliding windows, softcap and sinks."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sink_logits: Tensor | None,
    block_rows: int = 256,
) -> Tensor:
    """Attend the last `C` of `M` tokens causally: `query [H, G, C, D]`, `keys, values [H, M, D]`, out like the query.

    `window`: a query sees only that many tokens, itself included. `sink_logits [H, G]` join the denominator only.
    Rows are done in blocks where scores must be materialised (softcap, sinks).
    """
    rows, tokens = query.shape[2], keys.shape[1]
    if softcap is None and sink_logits is None:
        return _causal_sdpa(query, keys, values, scaling, window)
    out = torch.empty_like(query)
    key_index = torch.arange(tokens, device=query.device)
    for first in range(0, rows, block_rows):
        block = query[:, :, first : first + block_rows].float()
        logits = torch.matmul(block, keys.float()[:, None].transpose(-1, -2)) * scaling
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        row_index = torch.arange(first, first + block.shape[2], device=query.device) + tokens - rows
        visible = key_index <= row_index[:, None]
        if window is not None:
            visible &= key_index > row_index[:, None] - window
        logits = logits.masked_fill(~visible, float("-inf"))
        if sink_logits is not None:
            sink = sink_logits[:, :, None, None].expand(*logits.shape[:-1], 1)
            weights = torch.softmax(torch.cat([logits, sink], -1), -1)[..., :-1]
        else:
            weights = torch.softmax(logits, -1)
        out[:, :, first : first + block_rows] = torch.matmul(weights, values.float()[:, None]).to(query.dtype)
    return out


def _causal_sdpa(query: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None) -> Tensor:
    heads, group, rows, head_dim = query.shape
    tokens = keys.shape[1]
    if window is not None and tokens > rows + window - 1:
        first = tokens - rows - window + 1
        keys, values, tokens = keys[:, first:], values[:, first:], tokens - first
    flat = query.reshape(1, heads * group, rows, head_dim)
    wide_keys, wide_values = (tensor.repeat_interleave(group, 0)[None] for tensor in (keys, values))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if tokens == rows and (window is None or window >= tokens):
        out = sdpa(flat, wide_keys, wide_values, is_causal=True, scale=scaling)
    else:
        row = torch.arange(tokens - rows, tokens, device=query.device)[:, None]
        key = torch.arange(tokens, device=query.device)
        visible = key <= row
        if window is not None:
            visible &= key > row - window
        out = sdpa(flat, wide_keys, wide_values, attn_mask=visible, scale=scaling)
    return out.reshape(query.shape)
