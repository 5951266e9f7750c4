"""What every built-in regularizer shares: the mode option."""

from __future__ import annotations

from pydantic import Field

from hardkv.interfaces import Mode, Options, Regularizer


class ModalOptions(Options):
    """Options of the built-in regularizers."""

    mode: Mode = Field(
        default="per_head",
        description="Who shares one set of tokens: per_head (nobody), per_layer, or union (all layers and heads), "
        "for engines whose pages span all heads.",
    )


class ModalRegularizer(Regularizer):
    """A regularizer whose mode is an option."""

    class Config(ModalOptions):
        """Options."""

    config: Config

    @property
    def mode(self) -> Mode:
        return self.config.mode
