"""Scorer `quest`: pages of tokens, by the most that any key in their bounds could answer."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hardkv.interfaces import ImportanceScorer, Options, Space
from hardkv.policies.scorers.ranks import pack, slot_rank
from hardkv.policies.scorers.snapkv import SMALLEST_PROBABILITY
from hardkv.types import ScoreView


class Quest(ImportanceScorer):
    """Upper bound of a page's logits, from the smallest and largest entry of its keys in each channel.

    Valid slots are cut, in order, into pages of `page`; all tokens of a page share its score. For row i and head a,
    `b_p = scaling * sum_d max(q_d low_d, q_d high_d)` over the tokens of page p that the row sees, pages of which it
    sees none left out, and `s[i, p] = max_a (b_p - log sum_p' exp b_p')`. Subtracting keeps the order of a row and head
    and makes rows and heads comparable. Tokens newer than the row get the row's lowest score, log 1e-30 if that is
    lower. R = W. A softcap is left out: it changes no order.

    Source: Quest (arXiv 2406.10774, section 3). There the bound picks pages to load for one query; here pages are of
    resident tokens, not of memory, so that a rewrite cuts them anew.
    """

    name: ClassVar[str] = "quest"
    space: ClassVar[Space] = "logit"

    class Config(Options):
        """Options of `quest`."""

        page: int = Field(default=16, ge=1, description="Tokens that share a score; 16 as in the paper.")

    config: Config

    @property
    def needs_queries(self) -> bool:
        """Always true: this scorer looks back at the query window."""
        return True

    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, W, N]`; zero at invalid slots and in rows never written."""
        if view.queries is None:
            raise ValueError("this view carries no queries: set `needs_queries = True` on the scorer")
        written = view.row_valid[:, None, :, None]  # [B, 1, W, 1]
        queries = view.queries.float().masked_fill(~written[:, :, None], 0.0) * view.scaling
        seen = view.visible.sum(-1)  # [B, H, W], the first tokens by rank
        bounds = self._bounds(queries, view, seen)  # [B, H, G, W, P]
        pages = torch.arange(bounds.shape[-1], device=seen.device)
        unseen = pages * self.config.page >= seen[..., None]  # [B, H, W, P]
        bounds.masked_fill_(unseen[:, :, None], float("-inf"))
        rows = torch.log_softmax(bounds, -1).amax(2)  # [B, H, W, P]
        lowest = rows.masked_fill(unseen, float("inf")).amin(-1, keepdim=True)
        lowest = lowest.clamp_max(math.log(SMALLEST_PROBABILITY))  # [B, H, W, 1]
        page = (slot_rank(view.valid) // self.config.page)[:, :, None]  # [B, H, 1, N]
        scores = rows.gather(-1, page.expand(-1, -1, rows.shape[2], -1))  # [B, H, W, N]
        scores = torch.where(view.visible, scores, lowest)
        return scores.masked_fill(~(view.valid[:, :, None] & written), 0.0)

    def _bounds(self, queries: Tensor, view: ScoreView, seen: Tensor) -> Tensor:
        """Bound of each page for each row, `[B, H, G, W, P]`, over tokens that the row sees; finite where it sees any.

        Only the page of the newest token that a row sees can hold newer ones: it is bounded anew for each row.
        """
        page = self.config.page
        keys = pack(view.keys.float(), view.valid)  # [B, H, N, D]
        keys = torch.nn.functional.pad(keys, (0, 0, 0, -keys.shape[2] % page))
        keys = keys.reshape(*keys.shape[:2], -1, page, keys.shape[-1])  # [B, H, P, page, D]
        count = view.valid.sum(-1)[..., None]  # [B, H, 1]
        starts = torch.arange(keys.shape[2], device=keys.device) * page  # [P]
        low, high = _channel_range(keys, count - starts)  # [B, H, P, D]
        bounds = _most(queries, low[:, :, None].transpose(-1, -2), high[:, :, None].transpose(-1, -2))
        last = (seen - 1).clamp_min(0) // page  # [B, H, W]
        own = keys.flatten(3).gather(2, last[..., None].expand(-1, -1, -1, keys.shape[3] * keys.shape[4]))
        low, high = _channel_range(own.reshape(*own.shape[:3], *keys.shape[3:]), seen - last * page)  # [B, H, W, D]
        own_bound = _most(queries[..., None, :], low[:, :, None, ..., None], high[:, :, None, ..., None])
        last = last[:, :, None, :, None].expand_as(own_bound[..., 0])
        return bounds.scatter(-1, last, own_bound[..., 0])


def _channel_range(pages: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest of the first `count [...]` tokens of `pages [..., page, D]`, both `[..., D]`; 0 of none."""
    beyond = (torch.arange(pages.shape[-2], device=pages.device) >= count[..., None])[..., None]
    low = pages.masked_fill(beyond, float("inf")).amin(-2)
    high = pages.masked_fill(beyond, float("-inf")).amax(-2)
    empty = count[..., None] <= 0
    return low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)


def _most(queries: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Largest product of `queries [..., W, D]` with any vector between `low` and `high [..., D, P]`: `[..., W, P]`."""
    return torch.matmul(queries.clamp_min(0.0), high) + torch.matmul(queries.clamp_max(0.0), low)
