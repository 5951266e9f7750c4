"""The texts that methods are compared on: a prompt of each, and the tokens that are fed after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardkv.errors import InputError, did_you_mean


@dataclass(frozen=True)
class Schedule:
    """How many tokens are read and fed, and when compressions come."""

    prompt_tokens: int
    fed_tokens: int
    rounds: int
    """Compressions of each text: one after the prompt, the others before each further interval of fed tokens."""
    interval: int
    """What `cache.interval` is set to."""


@dataclass(frozen=True)
class Workload:
    """Texts as token ids."""

    names: tuple[str, ...]
    prompts: list[list[int]]
    fed: list[list[int]]
    schedule: Schedule


def schedule(
    prompt_tokens: int | None = None, fed_tokens: int | None = None, rounds: int = 1, interval: int = 128
) -> Schedule:
    """Fill in what is None: prompts of 2,048 tokens and 256 fed ones, or with more rounds 1,024 and one interval each.

    Raises:
        InputError: `fed_tokens` contradicts the rounds, or leaves nothing to compare.
    """
    if rounds == 1:
        fed = 256 if fed_tokens is None else fed_tokens
        if fed < 2:
            raise InputError(f"--fed-tokens {fed}: expected 2 or more; the first prediction comes from the prompt")
        return Schedule(prompt_tokens or 2048, fed, rounds, fed + 1)
    fed = rounds * interval
    if fed_tokens not in (None, fed):
        raise InputError(f"--fed-tokens {fed_tokens}: {rounds} rounds of {interval} tokens feed {fed}; leave it out")
    return Schedule(prompt_tokens or 1024, fed, rounds, interval)


def bundled_texts() -> list[Path]:
    """The texts that come with the package: prose, report, dialogue, code, tables, maths, reasoning; one is German."""
    return sorted((Path(__file__).parent / "texts").glob("*.txt"))


def chosen_texts(names: Sequence[str] | None) -> list[Path]:
    """Files, or texts that come with the package by their names without `.txt`; None is all of these.

    Raises:
        InputError: neither, or two of one name.
    """
    bundled = {path.stem: path for path in bundled_texts()}
    if names is None:
        return list(bundled.values())
    paths = [bundled.get(name, Path(name)) if not Path(name).is_file() else Path(name) for name in names]
    for name, path in zip(names, paths, strict=True):
        if not path.is_file():
            raise InputError(
                f"--texts {name}: no such file.{did_you_mean(name, bundled)} Shipped: {', '.join(bundled)}"
            )
        if [other.name for other in paths].count(path.name) > 1:
            raise InputError(f"--texts {name}: two texts are called {path.name}; results are told apart by that name")
    return paths


def read_workload(tokenizer: Any, files: Sequence[Path], times: Schedule) -> Workload:
    """Read and tokenize the files; what is beyond the tokens needed is left out.

    Raises:
        InputError: a file that is no UTF-8 text, or too short a text.
    """
    prompts, fed = [], []
    needed = times.prompt_tokens + times.fed_tokens
    for path in files:
        ids = list(tokenizer(_text(path))["input_ids"])
        if len(ids) < needed:
            raise InputError(
                f"{path}: {len(ids)} tokens; {needed} are needed, {times.prompt_tokens} of prompt and"
                f" {times.fed_tokens} fed after it. Give a longer text, or lower --prompt-tokens"
            )
        prompts.append(ids[: times.prompt_tokens])
        fed.append(ids[times.prompt_tokens : needed])
    return Workload(tuple(path.name for path in files), prompts, fed, times)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a file of UTF-8 text ({error})") from None
