"""Mask in place, compact only above the cap."""

from __future__ import annotations

from hardkv.regularize.modal import ModalRegularizer
from hardkv.types import CostModel, Layout, Limits, Selection


class SparseLoad(ModalRegularizer):
    """Keep data where it is and mask what is not selected (HARD-KV, section 3.3: sparse loading).

    A later selection may bring a token back. A head that holds more than `cache.upper` slots is compacted.
    """

    name = "sparse_load"

    def layout(self, selection: Selection, cost: CostModel, limits: Limits) -> Layout:
        return Layout(
            keep=selection.keep,
            rewrite=selection.held_slots > limits.upper,
            reserve_slots=selection.keep.sum(-1),
        )
