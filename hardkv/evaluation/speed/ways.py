"""The ways to decode that are measured side by side, each in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hardkv.config import HardKVConfig
from hardkv.errors import InputError, did_you_mean
from hardkv.evaluation.speed.plan import Plan

WORKERS = Path(__file__).parent / "workers"
KVPRESS = "kvpress:"
"""Before the name of a press, the name of its way."""
VLLM = "vllm"
_PEERS_TARGET = "'make peers' makes one in .venv-peers"


@dataclass(frozen=True)
class Way:
    """One way to decode the same prompts with the same weights."""

    name: str
    script: Path
    python: str = sys.executable
    settings: dict[str, Any] = field(default_factory=dict)
    compresses: bool = False
    whole_intervals: bool = False
    """Whether a step's time depends on where in an interval it is."""
    obstacle: str | None = None
    """Why it cannot run."""

    @property
    def command(self) -> list[str]:
        """What starts its worker."""
        return [self.python, str(self.script)]


@dataclass(frozen=True)
class Environments:
    """Interpreters that have what the peers need; None where there is none."""

    kvpress: Path | None = None
    vllm: Path | None = None


def all_ways(
    config: HardKVConfig, plugins_folder: Path | None, mean_tokens: int, presses: Sequence[str], others: Environments
) -> list[Way]:
    """List every way: hardkv, the same uncompressed, transformers' two caches, presses of kvpress, vLLM."""

    def ours(name: str, compression: bool) -> Way:
        chosen = config.model_copy(update={"compression": compression})
        settings = {
            "config": chosen.model_dump(mode="json"),
            "plugins_folder": None if plugins_folder is None else str(plugins_folder),
        }
        script = WORKERS / "with_hardkv.py"
        return Way(name, script, settings=settings, compresses=compression, whole_intervals=True)

    def cached(name: str, cache: str) -> Way:
        return Way(name, WORKERS / "with_transformers.py", settings={"cache": cache})

    ways = [ours("hardkv", True), ours("uncompressed", False)]
    ways += [cached("transformers", "dynamic"), cached("transformers_static", "static")]
    ways += [_pressed(press, config, mean_tokens, others.kvpress) for press in presses]
    missing = None if others.vllm is not None else "no interpreter with vllm was given: --vllm-python PATH"
    python = sys.executable if others.vllm is None else str(others.vllm)
    return [*ways, Way(VLLM, WORKERS / "with_vllm.py", python, obstacle=missing)]


def choose_ways(ways: Sequence[Way], names: Sequence[str]) -> list[Way]:
    """Keep the ways named, in their order.

    Raises:
        InputError: a name that is none of them.
    """
    known = [way.name for way in ways]
    for name in names:
        if name not in known:
            raise InputError(f"no way is called '{name}'.{did_you_mean(name, known)} Known: {', '.join(known)}")
    return [way for way in ways if way.name in names]


def _pressed(press: str, config: HardKVConfig, mean_tokens: int, python: Path | None) -> Way:
    settings = {
        "press": press,
        "options": {},
        "mean_tokens": mean_tokens,
        "interval": config.cache.interval,
        "query_rows": config.cache.query_rows,
    }
    missing = None
    if python is None:
        missing = f"no interpreter with kvpress was given: --kvpress-python PATH; {_PEERS_TARGET}"
    return Way(
        f"{KVPRESS}{press}",
        WORKERS / "with_kvpress.py",
        sys.executable if python is None else str(python),
        settings,
        compresses=True,
        whole_intervals=True,
        obstacle=missing,
    )


def fitted(ways: Sequence[Way], token_bytes: int, plan: Plan) -> list[Way]:
    """The ways, with what vLLM must know before it starts: how much it will have to hold."""
    longest = max(plan.contexts) + plan.new_tokens(False)
    room = {
        "tokens": max(batch * (tokens + plan.new_tokens(False)) for batch, tokens in plan.cases),
        "token_bytes": token_bytes,
        "longest": longest,
        "sequences": max(plan.batches),
    }
    return [replace(way, settings=room) if way.name == VLLM else way for way in ways]


def with_budget(way: Way, mean_tokens: int) -> Way:
    """A way that compresses, at another mean budget."""
    settings = dict(way.settings)
    if "config" in settings:
        config = settings["config"]
        settings["config"] = {**config, "budget": {**config["budget"], "mean_tokens": mean_tokens}}
    else:
        settings["mean_tokens"] = mean_tokens
    return replace(way, settings=settings)
