"""Scorer `value_aware`: attention times the size of what it carries."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hardkv.errors import UnsupportedModelError
from hardkv.interfaces import ImportanceScorer, Options, Space
from hardkv.policies.scorers.snapkv import mean_attention
from hardkv.policies.scorers.window_rows import newest_rows
from hardkv.types import ModelGeometry, ScoreView

# Floats of projected values held at once, 64 MiB; slots are projected in tiles that stay below it.
_TILE_ELEMENTS = 1 << 24


class ValueAware(ImportanceScorer):
    """Mean attention, weighted by the L1 norm of the value or of what the output projection makes of it.

    `vatp`: `s_j = mean_{a, i} A[a, i, j] * |v_j|_1`. `critical`: `s_j = mean_a (mean_i A[a, i, j] + epsilon) *
    |W_a v_j|_1`, `W_a` the columns of the output projection that belong to query head a. Rows i: the newest `rows`
    written ones. R = 1.

    Source: VATP (arXiv 2406.12335, section 3), over the window where the paper accumulates since entry; CriticalKV
    (arXiv 2502.03805), its second stage for the whole budget: the paper gives half of it to plain attention first.
    """

    name: ClassVar[str] = "value_aware"
    space: ClassVar[Space] = "unbounded"

    class Config(Options):
        """Options of `value_aware`."""

        form: Literal["vatp", "critical"] = Field(
            default="vatp", description="Norm of the value, which any model has; or of its output projection."
        )
        rows: int | None = Field(
            default=None,
            ge=1,
            description="Newest query rows averaged; null takes all: 128 rows lost less than 32 where we measured.",
        )
        epsilon: float = Field(
            default=1e-4,
            ge=0.0,
            description="Attention that `critical` grants to every token, so that a large value without any counts.",
        )

    config: Config

    @property
    def needs_queries(self) -> bool:
        """Always true: this scorer looks back at the query window."""
        return True

    def check_model(self, geometry: ModelGeometry) -> None:
        """Refuse a model without plain output projections when `form` is `critical`."""
        known = geometry.output_weights
        missing = [layer for layer in geometry.full_layers if layer >= len(known) or known[layer] is None]
        if self.config.form == "critical" and missing:
            raise UnsupportedModelError(
                f"scorer '{self.name}' with form: critical needs a plain output projection in every full-attention "
                f"layer, layers {missing} have none; write form: vatp"
            )

    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero at invalid slots."""
        values = view.values.float().masked_fill(~view.valid[..., None], 0.0)
        if self.config.form == "vatp":
            return mean_attention(view, self.config.rows) * values.abs().sum(-1)[:, :, None]
        if len(view.output_weights) != len(values):
            raise ValueError(
                f"form: critical needs one output projection for each of {len(values)} rows of the view, "
                f"got {len(view.output_weights)}"
            )
        rows = newest_rows(view, self.config.rows).float()
        rows = (rows / rows.sum(-1, keepdim=True).clamp_min(1.0))[:, None, None, :]  # [B, 1, 1, W]
        group = view.attention.shape[2]
        scores = torch.zeros_like(values[..., 0])
        for head in range(group):
            attention = torch.matmul(rows, view.attention[:, :, head])[:, :, 0]  # [B, H, N]
            norms = [_projected_norm(*part, head, group) for part in zip(values, view.output_weights, strict=True)]
            scores += (attention + self.config.epsilon) * torch.stack(norms)
        return (scores / group).masked_fill(~view.valid, 0.0)[:, :, None]


def _projected_norm(values: Tensor, weights: Tensor, head: int, group: int) -> Tensor:
    """L1 norm of `values [H, N, D]` projected by head a of each group, `weights [M, H*G*D]`: `[H, N]`."""
    heads, slots, dim = values.shape
    own = weights.reshape(-1, heads, group, dim)[:, :, head].float().permute(1, 2, 0)  # [H, D, M]
    tile = max(1, _TILE_ELEMENTS // (heads * own.shape[-1]))
    tiles = [torch.matmul(values[:, at : at + tile], own).abs_().sum(-1) for at in range(0, slots, tile)]
    return torch.cat(tiles, -1)
