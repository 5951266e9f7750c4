"""HardKVConfig: every setting, its bounds, and the reason for its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from hardkv.config.presets import PresetName, with_preset
from hardkv.units import parse_bytes


class Section(BaseModel):
    """Base of every section: frozen, unknown keys are errors, no value is converted to another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSettings(Section):
    """Which language model runs, where, and in which precision."""

    id: str = Field(
        default="smollm2",
        min_length=1,
        description="Hub id, folder, GGUF file, or smollm2: the small model that a package brings, so that a first run"
        " needs no download by hand.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16",
        description="Precision of weights and cache; bfloat16 is what current models are trained in.",
    )
    device: str = Field(
        default="cpu", min_length=1, description="Torch device, such as cpu or cuda:0; cpu is always there."
    )
    pack_weights: bool = Field(
        default=True,
        description="On a CPU in bfloat16, keep a second copy of the linear weights in oneDNN's layout, if it fits in a"
        " quarter of the free memory, so that no step reorders them again, and run blocks in shorter equal forms where"
        " they have one. No effect elsewhere.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        description="Branch, tag or commit of a hub model; null takes the newest that is cached.",
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        try:
            torch.device(device)
        except RuntimeError:
            raise ValueError(f"Input should be a torch device such as cpu, cuda or cuda:0 (got {device!r})") from None
        return device


class CacheSettings(Section):
    """How many tokens the cache holds, and in what units it moves them."""

    sinks: int = Field(
        default=4,
        ge=0,
        le=1024,
        description="First tokens of a sequence that are always kept; attention parks its excess mass there, and four"
        " is what the attention-sink paper found enough.",
    )
    local_window: int = Field(
        default=32,
        ge=1,
        le=65_536,
        description="Newest tokens that are always kept; they have been seen by too few queries to be judged.",
    )
    query_rows: int = Field(
        default=128,
        ge=1,
        le=4096,
        description="Recent queries that a window scorer looks back on; 64 and 32 rows measured worse.",
    )
    interval: int = Field(
        default=128,
        ge=1,
        le=65_536,
        description="Decode steps between two compressions of a sequence; as many as query_rows, so that every query"
        " has its say once.",
    )
    lower: int | None = Field(
        default=None,
        ge=1,
        description="Slots per head below which nothing is dropped; null is the target of the budget.",
    )
    upper: int | None = Field(
        default=None,
        ge=1,
        description="Slots per head that no head exceeds; null gives greedy heads four times the budget's target.",
    )
    page_slots: int = Field(
        default=32,
        ge=8,
        le=256,
        description="Slots per page, the unit of allocation, a power of two: smaller wastes less in the last page of a"
        " head, larger reads in longer runs.",
    )
    condensed_slots: int = Field(
        default=0,
        ge=0,
        le=65_536,
        description="Slots per head into which the merge condenser folds dropped tokens; 0, because merging has not yet"
        " measured better than evicting.",
    )
    pool_bytes: Annotated[
        int | None, Field(gt=0), BeforeValidator(parse_bytes, json_schema_input_type=int | str | None)
    ] = Field(
        default=None,
        description="Memory of the page pool, in bytes or as 2GiB; null sizes it for max_sequences from the memory that"
        " is free.",
    )
    prefill_chunk_tokens: int = Field(
        default=2048,
        ge=1,
        le=1_048_576,
        description="Prompt tokens that go through the model at once; bounds the peak of prefill without slowing it.",
    )
    max_sequences: int = Field(
        default=32, ge=1, le=4096, description="Sequences that decode at the same time; further ones wait for a place."
    )

    @field_validator("page_slots")
    @classmethod
    def _power_of_two(cls, slots: int) -> int:
        if slots & (slots - 1):
            raise ValueError(f"Input should be a power of two from 8 to 256 (got {slots})")
        return slots

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> CacheSettings:
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"cache.lower ({self.lower}) must not be above cache.upper ({self.upper})")
        if self.lower is not None and self.local_window >= self.lower:
            raise ValueError(
                f"cache.local_window ({self.local_window}) must be below cache.lower ({self.lower}): the window alone"
                " would fill what is always kept whole"
            )
        if self.upper is not None and self.sinks + self.local_window >= self.upper:
            raise ValueError(
                f"cache.sinks + cache.local_window ({self.sinks} + {self.local_window}) must be below cache.upper"
                f" ({self.upper}): protected tokens alone would fill it"
            )
        if self.prefill_chunk_tokens < self.query_rows:
            raise ValueError(
                f"cache.prefill_chunk_tokens ({self.prefill_chunk_tokens}) must not be below cache.query_rows"
                f" ({self.query_rows}): the last chunk seeds the query rows"
            )
        return self


class ComponentSpec(BaseModel):
    """A component by name; every further key is one of its options."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str = Field(min_length=1, description="Which component; `hardkv plugins` lists the names.")

    @property
    def options(self) -> dict[str, Any]:
        """The options as they were written, without the name."""
        return dict(self.model_extra or {})


def _default(name: str, **options: Any) -> ComponentSpec:
    return ComponentSpec.model_validate({"name": name, **options})


class GenerationSettings(Section):
    """How the next token is chosen and when to stop; arguments of `generate` override these."""

    max_new_tokens: int = Field(default=256, ge=1, le=10_000_000, description="Most tokens to generate for one prompt.")
    temperature: float = Field(
        default=0.0,
        ge=0.0,
        le=100.0,
        description="Sampling temperature; 0 takes the likeliest token, so that runs repeat.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Sample from the likeliest tokens that hold this share of the mass; 1 is off.",
    )
    top_k: int = Field(default=0, ge=0, le=10_000_000, description="Sample from this many likeliest tokens; 0 is off.")
    min_p: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Drop tokens below this share of the likeliest one's probability; 0 is off.",
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0.0,
        le=100.0,
        description="Divides the logits of tokens already seen; above 1 discourages, 1 is off.",
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), strict=False, description="Texts that end the generation; they are cut from the result."
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), strict=False, description="Token ids that end the generation, besides those of the model."
    )
    ignore_eos: bool = Field(
        default=False, description="Go on past the model's end token, for benchmarks of equal length."
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Report log-probabilities: 0 for the chosen token, n for the n likeliest as well; null is off.",
    )


class HardKVConfig(Section):
    """Everything a run needs: model, cache, the five components of a compression pass, generation."""

    preset: PresetName = Field(
        default="balanced",
        description="Settings to start from, which every other key overrides. balanced is the defaults below; quality"
        " keeps twice as many tokens; fast keeps half of them and compresses half as often.",
    )
    model: ModelSettings = Field(
        default=ModelSettings(), description="Which language model runs, where, in which precision."
    )
    plugins: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        strict=False,
        description="Local plugin files (my_plugin or folder/my_plugin.py, looked for next to this file and in the"
        " current folder) or names of installed modules. Those installed with a hardkv entry point load by themselves.",
    )
    cache: CacheSettings = Field(
        default=CacheSettings(), description="Tokens the cache holds, and in what units it moves them."
    )
    scorer: ComponentSpec = Field(
        default=_default("attention_power"),
        description="Scores every token, higher = keep; attention_power sees every query and needs no query ring.",
    )
    calibrator: ComponentSpec = Field(
        default=_default("exact"),
        description="Turns scores into comparable probabilities; exact needs no solver and passes probabilities as they"
        " are.",
    )
    budget: ComponentSpec = Field(
        default=_default("threshold", mean_tokens=1024, floor_share=0.2),
        description="Decides how many tokens each head keeps; one threshold for the whole model measured best.",
    )
    regularizer: ComponentSpec = Field(
        default=_default("auto", mode="per_head"),
        description="Decides when to compact a head and when to mask in place; auto weighs the costs of both.",
    )
    condenser: ComponentSpec = Field(
        default=_default("evict"),
        description="Takes what is dropped; evict forgets it, which has measured best so far.",
    )
    generation: GenerationSettings = Field(
        default=GenerationSettings(), description="How the next token is chosen and when to stop."
    )
    compression: bool = Field(
        default=True, description="False runs the same runtime with every token kept, for comparison."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of sampling; runs with the same seed repeat.")

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, values: Any) -> Any:
        return with_preset(values) if isinstance(values, Mapping) else values
