"""The condensed tier: dropped tokens folded into a constant number of slots."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv.errors import CapacityError
from hardkv.interfaces import CacheTier, Options
from hardkv.types import TierShape, TokenBatch
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

    def __init__(self, config: Options | None = None) -> None:
        super().__init__(config)
        self.reset()

    @property
    def needs_queries(self) -> bool:
        return True

    @property
    def holds_tokens(self) -> bool:
        return True

    def allocate(self, shape: TierShape) -> None:
        if shape.slots < 1:
            raise CapacityError("the merge tier needs at least one slot: set cache.condensed_slots above 0")
        size = (shape.layers, shape.heads, shape.slots)
        self.keys = torch.zeros(*size, shape.head_dim, dtype=shape.dtype, device=shape.device)
        self.values = torch.zeros_like(self.keys)
        self.bias = torch.full(size, float("-inf"), device=shape.device)

    def admit(self, layer: int, tokens: TokenBatch) -> None:
        assert tokens.query is not None
        heads, slots, head_dim = self.keys[layer].shape
        rank = torch.cumsum(tokens.mask, -1) - 1
        count = tokens.mask.sum(-1, keepdim=True).clamp_min(1)
        run = torch.where(tokens.mask, rank.clamp_min(0) * slots // count, slots)  # [H, N]; `slots` = not a donor
        home = torch.arange(slots, device=run.device).expand(heads, slots)
        group = torch.cat([home, run], -1)
        keys = torch.cat([self.keys[layer], tokens.keys], 1).float()
        values = torch.cat([self.values[layer], tokens.values], 1).float()
        donor = torch.cat([torch.isfinite(self.bias[layer]), tokens.mask], -1)
        keys, values = keys.masked_fill(~donor[..., None], 0.0), values.masked_fill(~donor[..., None], 0.0)
        bias = torch.cat([self.bias[layer], torch.zeros_like(tokens.mask, dtype=torch.float32)], -1)
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

        self.keys[layer] = fold(keys).to(self.keys.dtype)
        self.values[layer] = fold(values).to(self.values.dtype)
        filled = torch.zeros(heads, slots + 1, device=group.device).scatter_add_(1, group, donor.float())[:, :slots] > 0
        log_bias = torch.zeros_like(top).scatter_add_(1, group, entropy)[:, :slots]
        self.bias[layer] = log_bias.masked_fill(~filled, float("-inf"))

    def attend(self, layer: int, query: Tensor, scaling: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        answer: tuple[Tensor, Tensor] = attend_slots(
            query, self.keys[layer], self.values[layer], self.bias[layer], scaling, softcap
        )
        return answer

    @property
    def allocated_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.keys, self.values, self.bias))

    def reset(self) -> None:
        self.keys = self.values = torch.zeros(0, 0, 0, 0)
        self.bias = torch.zeros(0, 0, 0)

    def fresh(self) -> Merge:
        return Merge(self.config)
