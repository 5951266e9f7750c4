"""Token counts per head such that one threshold on their values meets a total."""

# The arguments of kernels are Triton values, and Triton evaluates the annotations it meets: they carry none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from hardkv_kernels._triton import jit, on_device, tl, triton


@torch.library.custom_op("hardkv::threshold_budget", mutates_args=())
def threshold_budget(value: Tensor, protected: Tensor, floor: Tensor, cap: Tensor, total: Tensor) -> Tensor:
    """Give counts `[Q, K]` int64 that sum to `total [Q]` in each of Q groups of K heads.

    A head keeps its `protected [Q, K]` tokens and those of `value [Q, K, N]` float32 that reach the group's threshold
    tau, clamped to `[floor, cap]`, both `[Q, K]`. Values are not negative, no -0.0; -1 marks a token that is not to be
    counted (protected, or not there). tau is bisected over the bits of a float32, so it is exact. Ties at tau are
    shared out in proportion. Counts and limits are int64, and `floor.sum(-1) <= total <= cap.sum(-1)`.
    """
    # The order of non-negative floats is that of their bits; those of -1 are negative, and reach no tau.
    bits = value.contiguous().view(torch.int32)

    def count(tau: Tensor) -> Tensor:
        reached = (bits >= tau[:, None, None]).sum(-1)
        return torch.minimum(torch.maximum(reached + protected, floor), cap)

    low = torch.zeros_like(total, dtype=torch.int32)  # count(low) >= total
    high = torch.full_like(low, torch.iinfo(torch.int32).max)  # count(high) <= total
    for _ in range(32):
        middle = low + (high - low) // 2
        enough = count(middle).sum(-1) >= total
        low = torch.where(enough, middle, low)
        high = torch.where(enough, high, middle)
    fewer, more = count(high), count(low)
    return fewer + _share_out(more - fewer, total - fewer.sum(-1))


def _share_out(ties: Tensor, missing: Tensor) -> Tensor:
    """Give `missing [Q]` tokens to heads with `ties [Q, K]` to offer, in proportion, the same shape.

    The r-th token of a head that offers t is taken at level (r - 1/2) / t, lower levels first, then earlier heads: one
    fixed order, so that a head never gains when others join and less is missing. Proportions rounded anew would let it.
    """
    below = torch.zeros_like(missing, dtype=torch.float64)  # tokens at this level <= missing
    above = torch.ones_like(below)  # tokens at this level >= missing

    def taken(level: Tensor) -> Tensor:
        return torch.floor(ties * level[:, None] + 0.5).long()

    for _ in range(52):
        middle = (below + above) / 2
        few = taken(middle).sum(-1) <= missing
        below = torch.where(few, middle, below)
        above = torch.where(few, above, middle)
    base = taken(below)
    offered = taken(above) - base
    left = (missing - base.sum(-1))[:, None]
    return base + torch.minimum((left - torch.cumsum(offered, -1) + offered).clamp_min(0), offered)


@threshold_budget.register_fake
def _fake(value: Tensor, protected: Tensor, floor: Tensor, cap: Tensor, total: Tensor) -> Tensor:
    return torch.empty_like(protected)


def launch_threshold_budget(value: Tensor, protected: Tensor, floor: Tensor, cap: Tensor, total: Tensor) -> Tensor:
    """`threshold_budget` by a sort and the Triton kernel: one program a group, all heads at once."""
    groups, heads, tokens = value.shape
    counts = torch.empty(groups, heads, dtype=torch.int64, device=value.device)
    if counts.numel() == 0:
        return counts
    ranked = torch.sort(value.contiguous(), dim=-1, descending=True).values.view(torch.int32)
    limits = (protected.contiguous(), floor.contiguous(), cap.contiguous(), total.contiguous())
    block = triton.next_power_of_2(heads)
    threshold_budget_kernel[(groups,)](
        ranked,
        *limits,
        counts,
        heads,
        tokens,
        tokens.bit_length(),
        BLOCK_K=block,
        num_warps=max(1, min(8, block // 128)),
        enable_fp_fusion=False,  # a fused ties * level + 0.5 rounds once: other counts than the reference
    )
    return counts


threshold_budget.register_kernel("cuda")(on_device(launch_threshold_budget))


@jit
def threshold_budget_kernel(
    p_ranked,
    p_protected,
    p_floor,
    p_cap,
    p_total,
    p_counts,
    heads,
    tokens,
    search_steps,
    BLOCK_K: tl.constexpr,
):
    """One program a group: bisect tau over float bits, each head counted by binary search; then share out the ties."""
    group = tl.program_id(0).to(tl.int64)
    b_heads = tl.arange(0, BLOCK_K)
    b_live = b_heads < heads
    b_ids = group * heads + b_heads
    b_protected = tl.load(p_protected + b_ids, mask=b_live, other=0)
    b_floor = tl.load(p_floor + b_ids, mask=b_live, other=0)
    b_cap = tl.load(p_cap + b_ids, mask=b_live, other=0)  # 0 in the padding: it counts nothing
    total = tl.load(p_total + group)
    p_rows = p_ranked + b_ids * tokens
    low = tl.full((), 0, tl.int32)  # counts at low sum to total or more
    high = tl.full((), 0x7FFFFFFF, tl.int32)  # counts at high sum to total or less
    for _ in range(32):
        middle = low + (high - low) // 2
        b_count = _count(p_rows, middle, tokens, search_steps, b_live, b_protected, b_floor, b_cap, BLOCK_K)
        enough = tl.sum(b_count, 0) >= total
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    b_fewer = _count(p_rows, high, tokens, search_steps, b_live, b_protected, b_floor, b_cap, BLOCK_K)
    b_more = _count(p_rows, low, tokens, search_steps, b_live, b_protected, b_floor, b_cap, BLOCK_K)
    b_counts = b_fewer + _shared_out(b_more - b_fewer, total - tl.sum(b_fewer, 0))
    tl.store(p_counts + b_ids, b_counts, mask=b_live)


@jit
def _count(
    p_rows,
    tau,
    tokens,
    search_steps,
    b_live,
    b_protected,
    b_floor,
    b_cap,
    BLOCK_K: tl.constexpr,
):
    """Tokens each head keeps at tau: a binary search in its descending row, all heads in step."""
    b_low = tl.zeros([BLOCK_K], tl.int32)
    b_high = tl.full([BLOCK_K], tokens, tl.int32)
    for _ in range(search_steps):
        b_open = b_low < b_high
        b_middle = (b_low + b_high) // 2
        b_reaches = tl.load(p_rows + b_middle, mask=b_live & b_open, other=-1) >= tau
        b_low = tl.where(b_open & b_reaches, b_middle + 1, b_low)
        b_high = tl.where(b_open & (b_reaches == 0), b_middle, b_high)
    return tl.minimum(tl.maximum(b_low + b_protected, b_floor), b_cap)


@jit
def _shared_out(b_ties, missing):
    """See `_share_out`."""
    below = tl.full((), 0.0, tl.float64)
    above = tl.full((), 1.0, tl.float64)
    for _ in range(52):
        middle = (below + above) * 0.5
        few = tl.sum(_taken(b_ties, middle), 0) <= missing
        below = tl.where(few, middle, below)
        above = tl.where(few, above, middle)
    b_base = _taken(b_ties, below)
    b_offered = _taken(b_ties, above) - b_base
    b_left = missing - tl.sum(b_base, 0) - tl.cumsum(b_offered, 0) + b_offered
    return b_base + tl.minimum(tl.maximum(b_left, 0), b_offered)


@jit
def _taken(b_ties, level):
    return tl.floor(b_ties.to(tl.float64) * level + 0.5).to(tl.int64)
