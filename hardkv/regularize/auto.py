"""Compact where it pays: the memory-time integral."""

from __future__ import annotations

from hardkv.regularize.modal import ModalRegularizer
from hardkv.types import CostModel, Layout, Limits, Selection


class Auto(ModalRegularizer):
    """Compact a head when what later steps save exceeds what moving costs, or above the cap (HARD-KV, section 3.4).

    gain = horizon * c_read * (bytes read now - bytes read after); cost = c_copy * bytes kept + c_launch, with c_read
    and c_copy measured at start-up. Else mask in place. The paper fixes both bounds; we derive them from the target.
    """

    name = "auto"

    def layout(self, selection: Selection, cost: CostModel, limits: Limits) -> Layout:
        kept = selection.keep.sum(-1)
        saved = (selection.held_slots - kept) * float(cost.slot_bytes)
        gain = cost.horizon_steps * cost.read_seconds_per_byte * saved
        price = cost.copy_seconds_per_byte * kept * float(cost.slot_bytes) + cost.launch_seconds
        rewrite = (gain > price) | (selection.held_slots > limits.upper)
        return Layout(keep=selection.keep, rewrite=rewrite, reserve_slots=kept)
