"""Always compact."""

from __future__ import annotations

import torch

from hardkv.regularize.modal import ModalRegularizer
from hardkv.types import CostModel, Layout, Limits, Selection


class Rewrite(ModalRegularizer):
    """Compact every head to its kept tokens, in position order (HARD-KV, section 3.3: rewriting)."""

    name = "rewrite"

    def layout(self, selection: Selection, cost: CostModel, limits: Limits) -> Layout:
        kept = selection.keep.sum(-1)
        return Layout(keep=selection.keep, rewrite=torch.ones_like(kept, dtype=torch.bool), reserve_slots=kept)
