"""The condensed tier: dropped tokens folded into a constant number of slots."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv.errors import CapacityError
from hardkv.interfaces import CacheTier, Options
from hardkv.tiers.store import TensorStore
from hardkv.types import SlotStore, TierShape, TokenBatch
from hardkv_kernels import attend_slots


class Merge(CacheTier):
    """Fold donors into slots with a log-bias that makes the reference query's attention exact. Ours.

    Donors in position order are cut into as many contiguous runs as there are slots; a slot's old content is one more
    donor. With x_i = exp(q.k_i * scaling + b_i) and w_i = x_i / sum x, the slot becomes K' = sum w_i k_i,
    V' = sum w_i v_i and b' = H(w) + sum w_i b_i, H the entropy: then exp(q.K' * scaling + b') = sum x_i and the output
    is the donors' own, for the reference query q (the newest, mean over the group), without assuming that one token
    dominates, as the HARD-KV paper does.
    """

    name = "merge"
    lies_in_pages = True

    def __init__(self, config: Options | None = None) -> None:
        super().__init__(config)
        self._store: SlotStore | None = None
        self._own: TensorStore | None = None

    @property
    def needs_queries(self) -> bool:
        return True

    @property
    def holds_tokens(self) -> bool:
        return True

    def allocate(self, shape: TierShape) -> None:
        if shape.slots < 1:
            raise CapacityError("the merge tier needs at least one slot: set cache.condensed_slots above 0")
        self._own = TensorStore(shape) if shape.store is None else None
        self._store = shape.store or self._own

    def read(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of the slots of one layer: `keys, values [H, N, D]`, `bias [H, N]` (-inf where nothing is held)."""
        assert self._store is not None
        return self._store.read(layer)

    def admit(self, layer: int, tokens: TokenBatch) -> None:
        assert tokens.query is not None
        assert self._store is not None
        old_keys, old_values, old_bias = self.read(layer)
        heads, slots, head_dim = old_keys.shape
        rank = torch.cumsum(tokens.mask, -1) - 1
        count = tokens.mask.sum(-1, keepdim=True).clamp_min(1)
        run = torch.where(tokens.mask, rank.clamp_min(0) * slots // count, slots)  # [H, N]; `slots` = not a donor
        home = torch.arange(slots, device=run.device).expand(heads, slots)
        group = torch.cat([home, run], -1)
        keys = torch.cat([old_keys, tokens.keys], 1).float()
        values = torch.cat([old_values, tokens.values], 1).float()
        donor = torch.cat([torch.isfinite(old_bias), tokens.mask], -1)
        keys, values = keys.masked_fill(~donor[..., None], 0.0), values.masked_fill(~donor[..., None], 0.0)
        bias = torch.cat([old_bias, torch.zeros_like(tokens.mask, dtype=torch.float32)], -1)
        bias = bias.masked_fill(~donor, 0.0)
        logit = (torch.einsum("hd,hnd->hn", tokens.query.float(), keys) * tokens.scaling + bias).masked_fill(
            ~donor, float("-inf")
        )
        top = torch.full((heads, slots + 1), torch.finfo(torch.float32).min, device=logit.device)
        top.scatter_reduce_(1, group, logit, "amax")
        weight = torch.exp(logit - top.gather(1, group))
        total = torch.zeros_like(top).scatter_add_(1, group, weight).clamp_min(torch.finfo(torch.float32).tiny)
        weight = weight / total.gather(1, group)
        entropy = -torch.xlogy(weight, weight) + weight * bias
        spread = group[..., None].expand(-1, -1, head_dim)

        def fold(content: Tensor) -> Tensor:
            empty = torch.zeros(heads, slots + 1, head_dim, device=content.device)
            return empty.scatter_add_(1, spread, weight[..., None] * content)[:, :slots]

        filled = torch.zeros(heads, slots + 1, device=group.device).scatter_add_(1, group, donor.float())[:, :slots] > 0
        log_bias = torch.zeros_like(top).scatter_add_(1, group, entropy)[:, :slots]
        new_keys, new_values = fold(keys).to(old_keys.dtype), fold(values).to(old_values.dtype)
        self._store.write(layer, new_keys, new_values, log_bias.masked_fill(~filled, float("-inf")))

    def attend(self, layer: int, query: Tensor, scaling: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        answer: tuple[Tensor, Tensor] = attend_slots(query, *self.read(layer), scaling, softcap)
        return answer

    @property
    def allocated_bytes(self) -> int:
        """Bytes outside the pool."""
        return 0 if self._own is None else self._own.allocated_bytes

    def reset(self) -> None:
        self._store = self._own = None

    def fresh(self) -> Merge:
        return Merge(self.config)
