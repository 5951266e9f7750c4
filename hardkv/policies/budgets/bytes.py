"""A number of bytes for all sequences together."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field
from torch import Tensor

from hardkv.interfaces import Options
from hardkv.policies.budgets.best_row import BestRowBudget
from hardkv.policies.budgets.target import threshold_counts
from hardkv.types import Claims, Limits
from hardkv.units import parse_bytes


class BytesOptions(Options):
    """Options of `bytes`."""

    total: Annotated[int, Field(gt=0), BeforeValidator(parse_bytes, json_schema_input_type=int | str)] = Field(
        description="Bytes of KV cache that all running sequences share, as a number or as 2GiB: pages, rings, tables."
    )
    floor_share: float = Field(
        default=0.2,
        ge=0.0,
        le=1.0,
        description="Share of the target that every head gets whatever its scores.",
    )
    least_tokens: int = Field(
        default=256,
        ge=1,
        description="Mean tokens per head below which no sequence is pressed; then fewer run at once, and others wait.",
    )


class Bytes(BestRowBudget):
    """The bytes are shared over the running sequences by need: one level, below which a sequence keeps all it has.

    A sequence that will see n tokens may keep min(n, level) per head on average; the level is the highest with which
    all that run at once fit in `total`, and rises when others end and none waits. Within a sequence one threshold over
    all layers and heads meets its share, as in `threshold`.

    Ours; max-min fair sharing.
    """

    name = "bytes"
    scope: ClassVar[Literal["layer", "model"]] = "model"

    class Config(BytesOptions):
        """Options."""

    config: Config

    @property
    def shared_bytes(self) -> int:
        """The option `total`."""
        return self.config.total

    @property
    def least_tokens(self) -> int:
        """The option `least_tokens`."""
        return self.config.least_tokens

    def counts(self, claims: Claims, limits: Limits) -> Tensor:
        target = self.config.least_tokens if limits.share_tokens is None else limits.share_tokens
        return threshold_counts(claims, target, self.config.floor_share, limits, per_layer=False)

    def target_tokens(self, seen_tokens: int) -> int | None:
        return self.config.least_tokens
