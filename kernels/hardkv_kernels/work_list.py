"""The work list of a decode step, built on the device from page counts: who owns which page, in what order."""

from __future__ import annotations

import torch
from torch import Tensor


def plan_decode(
    block_table: Tensor, page_counts: Tensor, lanes: Tensor, page_starts: Tensor, page_owner: Tensor
) -> None:
    """Fill `page_starts [L, R * H + 1]` int32 and `page_owner [n]` int64 for the rows of a batch.

    `block_table [L, A, H, P]` int32 and `page_counts [L, A, H]` int32 say which pages each lane and head holds, `lanes
    [R]` int64 which lane each row stands for. Afterwards `page_starts[l]` are the prefix sums of the rows' page counts,
    and `page_owner` of a page is `(l * R + row) * H + h`, or `L * R * H` where no row owns it. The last of the n pages
    belongs to nobody. No host sync, no shape that depends on data.
    """
    layers, _, heads, width = block_table.shape
    rows, nobody = lanes.shape[0], layers * lanes.shape[0] * heads
    counts = page_counts.index_select(1, lanes)  # [L, R, H]
    page_starts[:, :1].zero_()
    torch.cumsum(counts.view(layers, rows * heads), 1, dtype=torch.int32, out=page_starts[:, 1:])
    pages = block_table.index_select(1, lanes).long()  # [L, R, H, P]
    held = torch.arange(width, device=lanes.device) < counts[..., None]
    owner = torch.arange(nobody, device=lanes.device).view(layers, rows, heads, 1).expand_as(pages)
    target = torch.where(held, pages, page_owner.shape[0] - 1)
    page_owner.fill_(nobody)
    page_owner.scatter_(0, target.flatten(), torch.where(held, owner, nobody).flatten())
