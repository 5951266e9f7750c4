"""Moves slots to their rank among the valid ones and back, so that holes don't count."""

from __future__ import annotations

from torch import Tensor


def pack(slots: Tensor, valid: Tensor) -> Tensor:
    """Move `slots [B, H, N, D]` so that valid ones come first, in order; what is left over is zero."""
    batch, heads, count, dim = slots.shape
    # Invalid slots go to one row too many, which is cut off.
    rank = slot_rank(valid).masked_fill(~valid, count)[..., None].expand_as(slots)
    packed = slots.new_zeros(batch, heads, count + 1, dim)
    packed.scatter_(2, rank, slots.masked_fill(~valid[..., None], 0))
    return packed[:, :, :count]


def unpack(packed: Tensor, valid: Tensor) -> Tensor:
    """Give each slot what stands at its rank in `packed [B, H, N]`; of no meaning where not `valid [B, H, N]`."""
    return packed.gather(-1, slot_rank(valid))


def slot_rank(valid: Tensor) -> Tensor:
    """How many valid slots come before each valid slot, `[B, H, N]` int64; some other rank elsewhere."""
    return (valid.cumsum(-1) - 1).clamp_min(0)
