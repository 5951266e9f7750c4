"""Some heads keep everything, the others sinks and recent tokens, by a pattern that is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import Self

from hardkv.errors import ConfigError
from hardkv.interfaces import Options
from hardkv.policies.budgets.best_row import BestRowBudget
from hardkv.types import Claims, Limits, ModelGeometry

_FORM = "one row for each layer with one number from 0 to 1 for each KV head, as JSON, or as text with tabs or spaces"


class StaticHeadsOptions(Options):
    """Options of `static_heads`."""

    pattern: str = Field(
        min_length=1,
        description=f"File with how much each head retrieves: {_FORM}. Relative to the current folder.",
    )
    threshold: float = Field(
        default=0.5, ge=0.0, le=1.0, description="Heads with at least this value keep everything; 0.5 as in the paper."
    )
    full_share: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Share of heads that keep everything, those with the highest values, instead of the threshold.",
    )
    recent_tokens: int = Field(
        default=256, ge=1, description="Tokens that the other heads keep, sinks among them; 256 as in the paper."
    )

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        if self.full_share is not None and "threshold" in self.model_fields_set:
            raise ValueError("give threshold or full_share, not both")
        return self


class StaticHeads(BestRowBudget):
    """Retrieval heads keep every token, streaming heads `recent_tokens`, sinks among them; which is which, a file says.

    Use it with `scorer: {name: streaming}`, so that a streaming head keeps its newest tokens as in the paper; any other
    scorer chooses the same number of tokens by its own scores. The memory of retrieval heads grows with the sequence.

    Source: DuoAttention (arXiv 2410.10819, section 2.2); the file is its table of gate values.
    """

    name = "static_heads"
    scope: ClassVar[Literal["layer", "model"]] = "model"
    needs_probabilities: ClassVar[bool] = False

    class Config(StaticHeadsOptions):
        """Options."""

    config: Config

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._full = _retrieval_heads(read_pattern(Path(self.config.pattern)), self.config)  # [L, H] bool
        self._full_share = float(self._full.float().mean())

    def check_model(self, geometry: ModelGeometry) -> None:
        layers, heads = len(geometry.windows), geometry.heads
        full_layers = len(geometry.full_layers)
        found = tuple(self._full.shape)
        if found not in ((layers, heads), (full_layers, heads)):
            raise ConfigError(
                f"budget 'static_heads': {self.config.pattern} has {found[0]} rows of {found[1]} numbers; the model has"
                f" {layers} layers with {heads} KV heads. Give a pattern made for this model [budget.pattern]"
            )
        if found[0] != full_layers:
            self._full = self._full[list(geometry.full_layers)]
        self._full_share = float(self._full.float().mean())
        self._full = self._full.to(geometry.device)

    def counts(self, claims: Claims, limits: Limits) -> Tensor:
        full = self._full[: len(claims.value)]
        protected = (claims.protected & claims.valid).sum(-1)
        most = claims.resident.clamp(max=limits.upper)
        streaming = most.clamp(max=self.config.recent_tokens)
        return torch.maximum(torch.where(full, most, streaming), protected)

    def target_tokens(self, seen_tokens: int) -> int | None:
        streaming = min(seen_tokens, self.config.recent_tokens)
        return round(self._full_share * seen_tokens + (1.0 - self._full_share) * streaming) or 1

    def most_tokens(self, seen_tokens: int) -> int | None:
        return seen_tokens


def read_pattern(file: Path) -> Tensor:
    """Read a table `[L, H]` of numbers from 0 to 1.

    Raises:
        ConfigError: no such file, or no such table in it.
    """
    try:
        text = file.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"budget 'static_heads': cannot read {file}: {error} [budget.pattern]") from None
    try:
        rows = json.loads(text) if text.lstrip().startswith("[") else [_numbers(line) for line in text.splitlines()]
        table = torch.tensor([row for row in rows if row], dtype=torch.float32)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"budget 'static_heads': {file}: expected {_FORM} ({error}) [budget.pattern]") from None
    if table.ndim != 2 or not bool(((table >= 0.0) & (table <= 1.0)).all()):
        raise ConfigError(f"budget 'static_heads': {file}: expected {_FORM} [budget.pattern]")
    return table


def _numbers(line: str) -> list[float]:
    return [float(word) for word in line.replace(",", " ").split()]


def _retrieval_heads(pattern: Tensor, config: StaticHeadsOptions) -> Tensor:
    if config.full_share is None:
        return pattern >= config.threshold
    best = pattern.flatten().argsort(descending=True, stable=True)[: round(config.full_share * pattern.numel())]
    return torch.zeros(pattern.numel(), dtype=torch.bool).index_fill_(0, best, True).view(pattern.shape)
