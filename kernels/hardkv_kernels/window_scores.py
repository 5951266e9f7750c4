"""Attention of a window of queries, reduced to one number per cached token; no `[W, N]` matrix in memory."""

# The arguments of kernels are Triton values, and Triton evaluates the annotations it meets: they carry none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hardkv_kernels._numbers import LOWEST, NEGLIGIBLE
from hardkv_kernels._triton import interprets, jit, on_device, tl, triton

_BLOCK_ELEMENTS = 1 << 20
"""Logits that the reference holds at once: 4 MB, so that the passes over them stay in a CPU's cache."""


@torch.library.custom_op("hardkv::window_scores", mutates_args=())
def window_scores(
    queries: Tensor,
    row_positions: Tensor,
    keys: Tensor,
    positions: Tensor,
    valid: Tensor,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    reduction: str,
    power: float,
    decay: float,
    floor: float,
    thresholds: Tensor | None,
) -> Tensor:
    """Reduce the attention of the last W queries over rows and query heads: `[B, H, N]` float32.

    `queries [B, H, G, W, D]` at `row_positions [B, W]` int64, oldest first, -1 for a row never written, which counts in
    nothing; `keys [B, H, N, D]` at `positions [B, H, N]` int64. A row sees the slots that are `valid [B, H, N]` bool
    and not newer than itself; `sink_logits [H, G]` float32 join its denominator only. With p the probabilities, 0 where
    a row does not see a slot:

    - `"max"`: the largest p over rows and group;
    - `"mean"`: the mean of p over group and written rows;
    - `"power"`: `sum_w decay ** (W - 1 - w) * mean_g max(p, floor) ** power` over written rows, power above 0;
    - `"votes"`: written rows that see the slot and whose group mean of p reaches `thresholds [B, H, W]` float32.

    Invalid slots get 0; their keys may hold anything.
    """
    batch, heads, group, rows, head_dim = queries.shape
    tokens = keys.shape[2]
    owners = batch * heads
    sees = valid.reshape(owners, tokens)
    flat_keys = keys.reshape(owners, tokens, head_dim).float().masked_fill(~sees[..., None], 0.0).transpose(1, 2)
    newest = row_positions[:, None].expand(batch, heads, rows).reshape(owners, rows)
    weights = _row_weights(newest >= 0, group, reduction, decay)  # [O, W]
    sink = None if sink_logits is None else sink_logits.expand(batch, heads, group).reshape(owners, group, 1, 1)
    scores = torch.zeros(owners, tokens, dtype=torch.float32, device=queries.device)
    step = max(1, _BLOCK_ELEMENTS // max(1, owners * group * tokens))
    for first in range(0, rows, step):
        span = slice(first, min(first + step, rows))
        block = queries[:, :, :, span].float().reshape(owners, -1, head_dim) * scaling  # [O, G * r, D]
        logits = torch.bmm(block, flat_keys).view(owners, group, -1, tokens)
        if softcap is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        visible = sees[:, None] & (positions.reshape(owners, 1, tokens) <= newest[:, span, None])  # [O, r, N]
        p = _softmax(logits.masked_fill_(~visible[:, None], float("-inf")), sink)
        if reduction == "max":
            torch.maximum(scores, p.amax((1, 2)), out=scores)
        elif reduction == "votes":
            assert thresholds is not None
            reached = p.mean(1) >= thresholds.reshape(owners, rows, 1)[:, span]
            scores += (reached & visible).sum(1)
        else:
            if reduction == "power":
                p = _power(p.clamp_(min=floor), power)
            block_weights = weights[:, None, None, span].expand(owners, 1, group, -1).reshape(owners, 1, -1)
            scores += torch.bmm(block_weights, p.view(owners, -1, tokens))[:, 0]
    return scores.masked_fill_(~sees, 0.0).view(batch, heads, tokens)


def _row_weights(written: Tensor, group: int, reduction: str, decay: float) -> Tensor:
    """Weight of each row `[O, W]` and query head in a weighted sum, 0 for rows never written."""
    weights = written.float()
    if reduction == "mean":
        return weights / (group * written.sum(-1, keepdim=True).clamp_min(1))
    rows = written.shape[-1]
    age = torch.arange(rows - 1, -1, -1, device=written.device, dtype=torch.float32)
    return weights * torch.pow(decay, age) / group


def _softmax(logits: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax over the last axis, in place; zeros for a row of -inf. `sink` broadcasts to one more logit of a row."""
    top = logits.amax(-1, keepdim=True).clamp_min_(LOWEST)
    if sink is not None:
        top = torch.maximum(top, sink)
    weights = torch.threshold_(logits.sub_(top), NEGLIGIBLE, float("-inf")).exp_()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total += torch.exp(sink - top)
    return weights.mul_(total.clamp_min_(torch.finfo(torch.float32).tiny).reciprocal_())


def _power(p: Tensor, power: float) -> Tensor:
    # Two squarings are far cheaper than a general power on a CPU.
    return p.square_().square_() if power == 4.0 else p.pow_(power)


@window_scores.register_fake
def _fake(queries: Tensor, row_positions: Tensor, keys: Tensor, *_: object) -> Tensor:
    return keys.new_empty(keys.shape[:3], dtype=torch.float32)


def launch_window_scores(
    queries: Tensor,
    row_positions: Tensor,
    keys: Tensor,
    positions: Tensor,
    valid: Tensor,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    reduction: str,
    power: float,
    decay: float,
    floor: float,
    thresholds: Tensor | None,
) -> Tensor:
    """`window_scores` by two Triton kernels: the rows' log-sum-exp, then the reduction over rows, tile by tile of N."""
    batch, heads, group, rows, head_dim = queries.shape
    tokens = keys.shape[2]
    scores = torch.empty(batch, heads, tokens, dtype=torch.float32, device=queries.device)
    if scores.numel() == 0:
        return scores
    lse = torch.empty(batch, heads, group, rows, dtype=torch.float32, device=queries.device)
    if keys.stride(-1) != 1:
        keys = keys.contiguous()
    inputs = (queries.contiguous(), row_positions.contiguous(), keys, positions.contiguous(), valid.contiguous())
    sizes = (heads, group, rows, tokens, head_dim, *keys.stride()[:3])
    logits = (scaling, 1.0 if softcap is None else softcap)
    config = _config(queries.dtype, head_dim, softcap is not None)
    sinks = lse if sink_logits is None else sink_logits.contiguous()
    block_rows, block_tokens = config["BLOCK_M"], config["BLOCK_N"]
    row_lse_kernel[(triton.cdiv(group * rows, block_rows), batch * heads)](
        *inputs, sinks, lse, *logits, *sizes, HAS_SINKS=sink_logits is not None, **config
    )
    window_reduce_kernel[(triton.cdiv(tokens, block_tokens), batch * heads)](
        *inputs,
        lse,
        lse if thresholds is None else thresholds.contiguous(),
        scores,
        *logits,
        power,
        math.log2(max(decay, 1e-30)),
        math.log(floor) if floor > 0 else float("-inf"),
        *sizes,
        REDUCTION=reduction,
        **config,
    )
    return scores


window_scores.register_kernel("cuda")(on_device(launch_window_scores))


def _config(dtype: torch.dtype, head_dim: int, softcap: bool) -> dict[str, Any]:
    """Block sizes and launch options of both kernels, none of which spills registers."""
    full, block_dims = dtype == torch.float32, max(16, triton.next_power_of_2(head_dim))
    wide = block_dims > 128
    return {
        "HAS_SOFTCAP": softcap,
        "UPCAST": interprets() and dtype == torch.bfloat16,
        "BLOCK_M": 16 if full else 32 if wide else 64,
        "BLOCK_N": 32 if full else 64,
        "BLOCK_D": block_dims,
        "num_warps": 4 if block_dims <= 64 or (wide and not full) else 8,
        "num_stages": 2 if full else 3,
    }


@jit
def row_lse_kernel(
    p_queries,
    p_row_positions,
    p_keys,
    p_positions,
    p_valid,
    p_sinks,
    p_lse,
    scaling,
    softcap,
    heads,
    group,
    rows,
    tokens,
    head_dim,
    s_key_batch,
    s_key_head,
    s_key_token,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program a tile of the `group * rows` query rows of a head: natural log-sum-exp over all visible slots.

    A row that sees nothing gets +inf: its probabilities `exp(logit - lse)` are then 0.
    """
    owner = tl.program_id(1).to(tl.int64)
    batch = owner // heads
    head = owner % heads
    b_rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_live = b_rows < group * rows
    b_newest = tl.load(p_row_positions + batch * rows + b_rows % rows, mask=b_live, other=-1).to(tl.int32)
    b_query = _query(p_queries, owner * group * rows + b_rows, b_live, head_dim, UPCAST, BLOCK_D)
    b_top = tl.full([BLOCK_M], -3.4028234663852886e38, tl.float32)  # finite, so that -inf less it is -inf
    b_total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        b_sink = tl.load(p_sinks + head * group + b_rows // rows, mask=b_live, other=0.0).to(tl.float32)
        b_top = tl.maximum(b_top, b_sink)
        b_total = tl.exp(b_sink - b_top)
    p_head_keys = p_keys + batch * s_key_batch + head * s_key_head
    for first in range(0, tokens, BLOCK_N):
        b_slots = first + tl.arange(0, BLOCK_N)
        b_valid, b_positions = _slots(p_valid, p_positions, owner * tokens, b_slots, tokens)
        b_key = _key(p_head_keys, b_slots, b_valid, s_key_token, head_dim, UPCAST, BLOCK_D)
        b_visible = b_valid[None, :] & (b_positions[None, :] <= b_newest[:, None])
        b_logits = _logits(b_query, b_key, b_visible, scaling, softcap, HAS_SOFTCAP)
        b_next = tl.maximum(b_top, tl.max(b_logits, 1))
        b_total = b_total * tl.exp(b_top - b_next) + tl.sum(tl.exp(b_logits - b_next[:, None]), 1)
        b_top = b_next
    b_seen = b_total > 0.0
    b_lse = tl.where(b_seen, b_top + tl.log(tl.where(b_seen, b_total, 1.0)), float("inf"))
    tl.store(p_lse + owner * group * rows + b_rows, b_lse, mask=b_live)


@jit
def window_reduce_kernel(
    p_queries,
    p_row_positions,
    p_keys,
    p_positions,
    p_valid,
    p_lse,
    p_thresholds,
    p_scores,
    scaling,
    softcap,
    power,
    log2_decay,
    log_floor,
    heads,
    group,
    rows,
    tokens,
    head_dim,
    s_key_batch,
    s_key_head,
    s_key_token,
    REDUCTION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program a tile of slots of a head: probabilities of all rows, recomputed and reduced."""
    owner = tl.program_id(1).to(tl.int64)
    batch = owner // heads
    head = owner % heads
    b_slots = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_valid, b_positions = _slots(p_valid, p_positions, owner * tokens, b_slots, tokens)
    p_head_keys = p_keys + batch * s_key_batch + head * s_key_head
    b_key = _key(p_head_keys, b_slots, b_valid, s_key_token, head_dim, UPCAST, BLOCK_D)
    b_scores = tl.zeros([BLOCK_N], tl.float32)
    written = 0
    for first in range(0, rows, BLOCK_M):
        b_rows = first + tl.arange(0, BLOCK_M)
        b_live = b_rows < rows
        b_newest = tl.load(p_row_positions + batch * rows + b_rows, mask=b_live, other=-1).to(tl.int32)
        b_visible = b_valid[None, :] & (b_positions[None, :] <= b_newest[:, None])
        b_group = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for member in range(group):
            b_ids = (owner * group + member) * rows + b_rows
            b_query = _query(p_queries, b_ids, b_live, head_dim, UPCAST, BLOCK_D)
            b_lse = tl.load(p_lse + b_ids, mask=b_live, other=float("inf"))
            b_log = _logits(b_query, b_key, b_visible, scaling, softcap, HAS_SOFTCAP) - b_lse[:, None]
            if REDUCTION == "max":
                b_group = tl.maximum(b_group, tl.exp(b_log))
            elif REDUCTION == "power":
                b_group += tl.exp(power * tl.maximum(b_log, log_floor))
            else:
                b_group += tl.exp(b_log)
        if REDUCTION == "max":
            b_scores = tl.maximum(b_scores, tl.max(b_group, 0))
        elif REDUCTION == "votes":
            b_least = tl.load(p_thresholds + owner * rows + b_rows, mask=b_live, other=float("inf"))
            b_votes = b_visible & (b_group / group >= b_least[:, None])
            b_scores += tl.sum(b_votes.to(tl.float32), 0)
        elif REDUCTION == "power":
            b_weight = tl.where(b_newest >= 0, tl.exp2((rows - 1 - b_rows) * log2_decay), 0.0)
            b_scores += tl.sum(b_group * b_weight[:, None], 0) / group
        else:
            written += tl.sum((b_newest >= 0).to(tl.int32), 0)
            b_scores += tl.sum(b_group, 0)
    if REDUCTION == "mean":
        b_scores = b_scores / (group * tl.maximum(written, 1))
    tl.store(p_scores + owner * tokens + b_slots, tl.where(b_valid, b_scores, 0.0), mask=b_slots < tokens)


@jit
def _query(p_queries, b_ids, b_live, head_dim, UPCAST: tl.constexpr, BLOCK_D: tl.constexpr):
    """Query rows `[M, D]`."""
    b_dims = tl.arange(0, BLOCK_D)
    b_mask = b_live[:, None] & (b_dims[None, :] < head_dim)
    b_query = tl.load(p_queries + b_ids[:, None] * head_dim + b_dims[None, :], mask=b_mask, other=0.0)
    if UPCAST:
        b_query = b_query.to(tl.float32)
    return b_query


@jit
def _key(p_keys, b_slots, b_valid, s_token, head_dim, UPCAST: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys of a tile `[N, D]`; zeros at invalid slots, which may hold anything."""
    b_dims = tl.arange(0, BLOCK_D)
    b_mask = b_valid[:, None] & (b_dims[None, :] < head_dim)
    b_key = tl.load(p_keys + b_slots[:, None].to(tl.int64) * s_token + b_dims[None, :], mask=b_mask, other=0.0)
    if UPCAST:
        b_key = b_key.to(tl.float32)
    return b_key


@jit
def _slots(p_valid, p_positions, first, b_slots, tokens):
    """Which slots of a tile are valid, and their positions."""
    b_live = b_slots < tokens
    b_valid = tl.load(p_valid + first + b_slots, mask=b_live, other=0) != 0
    return b_valid, tl.load(p_positions + first + b_slots, mask=b_valid, other=0).to(tl.int32)


@jit
def _logits(b_query, b_key, b_visible, scaling, softcap, HAS_SOFTCAP: tl.constexpr):
    """Logits `[M, N]` float32, -inf where not visible."""
    b_logits = tl.dot(b_query, tl.trans(b_key), input_precision="ieee") * scaling
    if HAS_SOFTCAP:
        b_logits = softcap * (2.0 * tl.sigmoid(b_logits * (2.0 / softcap)) - 1.0)
    return tl.where(b_visible, b_logits, float("-inf"))
