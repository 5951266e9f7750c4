"""The smallest probability that a top-p set holds, row by row."""

# The arguments of kernels are Triton values, and Triton evaluates the annotations it meets: they carry none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from hardkv_kernels._triton import jit, on_device, tl, triton

_BLOCK_TOKENS = 4096


@torch.library.custom_op("hardkv::topp_threshold", mutates_args=())
def topp_threshold(probabilities: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Give each row's pivot `tau [...]` float32 and `count [...]` int64: how many of its largest values cover `p`.

    `probabilities [..., N]` float32, not negative, of any sum; N at least 1. In descending order, a value is chosen
    while those before it cover less than `p`, in (0, 1], of the row's sum, and if it is above 0; `tau` is the last one
    chosen. Of values equal to tau some may be chosen and some not: count says how many are in all. A row without a
    positive value has tau = inf and count = 0. Sums are float32, so that a value on the boundary may fall on either
    side; `p = 1` is exact.
    """
    if p >= 1.0:
        return _all_positive(probabilities)
    ranked = torch.sort(probabilities, dim=-1, descending=True).values
    covered = torch.cumsum(ranked, -1)
    before = torch.nn.functional.pad(covered[..., :-1], (1, 0))
    chosen = (before < p * covered[..., -1:]) & (ranked > 0)
    return torch.where(chosen, ranked, float("inf")).amin(-1), chosen.sum(-1)


def _all_positive(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """The pivot where every positive value is chosen, which float sums cannot tell from nearly every."""
    positive = probabilities > 0
    return torch.where(positive, probabilities, float("inf")).amin(-1), positive.sum(-1)


@topp_threshold.register_fake
def _fake(probabilities: Tensor, p: float) -> tuple[Tensor, Tensor]:
    rows = probabilities.shape[:-1]
    return probabilities.new_empty(rows), probabilities.new_empty(rows, dtype=torch.int64)


def launch_topp_threshold(probabilities: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """`topp_threshold` by the Triton kernel: one program a row, which bisects tau and never sorts."""
    if p >= 1.0:
        return _all_positive(probabilities)
    tokens = probabilities.shape[-1]
    rows = probabilities.contiguous().view(-1, tokens)
    tau = rows.new_empty(probabilities.shape[:-1])
    count = rows.new_empty(probabilities.shape[:-1], dtype=torch.int64)
    if rows.shape[0]:
        block = min(triton.next_power_of_2(tokens), _BLOCK_TOKENS)
        warps = max(1, min(8, block // 256))
        topp_threshold_kernel[(rows.shape[0],)](rows, tau, count, p, tokens, BLOCK_N=block, num_warps=warps)
    return tau, count


topp_threshold.register_kernel("cuda")(on_device(launch_topp_threshold))


@jit
def topp_threshold_kernel(p_rows, p_tau, p_count, share, tokens, BLOCK_N: tl.constexpr):
    """One program a row: the smallest tau such that values above it cover less than `share`, then its ties."""
    row = tl.program_id(0).to(tl.int64)
    p_row = p_rows + row * tokens
    low = tl.full((), 0, tl.int32)  # the values above 0 cover the whole row
    high = tl.full((), 0x7F800000, tl.int32)  # none is above infinity, which stays when the row is all zero
    target = _covered(p_row, low, tokens, BLOCK_N) * share
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = _covered(p_row, middle, tokens, BLOCK_N) < target
        low = tl.where(enough, low, middle)
        high = tl.where(enough, middle, high)
    b_above = tl.zeros([BLOCK_N], tl.int32)
    b_equal = tl.zeros([BLOCK_N], tl.int32)
    for first in range(0, tokens, BLOCK_N):
        b_bits = _bits(_values(p_row, first, tokens, BLOCK_N))
        b_above += (b_bits > high).to(tl.int32)
        b_equal += (b_bits == high).to(tl.int32)
    equal = tl.sum(b_equal, 0)
    tau = high.to(tl.float32, bitcast=True)
    missing = (target - _covered(p_row, high, tokens, BLOCK_N)) / tau
    chosen = tl.minimum(tl.ceil(tl.minimum(missing, equal.to(tl.float32))).to(tl.int32), equal)
    tl.store(p_tau + row, tau)
    tl.store(p_count + row, (tl.sum(b_above, 0) + tl.maximum(chosen, tl.minimum(equal, 1))).to(tl.int64))


@jit
def _covered(p_row, bits, tokens, BLOCK_N: tl.constexpr):
    """Sum of the values of a row above the float whose bits are given; non-negative floats order as their bits do."""
    b_sum = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, tokens, BLOCK_N):
        b_values = _values(p_row, first, tokens, BLOCK_N)
        b_sum += tl.where(_bits(b_values) > bits, b_values, 0.0)
    return tl.sum(b_sum, 0)


@jit
def _values(p_row, first, tokens, BLOCK_N: tl.constexpr):
    b_columns = first + tl.arange(0, BLOCK_N)
    return tl.load(p_row + b_columns, mask=b_columns < tokens, other=0.0)


@jit
def _bits(b_values):
    return b_values.to(tl.int32, bitcast=True)
