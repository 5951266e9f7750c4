"""Remembers which tokens a compressed cache lets attention read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hardkv.cache import CascadeCache
from hardkv.tiers.cascade import Cascade


@dataclass(frozen=True)
class Held:
    """What attention reads of the tokens before `since`, from one compression to the next; later ones are all read."""

    since: int
    bits: npt.NDArray[np.uint8]
    """`[L, H, since]` over the compressed layers, eight in a byte along the last axis."""

    @classmethod
    def of(cls, shown: Tensor) -> Held:
        """Pack `shown [L, H, N]` bool."""
        return cls(shown.shape[-1], np.packbits(shown.cpu().numpy(), axis=-1))

    def positions(self, layer: int, head: int) -> Tensor:
        """The tokens of one head, ascending, int64."""
        row = np.unpackbits(self.bits[layer, head], count=self.since)
        return torch.from_numpy(np.flatnonzero(row))


class HeldRecorder:
    """An observer that notes, after each compression of each text, the tokens that its cache shows to attention.

    Slots that are masked are not read and do not count; nor do condensed slots, which are no token's own.
    """

    def __init__(self, texts: int) -> None:
        self.held: list[list[Held]] = [[] for _ in range(texts)]

    @torch.inference_mode()
    def on_compression(self, index: int, cascade: Cascade, cache: CascadeCache) -> None:
        """Copy the positions that attention sees."""
        resident, seen = cascade.resident(), cascade.seen_tokens
        place = torch.where(resident.shown, resident.positions, seen)
        shown = torch.zeros(*place.shape[:2], seen + 1, dtype=torch.bool, device=place.device)
        self.held[index].append(Held.of(shown.scatter_(-1, place, True)[..., :seen]))

    def on_step(self, index: int, cascade: Cascade, cache: CascadeCache) -> None:
        """Nothing changes in a step but that a token is added."""
