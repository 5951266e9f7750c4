"""Cases that a contract is checked on: a few numbers each, from which the tensors are built.

A case's `repr` is Python that rebuilds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hardkv.testing.draws import NAN, Regime, draw, draw_attention, draw_valid, generator
from hardkv.types import Claims, CostModel, EnteringTokens, Limits, ScoreView, Selection, TierShape, TokenBatch

SCALING = 0.5


@dataclass(frozen=True)
class ScoreCase:
    """A view for scorers: position-ordered slots with gaps, holes, query rows never written, NaN where nothing is."""

    seed: int
    regime: Regime = "normal"
    layers: int = 2
    heads: int = 2
    group: int = 2
    rows: int = 4
    slots: int = 12
    head_dim: int = 4
    softcap: float | None = None
    sinks: bool = False

    def view(self, garbage: float = NAN) -> ScoreView:
        """Build it with `garbage` wherever nothing may look."""
        rng, content = generator(self.seed), generator(self.seed, 1)
        batch, heads, slots, head_dim = self.layers, self.heads, self.slots, self.head_dim
        hidden_size = 8
        valid = draw_valid((batch, heads, slots), rng)
        places = torch.rand(batch, heads, slots * 2, generator=rng).argsort(-1)[..., :slots].sort(-1).values
        rows = self._query_positions(places, rng)
        unwritten = rows < 0
        hole = ~valid[..., None]
        queries = torch.randn(batch, heads, self.group, self.rows, head_dim, generator=rng) * 2
        hidden = torch.randn(batch, self.rows, hidden_size, generator=rng)
        width = heads * self.group * head_dim
        rates = torch.rand(batch, head_dim // 2, generator=rng)
        return ScoreView(
            # One-hot along slots: one token stands out and the others have no content at all.
            keys=self._content((batch, heads, head_dim, slots), content).masked_fill(hole, garbage),
            values=self._content((batch, heads, head_dim, slots), content).masked_fill(hole, garbage),
            positions=places.masked_fill(~valid, -(2**40) if garbage != garbage else 10**6),
            valid=valid,
            scaling=SCALING,
            layers=tuple(range(3, 3 + batch)),
            softcap=self.softcap,
            queries=queries.masked_fill(unwritten[:, None, None, :, None], garbage),
            query_positions=rows,
            statistic=torch.rand(batch, heads, slots, generator=rng).masked_fill(~valid, garbage),
            sink_logits=torch.randn(heads, self.group, generator=rng) if self.sinks else None,
            hidden_states=hidden.masked_fill(unwritten[..., None], garbage),
            output_weights=tuple(torch.randn(hidden_size, width, generator=rng) for _ in range(batch)),
            frequencies=torch.where(rates < 0.2, 0.0, rates),  # a still pair now and then
        )

    def steps(self, count: int = 3) -> Tensor:
        """Probabilities that decode steps would hand to an online scorer, `[count, B, H, G, N]`."""
        view = self.view()
        shape = (count, self.layers, self.heads, self.group, self.slots)
        return draw_attention(shape, view.valid[None, :, :, None], generator(self.seed, 2))

    def _content(self, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        return draw(shape, self.regime, rng).transpose(-1, -2).contiguous()

    def _query_positions(self, places: Tensor, rng: torch.Generator) -> Tensor:
        """Positions of the rows in ring order, the newest token's among them; -1 where a row was never written."""
        rows = []
        for layer in range(self.layers):
            newest = int(places[layer].max())
            older = torch.randperm(newest, generator=rng)[: self.rows - 1] if newest else torch.empty(0).long()
            written = torch.cat([older.sort().values, torch.tensor([newest])])
            lost = int(torch.randint(0, self.rows, (), generator=rng))
            written = written[lost:] if lost < len(written) else written[-1:]
            ring = torch.nn.functional.pad(written, (0, self.rows - len(written)), value=-1)
            rows.append(ring.roll(lost))
        return torch.stack(rows)


@dataclass(frozen=True)
class EntryCase:
    """Tokens on their way in: several rows of a prompt."""

    seed: int
    regime: Regime = "normal"
    rows: int = 2
    heads: int = 2
    group: int = 2
    tokens: int = 6
    head_dim: int = 4
    hidden_size: int = 8
    layer: int = 3

    def entering(self) -> EnteringTokens:
        """Build them."""
        rng = generator(self.seed)
        size = (self.rows, self.heads, self.tokens, self.head_dim)
        first = torch.randint(0, 100, (self.rows, 1), generator=rng)
        return EnteringTokens(
            layer=self.layer,
            keys=draw(size, self.regime, rng),
            values=draw(size, self.regime, rng),
            queries=torch.randn(self.rows, self.heads, self.group, self.tokens, self.head_dim, generator=rng),
            positions=first + torch.arange(self.tokens),
            hidden_states=torch.randn(self.rows, self.tokens, self.hidden_size, generator=rng),
        )


@dataclass(frozen=True)
class RowCase:
    """Scores of some rows, their raw attention, and the slots that count."""

    seed: int
    regime: Regime = "normal"
    layers: int = 2
    heads: int = 2
    rows: int = 3
    slots: int = 16

    def build(self) -> tuple[Tensor, Tensor, Tensor]:
        """`scores, reference [B, H, R, N]` and `valid [B, H, N]`; scores are NaN off `valid`."""
        rng = generator(self.seed)
        shape = (self.layers, self.heads, self.rows, self.slots)
        valid = draw_valid((self.layers, self.heads, self.slots), rng)
        scores = draw(shape, self.regime, rng, huge=5e37).masked_fill(~valid[:, :, None], NAN)
        return scores, draw_attention(shape, valid[:, :, None], rng), valid

    def distinct(self) -> Tensor:
        """Scores `[B, H, R, N]` without ties, an eighth or more apart."""
        shape = (self.layers, self.heads, self.rows, self.slots)
        return torch.rand(*shape, generator=generator(self.seed, 1)).argsort(-1).float() / 8


@dataclass(frozen=True)
class ClaimCase:
    """Calibrated rows of heads of unequal length, with sinks and a local window."""

    seed: int
    regime: Regime = "normal"
    layers: int = 2
    heads: int = 2
    rows: int = 2
    slots: int = 16
    sinks: int = 1
    local_window: int = 2
    upper: int = 12

    def probabilities(self) -> Tensor:
        """`[L, H, R, N]`, zero where nothing is held; rows of an empty head are all zero."""
        held = self.valid()[:, :, None]
        content = draw((self.layers, self.heads, self.rows, self.slots), self.regime, generator(self.seed), huge=1e37)
        content = content.abs().masked_fill(~held, 0.0)
        return content / content.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)

    def valid(self) -> Tensor:
        """Slots that hold a token, `[L, H, N]`; a head may be empty."""
        lengths = torch.randint(0, self.slots + 1, (self.layers, self.heads, 1), generator=generator(self.seed, 1))
        return torch.arange(self.slots) < lengths

    def protected(self) -> Tensor:
        """Sinks and local window, `[L, H, N]`."""
        valid, column = self.valid(), torch.arange(self.slots)
        return valid & ((column < self.sinks) | (column >= valid.sum(-1, keepdim=True) - self.local_window))

    def limits(self) -> Limits:
        """The cache's bounds."""
        return Limits(
            sinks=self.sinks,
            local_window=self.local_window,
            lower=0,
            upper=self.upper,
            seen_tokens=self.slots,
            total_layers=self.layers,
        )

    def claims(self, value: Tensor, votes: Tensor) -> Claims:
        """What a budget's `claim` gave, NaN where nothing is held."""
        valid = self.valid()
        return Claims(value.masked_fill(~valid, NAN), votes, valid, self.protected())


@dataclass(frozen=True)
class SelectionCase:
    """Rounds of random selections over a real cascade, and what reading, copying and launching cost."""

    seed: int
    rounds: int = 2
    layers: int = 2
    heads: int = 2
    page_slots: int = 2
    interval: int = 4
    density: float = 0.5
    upper: int = 12
    copy_seconds_per_byte: float = 1e-10

    def cost(self) -> CostModel:
        """What moving costs against reading."""
        return CostModel(
            read_seconds_per_byte=1e-11,
            copy_seconds_per_byte=self.copy_seconds_per_byte,
            launch_seconds=1e-8,
            slot_bytes=64,
            horizon_steps=16,
        )

    def limits(self) -> Limits:
        """The cache's bounds."""
        return Limits(sinks=1, local_window=2, lower=4, upper=self.upper, total_layers=self.layers)

    def select(self, valid: Tensor, protected: Tensor, stage: int) -> Selection:
        """Keep a random share of each head's slots, and the protected ones; `[L, H, N]` each."""
        rng = generator(self.seed, stage + 1)
        share = self.density * 2 * torch.rand(*valid.shape[:2], 1, generator=rng)
        keep = valid & (protected | (torch.rand(*valid.shape, generator=rng) < share))
        return Selection(keep=keep, valid=valid, held_slots=valid.sum(-1))


Step = Literal["admit", "admit none", "reset"]


@dataclass(frozen=True)
class TierCase:
    """A tier's life as a list of steps, on shapes and numbers drawn from a seed."""

    seed: int
    regime: Regime = "normal"
    layers: int = 2
    heads: int = 2
    group: int = 2
    head_dim: int = 4
    slots: int = 6
    softcap: float | None = None
    steps: tuple[Step, ...] = ("admit", "admit")

    def shape(self) -> TierShape:
        """What the tier must be able to hold."""
        device = torch.device("cpu")
        return TierShape(self.layers, self.heads, self.head_dim, self.slots, torch.float32, device)

    def query(self, stage: int = 0) -> Tensor:
        """A query `[H, G, D]`."""
        return torch.randn(self.heads, self.group, self.head_dim, generator=generator(self.seed, 500 + stage))

    def batch(self, stage: int, width: int = 3, garbage: float = NAN) -> TokenBatch:
        """Tokens of a step: some of `width` slots in each head, newer at each stage, `garbage` in the others."""
        rng = generator(self.seed, stage + 1)
        mask = torch.rand(self.heads, width, generator=rng) < 0.6
        positions = (torch.arange(width) + stage * width).expand(self.heads, width)
        content = [
            draw((self.heads, width, self.head_dim), self.regime, rng).masked_fill(~mask[..., None], garbage)
            for _ in range(2)
        ]
        return TokenBatch(
            keys=content[0],
            values=content[1],
            positions=positions.masked_fill(~mask, -7),
            mask=mask,
            scaling=SCALING,
            query=torch.randn(self.heads, self.head_dim, generator=rng),
            survivors=torch.zeros_like(mask),
        )

    def folding(self, garbage: float = NAN) -> TokenBatch:
        """Tokens of which some are dropped and some stay; `garbage` in those that are neither."""
        batch, rng = self.batch(0, width=8, garbage=0.0), generator(self.seed, 400)
        keys, values = (draw((self.heads, 8, self.head_dim), self.regime, rng) for _ in range(2))
        stays = ~batch.mask & (torch.rand(self.heads, 8, generator=rng) < 0.7)
        neither = ~(batch.mask | stays)[..., None]
        return replace(
            batch,
            keys=keys.masked_fill(neither, garbage),
            values=values.masked_fill(neither, garbage),
            survivors=stays,
        )
