"""Reads what lm-evaluation-harness hands to a model, its arguments and a task's generation settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hardkv.config import GenerationSettings, LoadedConfig
from hardkv.config.assigning import load_assigned, read_value
from hardkv.errors import InputError, did_you_mean

_SAID = "model_args"
_UNSAID_DEVICE = "cuda:0"
_ASKED_OF_TASKS = frozenset(GenerationSettings.model_fields) - {"max_new_tokens", "stop", "logprobs"} | {"seed"}
_ONE = ("num_beams", "num_return_sequences", "n")


def read_arguments(config: str | None, keys: Mapping[str, Any], shortcuts: Mapping[str, Any]) -> LoadedConfig:
    """The configuration `config`, or the defaults, with `keys` on top: `KEY.PATH` to a value, as `hardkv --set`.

    `shortcuts`: values that lm_eval or hardkv give a name of their own, by key path; None where they were not given.

    Raises:
        InputError: a key given twice, or no YAML value.
        ConfigError, PluginError: as in `load_config`.
    """
    assigned = {path: _value(path, value) for path, value in keys.items()}
    for path, value in shortcuts.items():
        if value is None:
            continue
        if path in assigned:
            raise InputError(f"{_SAID}: {path} is given twice, as {assigned[path]!r} and as {value!r}; give it once")
        assigned[path] = value
    file = None if config is None else Path(os.fspath(config)).expanduser()
    return load_assigned(file, list(assigned.items()), _SAID)


def read_sequences(batch_size: int | str | None, max_batch_size: int | None) -> int | None:
    """`cache.max_sequences` as lm_eval's `--batch_size` has it; None where that leaves it open.

    lm_eval says 1 where nobody said anything, so 1 leaves it open, as `auto` does.

    Raises:
        InputError: neither a whole number nor `auto`.
    """
    text = "1" if batch_size is None else str(batch_size)
    if text.partition(":")[0] == "auto":
        return max_batch_size
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"batch_size: expected a whole number from 1 or 'auto' (got {batch_size!r})")
    return int(text) if int(text) > 1 else None


def read_device(device: str | None) -> str | None:
    """`model.device` as lm_eval's `--device` has it; None for what lm_eval says where nobody said anything."""
    return None if device == _UNSAID_DEVICE else device


def read_generation(arguments: Mapping[str, Any], special: Mapping[str, int]) -> dict[str, Any]:
    """Arguments of `HardKVRuntime.generate` for a task's normalized generation settings.

    `special`: ids of special tokens; as stop texts they never appear in the text, and stop by their id instead.

    Raises:
        InputError: a setting that hardkv does not have.
    """
    rest = {name: value for name, value in arguments.items() if name not in _ONE or value != 1}
    sampled, temperature = rest.pop("do_sample"), rest.pop("temperature", 1.0)
    until = [text for text in rest.pop("until") if text]
    settings = {
        "max_new_tokens": rest.pop("max_gen_toks"),
        "temperature": float(temperature) if sampled else 0.0,
        "stop": [text for text in until if text not in special],
    }
    stop_ids = [*rest.pop("stop_token_ids", ()), *(special[text] for text in until if text in special)]
    if stop_ids:
        settings["stop_token_ids"] = stop_ids
    for name in rest:
        if name not in _ASKED_OF_TASKS:
            known = sorted([*_ASKED_OF_TASKS, "do_sample", "max_gen_toks", "until"])
            hint = did_you_mean(name, known)
            raise InputError(f"generation_kwargs: hardkv has no setting '{name}'.{hint} Known: {', '.join(known)}")
    return {**settings, **rest}


def _value(path: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return read_value(value)
    except yaml.YAMLError:
        raise InputError(f"{_SAID} {path}: {value!r} is not a YAML value") from None
