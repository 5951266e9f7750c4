"""What each part runs, at full size and as a dry run on a CPU, and how much memory that takes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

DEVICE_BYTES = 130 << 30
"""What a plan may need at most: a device of 139 GiB, less what its libraries hold."""


@dataclass(frozen=True)
class ParityPlan:
    """Which shapes of each operator are compared with its oracle."""

    head_dims: tuple[int, ...] = (64, 80, 96, 128, 256)
    groups: tuple[int, ...] = (1, 4, 8, 16)
    pages: int = 300
    """Pages of the longest head in the realistic cases."""
    tokens: int = 4096
    """Tokens of a row in the realistic cases of the selection's operators."""
    rows: int = 32


@dataclass(frozen=True)
class LayoutPlan:
    """The paper's head-adaptive layout: density of (layer, head) is `first * by_layer ** layer * by_head ** head`."""

    sequences: int = 32
    lengths: tuple[int, ...] = (20480, 14336, 10240, 6144, 2048)
    layers: int = 36
    heads: int = 8
    group: int = 4
    head_dim: int = 128
    page_slots: int = 16
    first: float = 0.5
    by_layer: float = 0.93389
    by_head: float = 0.87215
    dtype: torch.dtype = torch.bfloat16
    copy_bytes: int = 4 << 30
    distinct_bytes: int = 1 << 30
    """The baselines go round buffers that hold at least this much, so that no figure comes from the L2 cache."""
    replays: int = 20

    def densities(self) -> torch.Tensor:
        """Share of tokens that each layer and head keeps, `[L, H]` float64."""
        layer = torch.arange(self.layers, dtype=torch.float64)[:, None]
        head = torch.arange(self.heads, dtype=torch.float64)
        return self.first * self.by_layer**layer * self.by_head**head

    def kept(self, length: int) -> torch.Tensor:
        """Slots that each layer and head keeps of each sequence, `[L, H]` int64."""
        return torch.round(self.densities() * length).long().clamp_min(1)

    def pages(self, length: int) -> int:
        """Pages of all layers, heads and sequences."""
        return self.sequences * int((-(-self.kept(length) // self.page_slots)).sum())

    def slot_bytes(self) -> int:
        """Bytes of K and V of one slot."""
        return 2 * self.head_dim * self.dtype.itemsize

    def layer_bytes(self, tokens: int) -> int:
        """Bytes of K and V of one layer that holds `tokens` in every head."""
        return self.sequences * self.heads * tokens * self.slot_bytes()

    def buffers(self, tokens: int) -> int:
        """Layers' buffers that a baseline goes round."""
        return max(2, -(-self.distinct_bytes // self.layer_bytes(tokens)))

    def bytes_needed(self) -> int:
        """The most that is allocated at once."""
        most = 2 * self.copy_bytes
        for length in self.lengths:
            longest = int(self.kept(length).max())
            # A slot has K, V, a bias, and its logits where they are written.
            slots = (self.pages(length) + 1) * self.page_slots
            ours = slots * (self.slot_bytes() + 4 + 4 * self.group)
            padded = self.buffers(longest) * self.layer_bytes(longest)
            # The oracle in float32: one layer's K and V, and the scores three times.
            scores = 3 * 4 * self.sequences * self.heads * self.group * length + 2 * self.layer_bytes(length)
            masked = self.buffers(length) * (self.layer_bytes(length) + 2 * self.sequences * self.heads * length)
            most = max(most, ours, padded + scores, masked + scores)
        return most


@dataclass(frozen=True)
class ModelPlan:
    """A random decoder of the qwen3 family."""

    hidden: int = 4096
    intermediate: int = 12288
    layers: int = 36
    query_heads: int = 32
    heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151936
    positions: int = 40960
    dtype: torch.dtype = torch.bfloat16

    def weight_bytes(self) -> int:
        """Bytes of embedding, layers and output matrix."""
        attention = 2 * self.hidden * (self.query_heads + self.heads) * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate
        return (2 * self.vocabulary * self.hidden + self.layers * layer) * self.dtype.itemsize


@dataclass(frozen=True)
class EndToEndPlan:
    """Decoding of a whole model, against the full cache and uniform budgets."""

    model: ModelPlan = field(default_factory=ModelPlan)
    sequences: int = 16
    contexts: tuple[int, ...] = (32768, 16384)
    mean_tokens: int = 2048
    interval: int = 128
    local_window: int = 32
    page_slots: int = 32
    warm_up: int = 130
    """Steps before the timed ones: more than an interval, so that the passes' kernels are compiled by then."""
    intervals: float = 2.5
    static_steps: int = 10

    @property
    def steps(self) -> int:
        """Timed steps, so many that every sequence is compressed twice among them."""
        return int(self.intervals * self.interval)

    def total_tokens(self, context: int) -> int:
        """What a sequence may grow to."""
        return context + self.warm_up + self.steps + self.interval


@dataclass(frozen=True)
class EndurancePlan:
    """Many steps of a small model with compressions, joins and leaves."""

    model: ModelPlan = field(default_factory=lambda: ModelPlan(1024, 3072, 8, 16, 8, 64, 32000, 8192, torch.bfloat16))
    sequences: int = 4
    prompt: int = 700
    mean_tokens: int = 256
    interval: int = 64
    local_window: int = 32
    page_slots: int = 16
    steps: int = 2000


@dataclass(frozen=True)
class Plan:
    """All parts."""

    parity: ParityPlan = field(default_factory=ParityPlan)
    layout: LayoutPlan = field(default_factory=LayoutPlan)
    endurance: EndurancePlan = field(default_factory=EndurancePlan)
    end_to_end: EndToEndPlan = field(default_factory=EndToEndPlan)


_TINY = ModelPlan(64, 96, 3, 4, 2, 16, 259, 4096, torch.float32)
DRY = Plan(
    ParityPlan((64, 80), (1, 4), 6, 200, 4),
    LayoutPlan(2, (160, 96), 3, 2, 2, 16, dtype=torch.float32, copy_bytes=1 << 20, distinct_bytes=1 << 10, replays=3),
    EndurancePlan(_TINY, 3, 70, 40, 16, 8, 8, 80),
    EndToEndPlan(_TINY, 3, (160, 96), 40, 16, 8, 8, 17, 2.5, 2),
)
REAL = Plan()
