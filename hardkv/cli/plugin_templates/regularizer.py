"""Regularizer `my_method`: compacts the heads that dropped much, masks in the others."""

from __future__ import annotations

from pydantic import Field

import hardkv


class MyMethod(hardkv.Regularizer):
    """Compact a head when it keeps less than a share of the slots it holds; else mask in place."""

    name = "my_method"

    class Config(hardkv.Options):
        """What a configuration may set beside `name`."""

        compact_below: float = Field(
            default=0.75, ge=0.0, le=1.0, description="Share of held slots that are kept; a head below it is compacted."
        )

    config: Config

    def layout(self, selection: hardkv.Selection, cost: hardkv.CostModel, limits: hardkv.Limits) -> hardkv.Layout:
        """Decide per head; masking copies nothing and can be taken back, compacting frees memory and reads less."""
        kept = selection.keep.sum(-1)  # [L, H]
        sparse = kept < self.config.compact_below * selection.held_slots
        above = selection.held_slots > limits.upper  # no head may hold more
        return hardkv.Layout(keep=selection.keep, rewrite=sparse | above, reserve_slots=kept)


@hardkv.hookimpl
def hardkv_components() -> list[type[hardkv.Component]]:
    """Give what this plugin offers."""
    return [MyMethod]
