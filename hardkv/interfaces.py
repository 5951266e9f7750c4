"""The five interfaces a plugin may implement, and the two bases beneath them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from hardkv.types import (
    Claims,
    CostModel,
    EnteringTokens,
    FusedUpdate,
    Layout,
    Limits,
    ModelGeometry,
    ScoreView,
    Selection,
    TierShape,
    TokenBatch,
)

Space = Literal["probability", "logit", "unbounded"]
Mode = Literal["per_head", "per_layer", "union"]


class Options(BaseModel):
    """Base of every component's `Config`: frozen, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Component(ABC):
    """Something that can be named in the configuration and built from its options."""

    name: ClassVar[str]
    """The value of `name:` in the configuration."""
    summary: ClassVar[str] = ""
    """One line for `hardkv plugins`; the first line of the docstring when empty."""

    class Config(Options):
        """Options of this component; subclasses replace it."""

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

    def check_model(self, geometry: ModelGeometry) -> None:
        """Refuse a model that this component cannot serve; called once, before anything runs.

        Raises:
            ConfigError, UnsupportedModelError: what was expected, what the model has, what to write instead.
        """
        return


class ImportanceScorer(Component):
    """Scores every resident token of every head; higher = keep."""

    space: ClassVar[Space] = "unbounded"
    """`probability`: comparable over heads as it is, calibration passes it unchanged."""

    @property
    def needs_queries(self) -> bool:
        """Whether `score` reads the window of recent queries (then a query ring is allocated)."""
        return False

    @property
    def needs_hidden_states(self) -> bool:
        """Whether the scorer reads the attention layer's inputs (`hidden_states`); they are held beside the queries."""
        return False

    @property
    def online(self) -> bool:
        """Whether the decode step folds its attention into a statistic for this scorer."""
        return False

    @property
    def scores_on_entry(self) -> bool:
        """Whether each token is scored once, when it enters the cache (`EntryScorer`)."""
        return False

    @abstractmethod
    def score(self, view: ScoreView) -> Tensor:
        """Give float32 scores `[B, H, R, N]`: R = W rows, or 1 for a scorer without rows.

        Every value at a valid slot is finite. Rows that were never written (`~view.row_valid`) are zero.
        Rows of B do not influence each other; the view may not be changed.
        """


class OnlineScorer(ImportanceScorer):
    """A scorer that rides along: each decode step folds its attention probabilities into one number per token."""

    @property
    def online(self) -> bool:
        return True

    @property
    def fused(self) -> FusedUpdate | None:
        """The same as `update`, in a form that one kernel can do; None: the decode step calls `update` itself."""
        return None

    @abstractmethod
    def update(self, statistic: Tensor, probabilities: Tensor) -> None:
        """Fold one step's `probabilities [..., G, N]` into `statistic [..., N]` float32, in place.

        Elementwise over slots: leading axes may be sequences and heads, or pages. Probabilities may be overwritten.
        Capture-safe: no host sync, no data-dependent shape. The statistic starts at zero after each round.
        """

    @abstractmethod
    def finish(self, statistic: Tensor, view: ScoreView) -> Tensor:
        """Turn the statistic `[B, H, N]` into scores `[B, H, 1, N]`."""

    @property
    def prompt_rows(self) -> int | None:
        """Newest queries of a prompt that `read_prompt` is given, where there are so many; None: `cache.query_rows`."""
        return None

    def read_prompt(self, view: ScoreView) -> Tensor | None:
        """Give the statistic `[B, H, N]` float32 that a prompt leaves, from `view.queries`, all at hand at once.

        Finite at valid slots. None: that of `seed`, as if each query had been one decode step.
        """
        return None

    def seed(self, statistic: Tensor, rows: Tensor) -> None:
        """Fold `rows [..., G, R, N]`, oldest first, as if each had been one decode step."""
        for row in range(rows.shape[-2]):
            self.update(statistic, rows[..., row, :].clone())

    def score(self, view: ScoreView) -> Tensor:
        if view.statistic is None:
            raise ValueError(f"online scorer '{self.name}' was given a view without a statistic")
        return self.finish(view.statistic, view)


class EntryScorer(ImportanceScorer):
    """A scorer that sees each token once, when it enters the cache; the score stays with the token."""

    @property
    def scores_on_entry(self) -> bool:
        return True

    @abstractmethod
    def enter(self, tokens: EnteringTokens) -> Tensor:
        """Give float32 scores `[R, H, N]` of entering tokens; finite.

        Called for a whole prompt and at every decode step. Capture-safe: no host sync, no data-dependent shape.
        """

    def score(self, view: ScoreView) -> Tensor:
        if view.statistic is None:
            raise ValueError(f"entry scorer '{self.name}' was given a view without the scores it gave on entry")
        return view.statistic.masked_fill(~view.valid, 0.0)[:, :, None]


class Calibrator(Component):
    """Maps scores to probabilities that mean the same in every head and for every scorer; never changes their order."""

    needs_reference: ClassVar[bool] = True
    """Whether `calibrate` reads the raw attention of the same rows."""

    @abstractmethod
    def calibrate(self, scores: Tensor, reference: Tensor | None, valid: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Give float32 probabilities `[B, H, R, N]`: zero where not `valid [B, H, N]`, each row sums to 1.

        `scores [B, H, R, N]` float32; `reference [B, H, R, N]` raw attention probabilities.
        `state` lives as long as the sequence; it starts empty, and its tensors have B as their first axis.
        """


class Budget(Component):
    """Decides how many tokens each head keeps."""

    scope: ClassVar[Literal["layer", "model"]] = "layer"
    """`model`: `counts` needs the claims of all layers at once."""
    needs_probabilities: ClassVar[bool] = True
    """False for a budget that reads only the order of scores: calibration is then skipped."""
    votes: ClassVar[bool] = False
    """Whether rows vote, each for its own set; then tokens are ranked by votes before value."""

    @abstractmethod
    def claim(self, probabilities: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Reduce `probabilities [B, H, R, N]` over rows to `(value float32, votes int32)`, both `[B, H, N]`."""

    @abstractmethod
    def counts(self, claims: Claims, limits: Limits) -> Tensor:
        """Give tokens to keep per head, `[L, H]` int64, protected ones counted in.

        Between the protected count and the resident count of each head, never 0 for a head that holds a token.
        """

    @abstractmethod
    def target_tokens(self, seen_tokens: int) -> int | None:
        """Mean tokens per head that `counts` aims at, or None when only the scores decide."""

    @property
    def shared_bytes(self) -> int | None:
        """Bytes that all sequences share by need, instead of a target for each; `limits.share_tokens` then says it."""
        return None

    @property
    def least_tokens(self) -> int:
        """With `shared_bytes`, mean tokens per head below which no sequence is pressed: others wait instead."""
        return 1

    def most_tokens(self, seen_tokens: int) -> int | None:
        """Most tokens that a single head may keep, where `cache.upper` does not say; None: four times the target."""
        return None


class Regularizer(Component):
    """Turns a ragged selection into a layout that a static decode step can serve."""

    pads_heads: ClassVar[bool] = False
    """Whether heads may be given pages for more than they keep, up to `cache.upper`."""

    @property
    def mode(self) -> Mode:
        """Which heads share one set: none, all of a layer, or all of the model; claims are pooled before the budget."""
        return "per_head"

    @abstractmethod
    def layout(self, selection: Selection, cost: CostModel, limits: Limits) -> Layout:
        """Decide per head whether to compact or to mask; never drops a slot that the selection keeps."""


class CacheTier(Component):
    """A place where tokens of one sequence live: it admits tokens and answers queries.

    The `condenser` of the configuration is the cascade's last tier: it admits what a rewrite drops. A quantized or an
    offloaded tier is written the same way.
    """

    lies_in_pages: ClassVar[bool] = False
    """Whether `allocate` is given slots in the pool's pages (`shape.store`), where the decode step's kernel attends
    them; else it asks `attend` and composes by log-sum-exp, which no CUDA graph can hold."""

    folds: ClassVar[bool] = False
    """Whether `fold` lets the tokens that stay take in something of those that are dropped."""

    @property
    def needs_queries(self) -> bool:
        """Whether `admit` reads `tokens.query` (then a query ring is allocated)."""
        return False

    def fold(self, layer: int, tokens: TokenBatch) -> Tensor:
        """New values `[H, N, D]` for `tokens.survivors`, once `tokens.mask` is dropped; others are not read."""
        raise NotImplementedError(f"'{self.name}' says that it folds, but has no `fold`")

    @abstractmethod
    def fresh(self) -> CacheTier:
        """A new empty tier with the same options, for another sequence."""

    @abstractmethod
    def allocate(self, shape: TierShape) -> None:
        """Allocate every buffer for one sequence; addresses stay constant until `reset`."""

    @abstractmethod
    def admit(self, layer: int, tokens: TokenBatch) -> None:
        """Take in the tokens of `layer` that `tokens.mask` names.

        Raises:
            CapacityError: they do not fit; nothing changes.
        """

    @abstractmethod
    def attend(self, layer: int, query: Tensor, scaling: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Attend `query [H, G, D]` over this tier alone: `(out [H, G, D] float32, lse [H, G] float32)`.

        An empty tier answers zeros and -inf.
        """

    @property
    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes of every buffer this tier holds."""

    @property
    @abstractmethod
    def holds_tokens(self) -> bool:
        """False for a tier that never answers anything (evict): the decode step then skips it."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens and release the buffers."""
