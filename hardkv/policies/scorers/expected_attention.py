"""Scorer `expected_attention`: what queries like the recent ones will pay at the positions to come."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hardkv.errors import UnsupportedModelError
from hardkv.interfaces import ImportanceScorer, Options, Space
from hardkv.policies.scorers.rotation import mean_rotation, rotate, rotate_by
from hardkv.types import ModelGeometry, ScoreView

# A logit above this counts as this, so that its square in the covariance term can't make the softmax NaN.
_LARGEST_LOGIT = 1e30


class ExpectedAttention(ImportanceScorer):
    """Expected attention under a Gaussian of the recent queries, moved on to future positions.

    Window queries are taken back to no position; `mu`, `Sigma` are their mean and covariance over the written rows, per
    query head. `R` is the mean rotation over the positions `newest + 1` to `newest + horizon`. Then
    `z_j = scaling * k_j . R mu + scaling ** 2 / 2 * k_j' R Sigma R' k_j`, `s_j = mean_a softmax_j(z_j) * |v_j|`.
    R = 1. Softcaps and learned sinks are left out. A single written row has covariance 0; none gives equal attention.

    Source: Expected Attention (arXiv 2510.00636). Differs: statistics of the query window rather than of the prompt,
    positions counted from the newest query, not from the number of resident tokens, no epsilon, and |v| for |W_O v|.
    """

    name: ClassVar[str] = "expected_attention"
    space: ClassVar[Space] = "unbounded"

    class Config(Options):
        """Options of `expected_attention`."""

        horizon: int = Field(
            default=512,
            ge=1,
            description="Future positions averaged; 512 as in the paper, more than one interval: a drop is for good.",
        )
        covariance: bool = Field(
            default=True, description="Count how queries vary, as in the paper; false scores by their mean alone."
        )
        value_norm: bool = Field(
            default=True, description="Multiply by |v|, as in the paper: a small value moves the output little."
        )

    config: Config

    @property
    def needs_queries(self) -> bool:
        """Always true: the statistics are those of the query window."""
        return True

    def check_model(self, geometry: ModelGeometry) -> None:
        """Refuse a model whose rotary frequencies are not known."""
        known = geometry.frequencies
        missing = [layer for layer in geometry.full_layers if layer >= len(known) or known[layer] is None]
        if missing:
            raise UnsupportedModelError(
                f"scorer '{self.name}' needs rotary embeddings with known frequencies in every full-attention layer, "
                f"layers {missing} have none; write another scorer, such as 'attention_power'"
            )

    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero at invalid slots."""
        queries = _future_queries(view, self.config.horizon) * view.scaling  # [B, H, G, W, D]
        keys = view.keys.float().masked_fill(~view.valid[..., None], 0.0).transpose(-1, -2)  # [B, H, D, N]
        weight = view.row_valid.float()
        weight = (weight / weight.sum(-1, keepdim=True).clamp_min(1.0))[:, None, None, :]  # [B, 1, 1, W]
        total = torch.zeros(view.valid.shape, device=view.valid.device)[:, :, None]  # [B, H, 1, N]
        for head in range(queries.shape[2]):
            logits = torch.matmul(queries[:, :, head], keys)  # [B, H, W, N]
            expected = torch.matmul(weight, logits)  # [B, H, 1, N]
            if self.config.covariance:
                expected = expected + 0.5 * torch.matmul(weight, (logits - expected).square_())
            expected = expected.clamp(max=_LARGEST_LOGIT).masked_fill_(~view.valid[:, :, None], float("-inf"))
            total += torch.softmax(expected, -1)
        total /= queries.shape[2]
        if self.config.value_norm:
            total *= torch.linalg.vector_norm(view.values.float(), dim=-1)[:, :, None]
        return total.masked_fill(~view.valid[:, :, None], 0.0)


def _future_queries(view: ScoreView, horizon: int) -> Tensor:
    """Window queries at the mean of the next `horizon` positions, `[B, H, G, W, D]`; zero in rows never written.

    Each is turned from its own position to the newest, then by the mean rotation: the angles stay small and exact at
    any position, where taking the position off first would need large ones.
    """
    if view.frequencies is None:
        raise ValueError("this view carries no rotary frequencies: expected_attention cannot score this model")
    if view.queries is None or view.query_positions is None:
        raise ValueError("this view carries no queries: set `needs_queries = True` on the scorer")
    written = view.row_valid
    queries = view.queries.float().masked_fill(~written[:, None, None, :, None], 0.0)
    newest = view.query_positions.amax(-1, keepdim=True)
    offsets = (newest - view.query_positions).masked_fill(~written, 0)[:, None, None, :]  # [B, 1, 1, W]
    frequencies = view.frequencies[:, None, None, None, :]  # [B, 1, 1, 1, F]
    cosine, sine = mean_rotation(frequencies, horizon)
    return rotate(rotate_by(queries, offsets, frequencies), cosine, sine)
