"""Equal length for every head."""

from __future__ import annotations

from typing import ClassVar

import torch

from hardkv.regularize.modal import ModalRegularizer
from hardkv.types import CostModel, Layout, Limits, Selection


class FlattenMax(ModalRegularizer):
    """Compact, then give every head of every layer pages for the longest (HARD-KV, section 3.3: HA-Max).

    What an engine with one block table for all heads needs; the padding is held and counted.
    """

    name = "flatten_max"
    pads_heads: ClassVar[bool] = True

    def layout(self, selection: Selection, cost: CostModel, limits: Limits) -> Layout:
        kept = selection.keep.sum(-1)
        return Layout(
            keep=selection.keep,
            rewrite=torch.ones_like(kept, dtype=torch.bool),
            reserve_slots=kept.amax().expand_as(kept),
        )
