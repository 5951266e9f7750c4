"""What the commands of `hardkv bench` do around the measuring: settings, processes, progress, files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hardkv.cli.command_lines import written
from hardkv.cli.configuring import Assignment, parse_assignments, read_configuration
from hardkv.cli.session import Session, check_targets, messages, print_json
from hardkv.errors import InputError

if TYPE_CHECKING:
    from hardkv.config import HardKVConfig
    from hardkv.evaluation.speed import Crew, Plan, Way
    from hardkv.evaluation.speed.prompts import Saved

_PEERS = Path(".venv-peers/bin/python")


@dataclass(frozen=True)
class Request:
    """What the options say, checked; nothing has been loaded."""

    config: HardKVConfig
    plan: Plan
    ways: list[Way]
    command: str
    save: Path | None
    plot: Path | None


def read_request(context: typer.Context, kind: str, given: dict[str, Any]) -> Request:
    """Check everything that can be checked before the model is loaded; `given` holds the command's options."""
    from hardkv.evaluation.speed import Environments, all_ways, choose_ways, plan_from

    sizes = {name: None if given[name] is None else tuple(given[name]) for name in ("batches", "contexts")}
    counts = {name: given.get(name) for name in ("interval", "rounds", "steps")}
    plan = plan_from(given["preset"], **sizes, **counts, mean_tokens=given["mean_budget"], timeout_s=given["timeout"])
    _check_files(given["save"], given["plot"])
    config = _configured(given, plan)
    environments = Environments(
        _python("--kvpress-python", given["kvpress_python"], _PEERS), _python("--vllm-python", given["vllm_python"])
    )
    file = given["config"]
    folder = None if file is None else file.absolute().parent
    ways = all_ways(config, folder, plan.mean_tokens, given["presses"] or ["SnapKVPress"], environments)
    if given["ways"]:
        ways = choose_ways(ways, given["ways"])
    command = written(context)
    return Request(config, plan, ways, command, given["save"], given["plot"])


@contextmanager
def running(context: typer.Context, request: Request, longest_tokens: int) -> Iterator[tuple[Saved, Crew]]:
    """Save the model once, and end every process afterwards."""
    from hardkv.evaluation.speed import Crew, check_room, saved_model
    from hardkv.evaluation.speed.ways import fitted

    with messages().status(f"Loading {request.config.model.id}") as status, saved_model(request.config.model) as saved:
        check_room(saved, longest_tokens)
        session = context.find_object(Session)
        assert session is not None
        session.generating = True
        ways = fitted(request.ways, saved.token_bytes, request.plan)
        with Crew(ways, saved.folder, request.config, request.plan.timeout_s, _saying(status)) as crew:
            yield saved, crew


def over_cases(request: Request, measure: Callable[[int, int], list[Any]]) -> tuple[list[Any], bool]:
    """Measure every case; gives the rows, and whether nobody broke it off."""
    rows: list[Any] = []
    cases = request.plan.cases
    try:
        for number, (batch, tokens) in enumerate(cases, 1):
            messages().print(f"case {number} of {len(cases)}: {batch} x {tokens:,} tokens", highlight=False)
            rows += measure(batch, tokens)
    except KeyboardInterrupt:
        if not rows:
            raise
        return rows, False
    return rows, True


def finish(found: dict[str, Any], table: Any, as_json: bool, request: Request) -> None:
    """Show the result, and write the files asked for."""
    from hardkv.cli.session import output

    if as_json:
        print_json(found)
    else:
        output().print(table)
    if request.save is not None:
        _write(request.save, json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    if request.plot is not None:
        from hardkv.evaluation.speed.picture import draw

        try:
            draw(found, request.plot)
        except OSError as error:
            raise InputError(f"--plot {request.plot}: cannot be written: {error.strerror}") from None
    if not found["complete"]:
        raise KeyboardInterrupt


def _saying(status: Any) -> Callable[[str], None]:
    """A pipe shows failures only; a terminal shows what is going on."""

    def say(text: str) -> None:
        status.update(text)
        if "not run: " in text:
            messages().print(text, markup=False, soft_wrap=True)

    return say


def _configured(given: dict[str, Any], plan: Plan) -> HardKVConfig:
    """The configuration with the sizes of the plan."""
    named = (("model.id", given["model"]), ("model.dtype", given["dtype"]), ("model.device", given["device"]))
    changes: list[Assignment] = [*parse_assignments(given["assignments"])]
    changes += [(path, value) for path, value in named if value is not None]
    changes += [("budget.mean_tokens", plan.mean_tokens), ("cache.interval", plan.interval)]
    config = read_configuration(given["config"], changes).config
    lanes = max(config.cache.max_sequences, *plan.batches)
    return config.model_copy(update={"cache": config.cache.model_copy(update={"max_sequences": lanes})})


def _python(option: str, given: Path | None, default: Path | None = None) -> Path | None:
    if given is None:
        return default.absolute() if default is not None and default.is_file() else None
    if not (given.is_file() and os.access(given, os.X_OK)):
        raise InputError(f"{option} {given}: expected a Python interpreter, such as .venv-peers/bin/python")
    # Not resolved: the link's own place is what says which environment it belongs to.
    return given.absolute()


def _check_files(save: Path | None, plot: Path | None) -> None:
    check_targets({"--output": save, "--plot": plot})
    if plot is not None:
        from hardkv.evaluation.plotting import check_plot

        check_plot(plot)


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    staged = path.with_name(path.name + ".part")
    try:
        staged.write_text(text, encoding="utf-8")
        staged.replace(path)
    except OSError as error:
        raise InputError(f"--output {path}: cannot be written: {error.strerror}") from None
