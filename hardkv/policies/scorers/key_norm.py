"""Scorer `key_norm`: small keys are important ones."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hardkv.interfaces import ImportanceScorer, Space
from hardkv.types import ScoreView


class KeyNorm(ImportanceScorer):
    """Negative key norm: `s_j = -|k_j|`, the L2 norm over D. R = 1, and no query is needed.

    Source: Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv 2406.11430).
    """

    name: ClassVar[str] = "key_norm"
    space: ClassVar[Space] = "unbounded"

    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero at invalid slots."""
        norm: Tensor = torch.linalg.vector_norm(view.keys.float(), dim=-1)  # [B, H, N]
        return norm.neg_().masked_fill_(~view.valid, 0.0)[:, :, None]
