"""Prompts for measuring speed, and the model where every process can read it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hardkv.config import ModelSettings
from hardkv.errors import InputError
from hardkv.evaluation.workload import bundled_texts
from hardkv.model_adapter import load_model, read_geometry


@dataclass(frozen=True)
class Saved:
    """A model in a folder that transformers can load, and what must be known of it."""

    folder: Path
    tokenizer: Any
    token_bytes: int
    """K and V of one token in all layers."""
    weight_bytes: int
    max_positions: int


@contextmanager
def saved_model(settings: ModelSettings) -> Iterator[Saved]:
    """Load the model, and keep it in a folder while the block runs: its own, where it is one."""
    loaded = load_model(settings.id, settings.dtype, settings.device, settings.revision)
    geometry = read_geometry(loaded.model)
    token_bytes = len(geometry.windows) * geometry.heads * 2 * geometry.head_dim * geometry.dtype.itemsize
    weight_bytes = sum(parameter.nbytes for parameter in loaded.model.parameters())
    facts = (loaded.tokenizer, token_bytes, weight_bytes, geometry.max_positions)
    own = Path(settings.id).expanduser()
    if own.is_dir():
        del loaded, geometry
        gc.collect()
        yield Saved(own, *facts)
        return
    with TemporaryDirectory(prefix="hardkv-bench-") as folder:
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        del loaded, geometry
        gc.collect()
        yield Saved(Path(folder), *facts)


def read_prompts(saved: Saved, batch: int, context_tokens: int) -> list[list[int]]:
    """Different prompts: windows over the texts that come with the package, end to end, each starting elsewhere."""
    ids: list[int] = []
    for path in bundled_texts():
        ids += saved.tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
    ring = ids * (2 + context_tokens // len(ids))
    return [ring[start : start + context_tokens] for start in (index * len(ids) // batch for index in range(batch))]


def check_room(saved: Saved, longest_tokens: int) -> None:
    """Refuse what the model has no positions for.

    Raises:
        InputError: a prompt and what is decoded after it are longer than the model allows.
    """
    if longest_tokens > saved.max_positions:
        raise InputError(
            f"a prompt and the steps after it take {longest_tokens} tokens; the model has {saved.max_positions}"
            " positions. Lower --context, --rounds or --interval"
        )
