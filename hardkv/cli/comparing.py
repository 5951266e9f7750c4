"""What `hardkv compare` and `hardkv eval fidelity` do alike: check, load, measure with progress, write files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from hardkv.cli.session import messages, readable_bytes
from hardkv.cli.tabulating import progress_line
from hardkv.errors import InputError

if TYPE_CHECKING:
    from hardkv.config import HardKVConfig
    from hardkv.config.settings import CacheSettings, ModelSettings
    from hardkv.evaluation import Bench, Method, Reference, Row
    from hardkv.model_adapter import LoadedModel


def in_float32(config: HardKVConfig) -> HardKVConfig:
    """The configuration in float32 where it names no precision."""
    chosen = config.model
    if "dtype" not in chosen.model_fields_set:
        chosen = chosen.model_copy(update={"dtype": "float32"})
    return config.model_copy(update={"model": chosen})


def check_budget(option: str, mean_budget: int, prompt_tokens: int, cache: CacheSettings) -> None:
    """Refuse a budget that leaves nothing to choose; `option` is what gave it."""
    if mean_budget >= prompt_tokens:
        raise InputError(
            f"{option} {mean_budget}: expected fewer than the {prompt_tokens} tokens of a prompt, or nothing is dropped"
        )
    protected = cache.sinks + cache.local_window
    if mean_budget <= protected:
        raise InputError(
            f"{option} {mean_budget}: expected more than cache.sinks + cache.local_window ({cache.sinks} +"
            f" {cache.local_window}), which are always kept"
        )


def load(model: ModelSettings) -> LoadedModel:
    """Load the model and its tokenizer."""
    from hardkv.model_adapter import load_model

    with messages().status(f"Loading {model.id}"):
        return load_model(model.id, model.dtype, model.device, model.revision, model.pack_weights)


def measure_all(bench: Bench, methods: Sequence[Method]) -> tuple[Reference, list[Row], bool]:
    """Run every method; gives what was measured, and whether nobody broke it off."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from hardkv.evaluation import measure, measure_reference

    console = messages()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows: list[Row] = []
    # A pipe shows no bar, but the lines above it.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("every token kept", total=len(methods) + 1)
        reference = measure_reference(bench)
        console.print(f"every token kept: {readable_bytes(reference.kv_bytes)}, {reference.seconds:.1f} s")
        try:
            for method in methods:
                bar.update(task, advance=1, description=method.name)
                row = measure(bench, reference, method)
                rows.append(row)
                console.print(Text(f"{len(rows)}/{len(methods)} {progress_line(row)}"), soft_wrap=True)
        except KeyboardInterrupt:
            return reference, rows, False
    return reference, rows, True


def write_files(found: dict[str, Any], save: Path | None, plot: Path | None) -> None:
    """Save the result as JSON and as a picture, where that was asked for."""
    if save is not None:
        try:
            save.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"--output {save}: cannot be written: {error.strerror}") from None
    if plot is not None:
        from hardkv.evaluation.plotting import draw

        try:
            draw(found, plot)
        except OSError as error:
            raise InputError(f"--plot {plot}: cannot be written: {error.strerror}") from None
