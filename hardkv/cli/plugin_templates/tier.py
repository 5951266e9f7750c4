"""Condenser `my_method`: the tokens dropped last stay within reach, a fixed number in every head."""

from __future__ import annotations

import torch

import hardkv
from hardkv_kernels import attend_slots


class MyMethod(hardkv.CacheTier):
    """Hold the tokens of each head that were dropped last, in `cache.condensed_slots` slots; older ones are gone."""

    name = "my_method"

    def __init__(self, config: hardkv.Options | None = None) -> None:
        super().__init__(config)
        self.reset()

    def fresh(self) -> MyMethod:
        """Give an empty one, for another sequence."""
        return MyMethod(self.config)

    def allocate(self, shape: hardkv.TierShape) -> None:
        """Allocate everything now: addresses stay the same until `reset`."""
        if shape.slots < 1:
            raise hardkv.CapacityError("my_method needs at least one slot: set cache.condensed_slots above 0")
        self.slots = shape.slots
        size = (shape.layers, shape.heads, shape.slots)
        self._keys = torch.zeros(*size, shape.head_dim, dtype=shape.dtype, device=shape.device)
        self._values = torch.zeros_like(self._keys)
        # Added to a slot's logit; -inf hides a slot that holds nothing.
        self._bias = torch.full(size, float("-inf"), device=shape.device)

    def admit(self, layer: int, tokens: hardkv.TokenBatch) -> None:
        """Take in the tokens that `tokens.mask [H, N]` names, in position order; the others may hold anything."""
        keys, values, bias = self._keys[layer], self._values[layer], self._bias[layer]
        arriving = torch.zeros(tokens.mask.shape, device=bias.device).masked_fill(~tokens.mask, float("-inf"))
        bias_after = torch.cat([bias, arriving], 1)
        # Sorted by whether they hold a token, all else in order, the last slots are the newest tokens.
        newest = torch.sort(bias_after > float("-inf"), dim=1, stable=True).indices[:, -self.slots :]
        chosen = newest[..., None].expand(-1, -1, keys.shape[-1])
        keys.copy_(torch.cat([keys, tokens.keys], 1).gather(1, chosen))
        values.copy_(torch.cat([values, tokens.values], 1).gather(1, chosen))
        bias.copy_(bias_after.gather(1, newest))
        # What a hidden slot holds may be NaN, and zero times NaN would not be zero.
        hidden = (bias == float("-inf"))[..., None]
        keys.masked_fill_(hidden, 0.0)
        values.masked_fill_(hidden, 0.0)

    def attend(
        self, layer: int, query: torch.Tensor, scaling: float, softcap: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend `query [H, G, D]` over this tier alone: output and log-sum-exp, zeros and -inf while it is empty."""
        slots = self._keys[layer], self._values[layer], self._bias[layer]
        answer: tuple[torch.Tensor, torch.Tensor] = attend_slots(query, *slots, scaling, softcap)
        return answer

    @property
    def allocated_bytes(self) -> int:
        """Bytes of every buffer."""
        return self._keys.nbytes + self._values.nbytes + self._bias.nbytes

    @property
    def holds_tokens(self) -> bool:
        """False only for a tier that never answers anything."""
        return True

    def reset(self) -> None:
        """Forget all tokens and release the buffers; twice is harmless."""
        self._keys = self._values = self._bias = torch.empty(0)


@hardkv.hookimpl
def hardkv_components() -> list[type[hardkv.Component]]:
    """Give what this plugin offers."""
    return [MyMethod]
