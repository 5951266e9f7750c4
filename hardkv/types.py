"""Frozen dataclasses passed between the stages of a compression pass.

Axes: L layers, B sequences, H KV heads, G query heads per KV head, W query rows, R score rows, N slots, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol, TypedDict

import torch
from torch import Tensor, nn

from hardkv_kernels import window_scores


@dataclass(frozen=True)
class ScoreView:
    """What an importance scorer sees: the resident tokens of some layers of one sequence, in position order.

    Each row of B is one layer; a device that waits for launches is given many at once, a CPU one at a time.

    Slots where `valid` is False may hold anything, NaN included, and must not influence the result.
    """

    keys: Tensor  # [B, H, N, D], post-RoPE
    values: Tensor  # [B, H, N, D]
    positions: Tensor  # [B, H, N] int64, the RoPE index each slot was written with
    valid: Tensor  # [B, H, N] bool
    scaling: float  # logits = q.k * scaling
    layers: tuple[int, ...] = (0,)  # the model layer of each row of B; a single one stands for all
    softcap: float | None = None
    queries: Tensor | None = None  # [B, H, G, W, D], post-RoPE, each rotated at its own position
    query_positions: Tensor | None = None  # [B, W] int64, -1 where the row was never written
    statistic: Tensor | None = None  # [B, H, N] float32, what an online scorer gathered
    sink_logits: Tensor | None = None  # [H, G] float32, learned attention-sink logits (gpt-oss)
    hidden_states: Tensor | None = None  # [B, W, M], the attention layer's inputs at `query_positions`
    output_weights: tuple[Tensor, ...] = ()  # [M, H*G*D], the output projection of each row of B; empty if not known
    frequencies: Tensor | None = None  # [B, F] float32, radians per position of the rotary pairs (i, i + F), 0 = still
    modules: tuple[nn.Module, ...] = ()  # the attention module of each row of B, as transformers built it

    @cached_property
    def row_valid(self) -> Tensor:
        """Query rows that were written, `[B, W]` bool."""
        return self._query_positions() >= 0

    @cached_property
    def visible(self) -> Tensor:
        """Slots each query row may see: valid and not newer than the row, `[B, H, W, N]` bool."""
        rows = self._query_positions()[:, None, :, None]
        return self.valid[:, :, None, :] & (self.positions[:, :, None, :] <= rows)

    @cached_property
    def logits(self) -> Tensor:
        """Raw attention logits of the window rows, `[B, H, G, W, N]` float32, -inf where not visible."""
        if self.queries is None:
            raise ValueError("this view carries no queries: set `needs_queries = True` on the scorer")
        keys = self.keys.float().masked_fill(~self.valid[..., None], 0.0)
        logits = torch.matmul(self.queries.float(), keys[:, :, None].transpose(-1, -2)) * self.scaling
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.masked_fill(~self.visible[:, :, None], float("-inf"))

    @cached_property
    def attention(self) -> Tensor:
        """Raw attention of the window rows, `[B, H, G, W, N]` float32; rows never written are all zero."""
        logits = self.logits
        top = logits.amax(-1, keepdim=True)
        if self.sink_logits is not None:
            top = torch.maximum(top, self.sink_logits[None, :, :, None, None])
        weights = torch.exp(logits - top.clamp_min(torch.finfo(torch.float32).min))
        total = weights.sum(-1, keepdim=True)
        if self.sink_logits is not None:
            total = total + torch.exp(self.sink_logits[None, :, :, None, None] - top)
        return weights / total.clamp_min(torch.finfo(torch.float32).tiny)

    def folded(self, update: FusedUpdate) -> Tensor:
        """The statistic `[B, H, N]` that the window rows leave, as if each had been one decode step of `update`."""
        if self.queries is None:
            raise ValueError("this view carries no queries to fold")
        statistic: Tensor = window_scores(
            self.queries,
            self._query_positions(),
            self.keys,
            self.positions,
            self.valid,
            self.scaling,
            self.softcap,
            self.sink_logits,
            update.reduction,
            update.power,
            update.decay,
            update.floor,
            None,
        )
        return statistic

    def with_statistic(self, statistic: Tensor) -> ScoreView:
        """The same view with an online scorer's statistic `[B, H, N]`."""
        return replace(self, statistic=statistic)

    def _query_positions(self) -> Tensor:
        if self.query_positions is None:
            raise ValueError("this view carries no queries: set `needs_queries = True` on the scorer")
        return self.query_positions


@dataclass(frozen=True)
class EnteringTokens:
    """Tokens of one layer at the moment they enter the cache: a prompt's (R = 1), or one of each sequence (N = 1)."""

    layer: int  # the model layer
    keys: Tensor  # [R, H, N, D], post-RoPE
    values: Tensor  # [R, H, N, D]
    queries: Tensor  # [R, H, G, N, D], post-RoPE
    positions: Tensor  # [R, N] int64
    hidden_states: Tensor | None = None  # [R, N, M], the attention layer's inputs

    def row(self, row: int) -> EnteringTokens:
        """The tokens of one row, R = 1."""
        one = slice(row, row + 1)
        hidden = None if self.hidden_states is None else self.hidden_states[one]
        return EnteringTokens(
            self.layer, self.keys[one], self.values[one], self.queries[one], self.positions[one], hidden
        )


@dataclass(frozen=True)
class Claims:
    """What each token may claim of the budget, for one or more layers of one sequence.

    Tokens are ranked by (protected, votes, value, recency); `valid` is False in padding.
    """

    value: Tensor  # [L, H, N] float32, higher = keep
    votes: Tensor  # [L, H, N] int32, rows that voted for the token (all zero when a budget does not vote)
    valid: Tensor  # [L, H, N] bool
    protected: Tensor  # [L, H, N] bool, sinks and local window

    @property
    def resident(self) -> Tensor:
        """Valid slots per head, `[L, H]` int64."""
        return self.valid.sum(-1)

    def layer(self, index: int) -> Claims:
        """The claims of one layer, L = 1."""
        parts = (self.value, self.votes, self.valid, self.protected)
        value, votes, valid, protected = (part[index][None] for part in parts)
        return Claims(value=value, votes=votes, valid=valid, protected=protected)

    @staticmethod
    def stack(claims: list[Claims]) -> Claims:
        """Join claims of several layers along the first axis, padding slots to the longest."""
        longest = max(claim.value.shape[-1] for claim in claims)

        def join(parts: list[Tensor]) -> Tensor:
            return torch.cat([torch.nn.functional.pad(part, (0, longest - part.shape[-1])) for part in parts])

        return Claims(
            value=join([claim.value for claim in claims]),
            votes=join([claim.votes for claim in claims]),
            valid=join([claim.valid for claim in claims]),
            protected=join([claim.protected for claim in claims]),
        )


@dataclass(frozen=True)
class Limits:
    """Slots per head that bound every budget, from the `cache` section of the configuration."""

    sinks: int
    local_window: int
    lower: int  # sequences with at most this many tokens per head keep everything
    upper: int  # no head keeps more than this many
    seen_tokens: int = 0  # tokens the sequence has seen so far, for budgets given as a share
    total_layers: int = 1  # layers the budget spans, also while only the first few have been scored
    share_tokens: int | None = None  # mean tokens per head, this sequence's share of a budget's `shared_bytes`


@dataclass(frozen=True)
class FusedUpdate:
    """An online scorer's update in a form that one kernel can do, with p = max(probability, floor).

    `power`: `statistic = decay * statistic + mean_g p ** power`. `max`: `statistic = max(statistic, max_g p)`.
    """

    reduction: Literal["power", "max"]
    power: float = 1.0
    decay: float = 1.0
    floor: float = 0.0


@dataclass(frozen=True)
class Selection:
    """Which resident slots of one sequence are kept; slots of a head are in position order."""

    keep: Tensor  # [L, H, N] bool, a subset of `valid`
    valid: Tensor  # [L, H, N] bool
    held_slots: Tensor  # [L, H] int64, slots a decode step reads now: kept or not


@dataclass(frozen=True)
class CostModel:
    """Measured costs that decide when moving pays (DESIGN: memory-time integral)."""

    read_seconds_per_byte: float
    copy_seconds_per_byte: float
    launch_seconds: float
    slot_bytes: int  # K and V of one slot of one head
    horizon_steps: int  # decode steps until the next compression


@dataclass(frozen=True)
class Layout:
    """How a selection is laid out in the sparse tier."""

    keep: Tensor  # [L, H, N] bool; may be wider than the selection's (union modes)
    rewrite: Tensor  # [L, H] bool: compact to kept slots; else mask in place (sparse loading)
    reserve_slots: Tensor  # [L, H] int64, slots to hold pages for; what stays has its pages in any case


class SlotStore(Protocol):
    """Slots in the pages of the pool, the same number in every head, that a tier may keep its tokens in.

    The decode step attends them together with all other pages, in one launch.
    """

    def read(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of `keys, values [H, N, D]` and `bias [H, N]` float32 of one layer's N slots."""

    def write(self, layer: int, keys: Tensor, values: Tensor, bias: Tensor) -> None:
        """Replace them; a bias of -inf hides a slot, any other number is added to its logit."""


@dataclass(frozen=True)
class TierShape:
    """What a tier must be able to hold for one sequence."""

    layers: int
    heads: int
    head_dim: int
    slots: int  # capacity per layer and head, from `cache.condensed_slots`
    dtype: torch.dtype
    device: torch.device
    store: SlotStore | None = None  # given to a tier that says `lies_in_pages`


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of one layer of one sequence on their way into a tier."""

    keys: Tensor  # [H, N, D], post-RoPE
    values: Tensor  # [H, N, D]
    positions: Tensor  # [H, N] int64
    mask: Tensor  # [H, N] bool, the tokens meant; other slots may hold anything
    scaling: float = 1.0  # logits = q.k * scaling
    query: Tensor | None = None  # [H, D], the newest query, mean over the group; for merging
    survivors: Tensor | None = None  # [H, N] bool, tokens of this batch that stay where they are
    scores: Tensor | None = None  # [H, N] float32, given on entry


class LayerFacts(TypedDict):
    """The fields of a `ScoreView` that stay the same from pass to pass."""

    output_weights: tuple[Tensor, ...]
    frequencies: Tensor | None
    modules: tuple[nn.Module, ...]


@dataclass(frozen=True)
class ModelGeometry:
    """What the cache must know of a model's attention."""

    windows: tuple[int | None, ...]  # per layer: None = full attention, else the sliding window in tokens
    heads: int  # KV heads
    group: int  # query heads per KV head
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    max_positions: int
    hidden_size: int = 0
    modules: tuple[nn.Module, ...] = ()  # the attention module of each layer
    output_weights: tuple[Tensor | None, ...] = ()  # [M, H*G*D] of each layer; None where there is no plain projection
    frequencies: tuple[Tensor | None, ...] = ()  # [F] float32 of each layer, as in ScoreView; None where not known

    def facts(self, layers: Sequence[int]) -> LayerFacts:
        """What a `ScoreView` says of some layers, by the names it has there."""
        weights = [self.output_weights[layer] for layer in layers if self.output_weights]
        plain = [weight for weight in weights if weight is not None]
        turns = [self.frequencies[layer] for layer in layers if self.frequencies]
        known = [turn for turn in turns if turn is not None]
        return {
            "output_weights": tuple(plain) if len(plain) == len(layers) else (),
            "frequencies": torch.stack(known) if known and len(known) == len(layers) else None,
            "modules": tuple(self.modules[layer] for layer in layers if self.modules),
        }

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Model layers that attend all tokens: the ones that are compressed."""
        return tuple(layer for layer, window in enumerate(self.windows) if window is None)


@dataclass(frozen=True)
class AttentionSettings:
    """What stays the same from call to call of one attention layer."""

    layer: int
    scaling: float
    softcap: float | None
    sink_logits: Tensor | None  # [H*G]

    def sinks(self, heads: int) -> Tensor | None:
        """The sink logits by KV head, `[H, G]` float32."""
        return None if self.sink_logits is None else self.sink_logits.float().view(heads, -1)


@dataclass(frozen=True)
class AttentionCall:
    """One attention layer's inputs and settings, as the model hands them over."""

    layer: int
    query: Tensor  # [B, H*G, S, D], post-RoPE
    keys: Tensor  # [B, H, S, D], post-RoPE
    values: Tensor  # [B, H, S, D]
    scaling: float
    softcap: float | None = None
    sink_logits: Tensor | None = None  # [H*G]
    module: nn.Module | None = None  # the attention module that calls
    hidden_states: Tensor | None = None  # [B, S, M], its inputs, where the scorer asked for them

    @property
    def settings(self) -> AttentionSettings:
        """The part that may be kept: it refers to no K or V."""
        return AttentionSettings(self.layer, self.scaling, self.softcap, self.sink_logits)
