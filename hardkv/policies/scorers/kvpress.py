"""Scorer `kvpress`: scores tokens with a press of the library kvpress."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hardkv.errors import ConfigError, UnsupportedModelError
from hardkv.interfaces import ImportanceScorer, Options, Space
from hardkv.policies.scorers.kvpress_presses import build_press
from hardkv.policies.scorers.rotation import rotate_by
from hardkv.types import ModelGeometry, ScoreView


class KVPress(ImportanceScorer):
    """Scores of a `ScorerPress` of the library kvpress, which is installed beside hardkv. R = 1.

    The press is shown each head's resident slots in position order, without gaps, in float32; heads that hold equally
    many are shown together. What it wants to know of queries comes from the query window: `SnapKVPress` is given the
    attention of the newest rows, and the presses that expect queries are given the window's, taken back by their own
    positions; the positions to come count from the newest token. Its `compression_ratio` stays 0: the budget decides.

    Importing kvpress wraps every attention function that transformers knows in this process, which changes no result
    here. A press may wait for the device. Ours; each press names its source.
    """

    name: ClassVar[str] = "kvpress"
    space: ClassVar[Space] = "unbounded"

    class Config(Options):
        """Options of `kvpress`."""

        press: str = Field(min_length=1, description="Class of kvpress, such as KnormPress; it must be a ScorerPress.")
        options: dict[str, Any] = Field(
            default_factory=dict, description="Options of the press by name, without compression_ratio."
        )

    config: Config

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._reads, self._press = build_press(self.config.press, self.config.options)

    @property
    def needs_queries(self) -> bool:
        """True for a press that reads attention or queries."""
        return self._reads.queries

    def check_model(self, geometry: ModelGeometry) -> None:
        """Refuse a model whose queries cannot be moved, and let a trained press load what belongs to the model."""
        if self._reads.rotates:
            known, dims = geometry.frequencies, geometry.head_dim
            frequencies = [known[layer] if known else None for layer in geometry.full_layers]
            if any(each is None or 2 * len(each) != dims for each in frequencies):
                raise UnsupportedModelError(
                    f"{self.config.press} needs rotary embeddings with known frequencies over the whole head in every"
                    " full-attention layer, and this model has others. Write another press, such as SnapKVPress"
                    " [scorer.press]"
                )
        if self._reads.trained:
            model = SimpleNamespace(config=geometry.modules[0].config, dtype=torch.float32, device=geometry.device)
            try:
                self._press.post_init_from_model(model)
            except Exception as error:
                raise ConfigError(
                    f"{self.config.press} could not load what was trained for this model:"
                    f" {type(error).__name__}: {error} [scorer.press]"
                ) from error

    @torch.no_grad()
    def score(self, view: ScoreView) -> Tensor:
        """Give scores `[B, H, 1, N]`; zero at invalid slots, equal where a head holds too little to choose from."""
        scores = torch.ones(view.valid.shape, device=view.valid.device)
        for row in range(len(scores)):
            rows = self._rows(view, row)
            if rows is not None and not len(rows):
                continue
            listed = view.valid[row]
            if self._reads.attention:
                assert rows is not None
                assert view.query_positions is not None
                # The newest rows' own tokens are not scored: the press keeps them.
                listed = listed & (view.positions[row] < view.query_positions[row, rows[0]])
            for group in _groups(listed, self._reads.every_head):
                length = group.slots.shape[1]
                if length > self._reads.least_slots(self._press):
                    found = self._call(view, row, rows, group)[group.picked]
                    part = found[:, -1:].expand(-1, listed.shape[1])
                    scores[row, group.heads] = part.scatter(1, group.slots[group.picked], found[:, :length])
        return scores.masked_fill_(~view.valid, 0.0)[:, :, None]

    def _rows(self, view: ScoreView, row: int) -> Tensor | None:
        """Rows of the query window that the press is told of, oldest first; None if it reads none."""
        if not self._reads.queries:
            return None
        if view.query_positions is None:
            raise ValueError("this view carries no queries: set `needs_queries = True` on the scorer")
        positions = view.query_positions[row]
        order = positions.argsort()
        if self._reads.attention:
            return order[positions[order] >= 0][-self._press.window_size :]
        return order[positions[order] >= self._press.n_sink]

    def _call(self, view: ScoreView, row: int, rows: Tensor | None, group: _Group) -> Tensor:
        """Scores `[S, n]` of the group's slots; the attention reader adds the window's at the end."""
        layer = view.layers[row if len(view.layers) > 1 else 0]
        heads, head_dim = len(group.shown), view.keys.shape[-1]
        per_head = 1 if view.queries is None else view.queries.shape[2]
        sizes = {"num_attention_heads": heads * per_head, "num_key_value_heads": heads, "head_dim": head_dim}
        module = SimpleNamespace(config=SimpleNamespace(**sizes), head_dim=head_dim, layer_idx=layer)
        press, attention, hidden = self._press, None, view.keys.new_zeros(1, 0, 0)
        index = group.slots[..., None].expand(-1, -1, head_dim)
        keys, values = (part[row, group.shown].gather(1, index).float()[None] for part in (view.keys, view.values))
        if self._reads.attention:
            assert rows is not None
            window = len(rows)
            press = replace(press, window_size=window)
            attention = _attention(view, row, rows, group)
            keys, values = (torch.nn.functional.pad(part, (0, 0, 0, window)) for part in (keys, values))
            hidden = keys.new_zeros(1, window + 1, 0)
        elif rows is not None:
            hidden = torch.nn.functional.pad(_turned_queries(view, row, rows, group), (0, 0, press.n_sink, 0))
            module.q_proj = torch.nn.Identity()
            module.rotary_emb = _Rotary(view, row, from_zero=self._reads.trained)
        found: Tensor = press.score(module, hidden, keys, values, attention, {})
        return found[0].float()


@dataclass(frozen=True)
class _Group:
    """Heads of one layer that hold equally many slots, and what the press is shown of them."""

    heads: Tensor  # [K], the heads whose scores are taken
    shown: Tensor  # [S], the heads that the press is shown
    slots: Tensor  # [S, n], their slots in position order
    picked: Tensor  # [K], where `heads` are among `shown`


def _groups(listed: Tensor, every_head: bool) -> Iterator[_Group]:
    """Heads by the number of their slots in `listed [H, N]`.

    A press that knows heads by their number is shown as many as there are, the ones of other lengths replaced.
    """
    order = (~listed).to(torch.uint8).argsort(dim=-1, stable=True)
    lengths = listed.sum(-1)
    for length in sorted(set(lengths.tolist())):
        heads = (lengths == length).nonzero().squeeze(1)
        shown = picked = heads
        if every_head:
            shown = torch.arange(len(lengths), device=heads.device).where(lengths == length, heads[0])
        else:
            picked = torch.arange(len(heads), device=heads.device)
        yield _Group(heads, shown, order[shown, :length], picked)


def _attention(view: ScoreView, row: int, rows: Tensor, group: _Group) -> Tensor:
    """Attention `[1, S * G, W, n + W]` of the newest rows; zeros stand for their own tokens, which may be elsewhere."""
    weights = view.attention[row, group.shown][:, :, rows]  # [S, G, W, N]
    index = group.slots[:, None, None].expand(-1, *weights.shape[1:3], -1)
    return torch.nn.functional.pad(weights.gather(-1, index), (0, len(rows))).flatten(0, 1)[None]


def _turned_queries(view: ScoreView, row: int, rows: Tensor, group: _Group) -> Tensor:
    """The window's queries, each moved on to the newest position, `[1, W, S * G * D]`."""
    assert view.queries is not None
    assert view.query_positions is not None
    assert view.frequencies is not None
    positions = view.query_positions[row, rows]
    queries = view.queries[row, group.shown][:, :, rows].float()
    turned = rotate_by(queries, positions.max() - positions, view.frequencies[row])
    return turned.permute(2, 0, 1, 3).flatten(1)[None]


class _Rotary:
    """Stands for a rotary embedding: the first position asked for is the one after the newest token.

    Angles count from the newest token, whose position the queries have; `from_zero`: from position 0, as for queries
    that were never rotated.
    """

    def __init__(self, view: ScoreView, row: int, from_zero: bool) -> None:
        assert view.frequencies is not None
        assert view.query_positions is not None
        self.frequencies = view.frequencies[row].double()
        self.first = 1 + (view.query_positions[row].max() if from_zero else 0)

    def __call__(self, vectors: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        steps = position_ids - position_ids[:, :1] + self.first
        angles = (steps[..., None] * self.frequencies).repeat(1, 1, 2)  # [1, P, D]
        return angles.cos().float(), angles.sin().float()
