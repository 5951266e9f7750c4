"""One decode step's attention probabilities, folded into the statistic that every cached token carries."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from hardkv_kernels._numbers import FLUSHED, NEGLIGIBLE
from hardkv_kernels._triton import jit, on_device, tl, triton

_SMALLEST = -84.0
"""A floor whose term has a smaller logarithm than this is near the denormals, and counts as none."""
BLOCK_SLOTS = 512
"""Slots of one program of the kernel: four of 128 threads each, one 16-byte load per query head."""


@torch.library.custom_op("hardkv::score_update", mutates_args=("statistic",))
def score_update(
    statistic: Tensor,
    logits: Tensor,
    page_owner: Tensor,
    lse: Tensor,
    first_owner: int,
    first_page: int,
    last_page: int,
    reduction: str,
    power: float,
    decay: float,
    floor: float,
) -> None:
    """Fold the probabilities of one decode step into `statistic [n, S]` float32, in place.

    `logits [n, G, S]` float32 are those `ragged_decode` wrote, `lse [O, G]` float32 is what it answered: a slot's
    probability is `p = max(exp(logits - lse), floor)`, with `exp` taken as 0 where the logit or the lse is -inf.
    `reduction` "power": `decay * statistic + mean over G of p ** power` (`power > 0`); "max": the maximum of the
    statistic and every p (`power` and `decay` are not read). Only the pages in `[first_page, last_page)` that
    `page_owner [n]` int64 gives to one of the owners `[first_owner, first_owner + O)` change; elsewhere the logits may
    be anything.
    """
    span = slice(first_page, last_page)
    owners = lse.shape[0]
    owner = page_owner[span] - first_owner  # [m]
    ours = (owner >= 0) & (owner < owners)
    shift = lse.masked_fill(torch.isneginf(lse), float("inf")).index_select(0, owner.clamp(0, owners - 1))  # [m, G]
    old, rows = statistic[span], logits[span]
    # Sums and maxima go over G slice by slice: a reduction over a middle axis is several times slower on a CPU.
    if reduction == "power":
        terms = torch.add(shift[:, :, None] * -power, rows, alpha=power)  # [m, G, S]
        summed = reduce(torch.add, _exp(terms, floor, power).unbind(1))  # [m, S]
        # A page that is not ours keeps all it has and gains nothing.
        old.mul_(torch.where(ours, decay, 1.0)[:, None])
        old.add_(torch.where(ours[:, None], summed, 0.0), alpha=1.0 / lse.shape[1])
    else:
        top = reduce(torch.maximum, torch.sub(rows, shift[:, :, None]).unbind(1))  # [m, S]
        torch.maximum(torch.where(ours[:, None], _exp(top, floor, 1.0), old), old, out=old)


def _lowest(floor: float, power: float) -> tuple[float, float]:
    """The logarithm from which down a term is replaced, and by what."""
    end = power * math.log(floor) if floor > 0.0 else float("-inf")
    return (end, math.exp(end)) if end > _SMALLEST else (NEGLIGIBLE, 0.0)


def _exp(terms: Tensor, floor: float, power: float) -> Tensor:
    """`max(exp(terms / power), floor) ** power`, in place."""
    low, lowest = _lowest(floor, power)
    # The exponential of -inf takes a CPU several times as long as that of a number.
    terms.clamp_min_(low).exp_()
    return terms if lowest > 0.0 else torch.threshold_(terms, FLUSHED, 0.0)


@score_update.register_fake
def _fake(*_: object) -> None:
    return None


def launch_score_update(
    statistic: Tensor,
    logits: Tensor,
    page_owner: Tensor,
    lse: Tensor,
    first_owner: int,
    first_page: int,
    last_page: int,
    reduction: str,
    power: float,
    decay: float,
    floor: float,
) -> None:
    """`score_update` as a kernel: a fixed number of slots for each program."""
    slots = statistic.shape[1]
    exponent = power if reduction == "power" else 1.0
    low, lowest = _lowest(floor, exponent)
    programs = triton.cdiv((last_page - first_page) * slots, BLOCK_SLOTS)
    if programs:
        score_update_kernel[(programs,)](
            statistic,
            logits,
            page_owner,
            lse,
            first_owner,
            lse.shape[0],
            first_page,
            last_page,
            exponent,
            decay,
            low,
            lowest,
            GROUP=lse.shape[1],
            SLOTS=slots,
            MAXIMUM=reduction != "power",
            BLOCK_SLOTS=BLOCK_SLOTS,
            num_warps=4,
        )


score_update.register_kernel("cuda")(on_device(launch_score_update))


@jit
def score_update_kernel(
    p_statistic,
    p_logits,
    p_page_owner,
    p_lse,
    first_owner,
    owners,
    first_page,
    last_page,
    power,
    decay,
    low,
    lowest,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    """One program: `BLOCK_SLOTS` slots that follow each other; `lowest` stands for a term whose log is below `low`."""
    b_index = tl.program_id(0).to(tl.int64) * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    b_page = first_page + b_index // SLOTS
    b_offset = b_index % SLOTS
    b_owner = tl.load(p_page_owner + b_page, mask=b_page < last_page, other=-1) - first_owner
    b_ours = (b_page < last_page) & (b_owner >= 0) & (b_owner < owners)
    b_statistic = tl.load(p_statistic + b_page * SLOTS + b_offset, mask=b_ours, other=0.0)
    b_sum = tl.zeros([BLOCK_SLOTS], tl.float32)
    for g in tl.static_range(GROUP):
        b_logit_at = (b_page * GROUP + g) * SLOTS + b_offset
        b_logit = tl.load(p_logits + b_logit_at, mask=b_ours, other=float("-inf"))
        b_lse = tl.load(p_lse + b_owner * GROUP + g, mask=b_ours, other=float("-inf"))
        # Under an lse of -inf nothing was seen, whatever the logit.
        b_term = power * (b_logit - tl.where(b_lse > float("-inf"), b_lse, float("inf")))
        b_term = tl.where(b_term > low, tl.exp(b_term), lowest)
        if MAXIMUM:
            b_statistic = tl.maximum(b_statistic, b_term)
        else:
            b_sum += b_term
    if not MAXIMUM:
        b_statistic = decay * b_statistic + b_sum * (1.0 / GROUP)
    tl.store(p_statistic + b_page * SLOTS + b_offset, b_statistic, mask=b_ours)
