"""Plain torch forms of every kernel: the oracle, and the path that runs on a CPU.

Axes: O owners (one per sequence and KV head), n pages, S slots per page, G query heads per KV head, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min
NEGLIGIBLE = -60.0
"""Logits this far below the top add nothing to a float32 sum; their exponentials would end as slow denormals."""


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    owner: Tensor,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    with_probabilities: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend one query per owner over the pages it owns, pages being the split-K unit.

    `query [O, G, D]`; `keys, values [n, S, D]`, any order of pages; `bias [n, S]` float32, added to the logits: 0 for a
    kept slot, -inf for an empty or dropped one, a log-bias for a merged one; `owner [n]` int64 in [0, O], O for a page
    that nobody owns. `sink_logits [O, G]` float32 join the denominator only. Gives `out [O, G, D]` in the query's
    dtype, `lse [O, G]` float32 and, when asked, `probabilities [n, G, S]` float32 (else an empty tensor). Softmax and
    sums accumulate in float32.
    """
    owners, group, head_dim = query.shape
    pages = keys.shape[0]
    # A page of nobody reads the last owner's query; its weights go to a row of their own that is thrown away.
    rows = query.index_select(0, owner.clamp(max=owners - 1))  # [n, G, D]
    logits = torch.bmm(rows, keys.transpose(1, 2))  # [n, G, S]
    if softcap is None:
        weights = torch.add(bias[:, None, :], logits, alpha=scaling)
    else:
        weights = torch.tanh(logits.float() * (scaling / softcap)).mul_(softcap).add_(bias[:, None, :])
    top = torch.full((owners + 1, group), LOWEST, device=query.device, dtype=torch.float32)
    top.scatter_reduce_(0, owner[:, None].expand(pages, group), weights.amax(-1), "amax")
    if sink_logits is not None:
        top[:owners] = torch.maximum(top[:owners], sink_logits)
    weights.sub_(top.index_select(0, owner)[:, :, None])
    torch.threshold_(weights, NEGLIGIBLE, float("-inf")).exp_()
    total = torch.zeros_like(top).index_add_(0, owner, weights.sum(-1))
    if sink_logits is not None:
        total[:owners] += torch.exp(sink_logits - top[:owners])
    lse = (top + torch.log(total))[:owners]  # -inf for an owner that sees nothing
    inverse = total.clamp_min_(torch.finfo(torch.float32).tiny).reciprocal_()
    partial = torch.bmm(weights.to(values.dtype), values)  # [n, G, D]
    out = torch.zeros(owners + 1, group * head_dim, device=query.device, dtype=torch.float32)
    out.index_add_(0, owner, partial.view(pages, group * head_dim).float())
    out = out.view(owners + 1, group, head_dim)[:owners] * inverse[:owners, :, None]
    if not with_probabilities:
        return out.to(query.dtype), lse, weights.new_empty(0)
    return out.to(query.dtype), lse, weights.mul_(inverse.index_select(0, owner)[:, :, None])


def attend_slots(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend `query [H, G, D]` over padded `keys, values [H, N, D]` with `bias [H, N]`: `(out, lse)` in float32.

    The answer of one tier alone, for composition by log-sum-exp: `out [H, G, D]`, `lse [H, G]`; a head with no slot
    answers zeros and -inf. Slots with a bias of -inf may hold anything.
    """
    live = ~torch.isneginf(bias)
    logits = torch.matmul(query.float(), keys.float().masked_fill(~live[..., None], 0.0).transpose(-1, -2)) * scaling
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits + bias[:, None, :]
    lse = torch.logsumexp(logits, -1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], float("-inf"))
    weights = torch.exp(logits - lse.clamp_min(LOWEST)[..., None])
    return torch.matmul(weights, values.float().masked_fill(~live[..., None], 0.0)), lse


def merge_states(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Combine partial attention results `outs [..., D]`, `lses [...]` into one softmax over all their slots."""
    lse = torch.logsumexp(torch.stack(lses), 0)
    finite = lse.clamp_min(LOWEST)
    total = sum(torch.exp(part - finite)[..., None] * out for out, part in zip(outs, lses, strict=True))
    assert isinstance(total, Tensor)
    return total, lse


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
