"""Which presses of kvpress serve as scorers, what each reads, and why the others don't."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from hardkv.errors import ConfigError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Reads:
    """What a press reads besides keys and values."""

    attention: bool = False  # of the newest rows, from the query window
    queries: bool = False  # the query window at all
    rotates: bool = False  # rotary frequencies
    every_head: bool = False  # the number of each head
    trained: bool = False  # what was trained for the model, loaded by `post_init_from_model`

    def least_slots(self, press: Any) -> int:
        """Slots that a press takes out before it scores; a head that holds no more has none to choose from."""
        return int(vars(press).get("n_sink", 0))


_EXPECTING = Reads(queries=True, rotates=True)
PRESSES: dict[str, Reads] = {
    "KnormPress": Reads(),
    "KeyDiffPress": Reads(),
    "LagKVPress": Reads(),
    "CURPress": Reads(),
    "StreamingLLMPress": Reads(),
    "RandomPress": Reads(every_head=True),
    "SnapKVPress": Reads(attention=True, queries=True),
    "ExpectedAttentionPress": _EXPECTING,
    "CapPress": _EXPECTING,
    "ExpectedAttentionStatsPress": dataclasses.replace(_EXPECTING, every_head=True, trained=True),
    "QFilterPress": Reads(every_head=True, trained=True),
}

_INNER = "name the press inside it"
_PREFILL = "it needs the hidden states of every resident token, and hardkv holds those of the last cache.query_rows"
_NO_SCORES = "it gives tokens no scores"
REFUSED: dict[str, str] = {
    # Scoring presses
    "TOVAPress": "it averages over heads that hold the same tokens; hardkv's differ. Write scorer: {name: tova}",
    "ObservedAttentionPress": "it needs the attention of every row so far. Write scorer: {name: h2o}",
    "PyramidKVPress": "its scores are SnapKVPress's, and the shares of layers are a budget's: budget: {name: pyramid}",
    "LeverageScorePress": f"{_PREFILL}. Write CURPress",
    "NonCausalAttnPress": f"{_PREFILL}. Write SnapKVPress",
    "CompactorPress": f"{_PREFILL}. Write CURPress or SnapKVPress",
    "KVzapPress": "it scores a token from its own hidden state, once, as it enters. Write scorer: {name: kvzap}",
    "CriticalKVPress": f"it selects half of a compression_ratio by itself; {_INNER}",
    "ScorerPress": "it is the base of the scoring presses and scores nothing",
    # Presses that divide or time a budget
    "AdaKVPress": f"it divides a budget over heads: budget: {{name: ada}}, and {_INNER}",
    "CriticalAdaKVPress": f"it divides a budget over heads: budget: {{name: ada}}, and {_INNER}",
    "PerLayerCompressionPress": f"it divides a budget over layers: budget: {{name: threshold}}, and {_INNER}",
    "DecodingPress": f"hardkv compresses every cache.interval steps by itself; {_INNER}",
    "CompressionRatioDecodingPress": f"hardkv compresses every cache.interval steps by itself; {_INNER}",
    "PrefillDecodingPress": f"hardkv compresses the prompt and while decoding by itself; {_INNER}",
    "BlockPress": f"hardkv scores anew in each round by itself; {_INNER}",
    "ChunkPress": f"it scores pieces of a prompt apart; {_INNER}",
    "ComposedPress": "it runs several presses one after another; name one of them",
    "KeyRerotationPress": f"it gives tokens new positions, and hardkv keeps theirs; {_INNER}",
    # Presses that select, merge, train or mask for themselves
    "BasePress": "it is the base of all presses and compresses nothing",
    "CAMPress": f"it merges what it drops: condenser: {{name: merge}}, and {_INNER}",
    "MergingPress": f"it merges what it drops: condenser: {{name: merge}}, and {_INNER}",
    "ChunkKVPress": f"it selects whole chunks by itself; {_INNER}",
    "EntropyGatedChunkKVPress": f"it selects whole chunks by itself; {_INNER}",
    "DMSPress": f"it drops by a fixed threshold: budget: {{name: threshold}}, and {_INNER}",
    "DuoAttentionPress": "it makes whole heads stream, from trained shares: budget: {name: static_heads}",
    "ThinKPress": f"it drops dims of keys; {_NO_SCORES}",
    "SimLayerKVPress": f"it makes whole layers stream; {_NO_SCORES}",
    "FinchPress": f"it needs the question marked in the prompt; {_NO_SCORES}",
    "KVzipPress": f"it runs the model over the prompt again; {_NO_SCORES}",
    "KVgradPress": f"it runs the model backwards over the prompt; {_NO_SCORES}",
    "RestoreKVPress": f"it runs the model over the prompt again; {_NO_SCORES}",
    "FastKVzipPress": "it selects by trained gates as tokens enter; the nearest is scorer: {name: kvzap}",
    "KVComposePress": f"it builds composite tokens out of several; {_NO_SCORES}",
    "LUKVPress": f"it divides a budget by itself; {_NO_SCORES}",
}


def build_press(name: str, options: Mapping[str, Any]) -> tuple[Reads, Any]:
    """Give what the press `name` reads and an instance of it.

    Raises:
        ConfigError: kvpress is not installed, the press cannot serve as a scorer, or an option is wrong.
    """
    if name in REFUSED:
        raise ConfigError(f"scorer 'kvpress': {name} cannot serve as a scorer: {REFUSED[name]} [scorer.press]")
    if name not in PRESSES:
        raise ConfigError(
            f"scorer 'kvpress': unknown press '{name}'.{did_you_mean(name, PRESSES)} Known: {', '.join(PRESSES)}"
            " [scorer.press]"
        )
    try:
        library = importlib.import_module("kvpress")
    except ImportError as error:
        raise ConfigError(
            f"scorer 'kvpress' needs the library kvpress, which could not be imported ({error}). Install it with"
            " `pip install 'hardkv[kvpress]'` and `pip install --no-deps kvpress==0.5.5` [scorer.name]"
        ) from error
    kind = vars(library)[name]
    press = kind(**{key: _checked(kind, key, value) for key, value in options.items()})
    fault = _fault(name, press)
    if fault is not None:
        raise ConfigError(f"scorer 'kvpress': {name} {fault} [scorer.options]")
    return PRESSES[name], press


def _checked(kind: type[Any], key: str, value: Any) -> Any:
    """The value of one option of a press, as its dataclass declares it."""
    known = [field.name for field in dataclasses.fields(kind) if field.init and field.name != "compression_ratio"]
    path = f"[scorer.options.{key}]"
    if key == "compression_ratio":
        raise ConfigError(
            f"scorer 'kvpress': compression_ratio: the budget decides how many tokens stay; remove it, and write"
            f" for instance budget: {{name: top_k, mean_share: 0.2}} {path}"
        )
    if key not in known:
        hint = did_you_mean(key, known)
        raise ConfigError(
            f"scorer 'kvpress': {kind.__name__} has no option '{key}'.{hint} Known: {', '.join(known) or 'none'} {path}"
        )
    try:
        return TypeAdapter(get_type_hints(kind)[key]).validate_python(value, strict=True)
    except ValidationError as error:
        raise ConfigError(
            f"scorer 'kvpress': {kind.__name__}: {key}: {error.errors()[0]['msg']} (got {value!r}) {path}"
        ) from None


def _fault(name: str, press: Any) -> str | None:
    """What is wrong with a press's options that their types don't say, or None."""
    if name == "RandomPress" and press.seed is None:
        return "draws other numbers each time; write options: {seed: 0}"
    if name == "CURPress" and press.use_random_leverage:
        return "draws from torch's global generator with use_random_leverage; leave it out"
    if name == "SnapKVPress" and press.window_size < 1:
        return f"needs a window_size of at least 1 (got {press.window_size})"
    if name == "SnapKVPress" and press.kernel_size % 2 == 0:
        return f"needs an odd kernel_size (got {press.kernel_size}; use {press.kernel_size + 1})"
    return None
