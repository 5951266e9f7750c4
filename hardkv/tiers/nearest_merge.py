"""A last tier that keeps nothing itself: what is dropped lives on in the values of the tokens most like it."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from hardkv.interfaces import Options
from hardkv.tiers.evict import Evict
from hardkv.types import TokenBatch

_TILE = 512  # dropped tokens compared at once: [H, tile, N] float32, never [N, N]


class NearestMerge(Evict):
    """Fold the value of each dropped token into the surviving token of its head whose key is most like its own.

    With `c_i = cos(k_i, k_s)`, s the nearest survivor of the dropped token i (of equals the newest), and the sum over
    all i whose nearest survivor is s: `v_s' = (e v_s + sum_i exp(c_i) v_i) / (e + sum_i exp(c_i))`; e = exp(1) is the
    survivor's likeness to itself. Tokens below `min_similarity` are evicted. Keys stay as they are.

    Source: D2O (arXiv 2406.13035, section 3.3), which merges keys as well, and moves its threshold.
    """

    name = "nearest_merge"
    folds = True

    class Config(Options):
        """Options of `nearest_merge`."""

        min_similarity: float = Field(
            default=0.6,
            ge=-1.0,
            le=1.0,
            description="Cosine of the keys below which a token is evicted: unlike tokens blur the values they join.",
        )

    config: Config

    def fold(self, layer: int, tokens: TokenBatch) -> Tensor:
        assert tokens.survivors is not None
        values = tokens.values.float().masked_fill(~(tokens.mask | tokens.survivors)[..., None], 0.0)
        keys = tokens.keys.float().masked_fill(~(tokens.mask | tokens.survivors)[..., None], 0.0)
        unit = torch.nn.functional.normalize(keys, dim=-1)
        best, nearest = _nearest(unit, tokens.survivors)
        joins = tokens.mask & tokens.survivors.any(-1, keepdim=True) & (best >= self.config.min_similarity)
        weight = torch.where(joins, torch.exp(best), 0.0)
        total = torch.full_like(weight, math.e).scatter_add_(-1, nearest, weight)
        target = nearest[..., None].expand_as(values)
        merged = (math.e * values).scatter_add_(1, target, weight[..., None] * values)
        return torch.where(tokens.survivors[..., None], merged / total[..., None], values)

    def fresh(self) -> NearestMerge:
        return NearestMerge(self.config)


def _nearest(unit: Tensor, survivors: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine with the nearest survivor and its slot, both `[H, N]`, for every slot of `unit [H, N, D]`."""
    best, nearest = [], []
    for start in range(0, unit.shape[1], _TILE):
        cosine = torch.matmul(unit[:, start : start + _TILE], unit.transpose(-1, -2))  # [H, tile, N]
        found = cosine.masked_fill_(~survivors[:, None], float("-inf")).flip(-1).max(-1)
        best.append(found.values)
        nearest.append(unit.shape[1] - 1 - found.indices)
    return torch.cat(best, 1), torch.cat(nearest, 1)
