"""Scorer `rkv`: attention minus redundancy among keys."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor

from hardkv.interfaces import ImportanceScorer, Options, Space
from hardkv.policies.scorers.snapkv import mean_attention, pool_slots, require_odd
from hardkv.types import ScoreView


class RKV(ImportanceScorer):
    """Importance minus redundancy: keeps what is read and says something new.

    `s_j = lam * I_j - (1 - lam) * R_j`. `I` is the mean attention of all written rows and the group, max-pooled as in
    SnapKV. `R_j = softmax_j(mean_i C[i, j])` over valid slots, `C[i, j] = cos(k_i, k_j)` with two kinds of zero: the
    diagonal, and for each i the newest `j != i` with cosine above the threshold (of repeats the last one is forgiven).
    The similarity is built `tile` rows at a time: `[B, H, tile, N]` float32 at most, never `[N, N]`. R = 1.

    Source: R-KV (arXiv 2505.24133, section 3), with one forgiven token per row.
    """

    name: ClassVar[str] = "rkv"
    space: ClassVar[Space] = "unbounded"

    class Config(Options):
        """Options of `rkv`."""

        lam: float = Field(default=0.1, ge=0.0, le=1.0, description="Share of importance; the paper finds 0.07-0.1.")
        kernel: int = Field(default=7, ge=1, description="Slots pooled in the importance, odd; 1 does not pool.")
        similarity_threshold: float = Field(
            default=0.5, ge=-1.0, le=1.0, description="Cosine above which two keys count as repeats; from the paper."
        )
        tile: int = Field(default=512, ge=1, description="Rows of the similarity held at once; bounds memory.")

        @field_validator("kernel")
        @classmethod
        def _odd(cls, kernel: int) -> int:
            return require_odd(kernel)

    config: Config

    @property
    def needs_queries(self) -> bool:
        """Always true: the importance looks back at the query window."""
        return True

    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero at invalid slots."""
        valid = view.valid[:, :, None]
        importance = pool_slots(mean_attention(view, None), valid, self.config.kernel)
        similarity = self._mean_similarity(view)[:, :, None].masked_fill(~valid, float("-inf"))
        redundancy = torch.softmax(similarity, -1)
        scores = self.config.lam * importance - (1.0 - self.config.lam) * redundancy
        # A head without one valid slot has a softmax of NaN; it is masked here like every invalid slot.
        return scores.masked_fill(~valid, 0.0)

    def _mean_similarity(self, view: ScoreView) -> Tensor:
        """Mean over valid i of `C[i, j]`, `[B, H, N]`."""
        keys = view.keys.float().masked_fill(~view.valid[..., None], 0.0)
        unit = torch.nn.functional.normalize(keys, dim=-1)  # [B, H, N, D]
        slots = unit.shape[-2]
        slot = torch.arange(slots, device=unit.device)
        total = torch.zeros_like(unit[..., 0])
        for start in range(0, slots, self.config.tile):
            rows = unit[:, :, start : start + self.config.tile]
            cosine = torch.matmul(rows, unit.transpose(-1, -2))  # [B, H, tile, N]
            itself = slot == slot[start : start + self.config.tile, None]  # [tile, N]
            # Slots are in position order, so the newest repeat is the one with the highest slot.
            repeat = (cosine > self.config.similarity_threshold) & view.valid[:, :, None] & ~itself
            newest = torch.where(repeat, slot, -1).amax(-1, keepdim=True)
            total += cosine.masked_fill_(itself | (slot == newest), 0.0).sum(-2)
        return total / view.valid.sum(-1, keepdim=True).clamp_min(1)
