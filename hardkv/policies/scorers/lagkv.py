"""Scorer `lagkv`: tokens that stand out against the chunk of tokens after theirs."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hardkv.interfaces import ImportanceScorer, Options, Space
from hardkv.policies.scorers.ranks import pack, unpack
from hardkv.types import ScoreView

# Two softmaxes add up to 2 at most; this ranks above every chunk.
_KEPT = 3.0
# Normalised channels are bounded by this, so that a reference of almost no range still gives a finite deviation.
_LARGEST_CHANNEL = 1e6


class LagKV(ImportanceScorer):
    """Spread of a token's channels, measured in the range that the next chunk of tokens spans.

    Valid slots after the first `sinks` are cut, in order, into chunks of `lag`. A token x of chunk p:
    `y_c = (x_c - min_c) / (max_c - min_c)` with minimum and maximum over the tokens of chunk p + 1 (0 where they are
    equal), `u = softmax over chunk p of std_c y_c`, and `s = u(keys) + u(values)`. R = 1, and no query is needed.
    Sinks, the last full chunk and what follows it have no reference: they score 3, above every chunk, and tie, which
    recency decides. So with fewer than `sinks + 2 * lag` valid slots all of them tie.

    Source: LagKV (arXiv 2504.04704, section 3). The paper keeps a top-k within each chunk; here chunks compete, on even
    terms: each adds up to 2. After a round, chunks are cut anew from the tokens that stayed.
    """

    name: ClassVar[str] = "lagkv"
    space: ClassVar[Space] = "unbounded"

    class Config(Options):
        """Options of `lagkv`."""

        sinks: int = Field(default=4, ge=0, description="First tokens left out of the chunks; 4, as `cache.sinks`.")
        lag: int = Field(default=128, ge=1, description="Tokens of a chunk; 128 as in the paper.")

    config: Config

    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero at invalid slots."""
        slots, lag = view.valid.shape[-1], self.config.lag
        chunks = max(0, slots - self.config.sinks) // lag
        packed = torch.full(view.valid.shape, _KEPT, device=view.valid.device)  # [B, H, N], by rank
        if chunks > 1:
            keys, values = (self._chunk_scores(states, view.valid, chunks) for states in (view.keys, view.values))
            scores = keys + values  # [B, H, chunks - 1, lag]
            full = (view.valid.sum(-1, keepdim=True) - self.config.sinks) // lag  # [B, H, 1]
            referenced = torch.arange(1, chunks, device=full.device) < full  # [B, H, chunks - 1]
            scores = scores.masked_fill(~referenced[..., None], _KEPT)
            packed[:, :, self.config.sinks : self.config.sinks + (chunks - 1) * lag] = scores.flatten(2)
        return unpack(packed, view.valid).masked_fill(~view.valid, 0.0)[:, :, None]

    def _chunk_scores(self, states: Tensor, valid: Tensor, chunks: int) -> Tensor:
        """Softmax of each token's spread within its chunk, `[B, H, chunks - 1, lag]`; chunks need not be full."""
        start, lag = self.config.sinks, self.config.lag
        packed = pack(states.float(), valid)[:, :, start : start + chunks * lag]
        packed = packed.reshape(*valid.shape[:2], chunks, lag, -1)  # [B, H, chunks, lag, D]
        reference = packed[:, :, 1:]
        low, high = reference.amin(-2, keepdim=True), reference.amax(-2, keepdim=True)
        span = (high - low).masked_fill(high == low, float("inf"))
        scaled = ((packed[:, :, :-1] - low) / span).clamp_(-_LARGEST_CHANNEL, _LARGEST_CHANNEL)
        spread = scaled.std(-1, correction=min(1, scaled.shape[-1] - 1))
        return torch.softmax(spread, -1)
