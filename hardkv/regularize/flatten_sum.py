"""Ragged heads, concatenated."""

from __future__ import annotations

from hardkv.regularize.modal import ModalRegularizer
from hardkv.types import CostModel, Layout, Limits, Selection


class FlattenSum(ModalRegularizer):
    """Compact every layer whose kept total changed, so that its heads lie end to end (HARD-KV, section 3.3: HA-Sum).

    Pages of a layer are contiguous in the pool, so the layer's length is the sum of its heads' (rounded up to pages).
    Differs from `rewrite` in that a layer from which nothing is dropped is left alone.
    """

    name = "flatten_sum"

    def layout(self, selection: Selection, cost: CostModel, limits: Limits) -> Layout:
        kept = selection.keep.sum(-1)
        changed = (kept < selection.held_slots).any(-1, keepdim=True)
        return Layout(keep=selection.keep, rewrite=changed.expand_as(kept), reserve_slots=kept)
