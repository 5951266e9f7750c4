"""What commands that generate for one prompt share: the runtime, and a bar while the prompt is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardkv.cli.configuring import Assignment, read_configuration
from hardkv.cli.session import messages

if TYPE_CHECKING:
    from hardkv.runtime import HardKVRuntime
    from hardkv.scheduler import Progress


def build_runtime(config: Path | None, changes: list[Assignment]) -> HardKVRuntime:
    """Load the model that the configuration names and build its runtime."""
    ready = read_configuration(config, changes)

    from hardkv.model_adapter import load_model
    from hardkv.runtime import HardKVRuntime

    model = ready.config.model
    with messages().status(f"Loading {model.id}"):
        loaded = load_model(model.id, model.dtype, model.device, model.revision, model.pack_weights)
        return HardKVRuntime(ready.config, ready.components, loaded)


@contextmanager
def prefill_bar() -> Iterator[tuple[Progress, Any]]:
    """Give a progress callback that draws a bar on stderr, and what makes it vanish."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("Reading the prompt"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = messages()
    bar = Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task("prefill", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield progress, bar.stop
