"""`hardkv new-plugin`: a working plugin to start from, with its test, its configuration and its packaging."""

from __future__ import annotations

import importlib.util
import keyword
import re
from dataclasses import dataclass
from enum import Enum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from hardkv.cli.session import Debug
from hardkv.errors import InputError

_TEST = '''\
"""What every {kind} must hold to."""

from hardkv.testing import {contract}
from my_method import MyMethod


class TestMyMethod({contract}):
    component = MyMethod(MyMethod.Config())
'''
_HELD = '''
    @classmethod
    def held(cls, tier, layer, admitted):
        """Say what is left of all tokens admitted: leave this out for a tier that loses none."""
        keys, values, bias = admitted
        age = (bias > float("-inf")).flip(1).cumsum(1).flip(1)  # 1 for the newest of a head
        return keys, values, bias.masked_fill(age > tier.slots, float("-inf"))
'''
_CONFIG = """\
# Every other setting keeps its default: `hardkv config init` shows them all.
plugins: [my_method]
model: {id: smollm2}
"""
_PACKAGE = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "hardkv-{distribution}"
version = "0.1.0"
description = "The {slot} my_method for hardkv."
requires-python = ">=3.10"
dependencies = ["hardkv"]

# Where this package is installed, hardkv knows my_method without being told.
[project.entry-points.hardkv]
my_method = "my_method"

[tool.setuptools]
py-modules = ["my_method"]
"""
_BUDGET = "budget: {name: threshold, mean_tokens: 256}\n"


@dataclass(frozen=True)
class _Form:
    """What differs from kind to kind."""

    slot: str
    contract: str
    config: str
    """The components of the configuration."""


class Kind(str, Enum):
    """What a plugin can be; its template has the same name."""

    scorer = "scorer"
    online_scorer = "online-scorer"
    entry_scorer = "entry-scorer"
    calibrator = "calibrator"
    budget = "budget"
    regularizer = "regularizer"
    tier = "tier"

    @property
    def form(self) -> _Form:
        """Slot, contract and configuration."""
        if self in (Kind.scorer, Kind.online_scorer, Kind.entry_scorer):
            return _Form("scorer", "ScorerContract", "scorer: {name: my_method}\n" + _BUDGET)
        if self is Kind.calibrator:
            config = "scorer: {name: snapkv}  # no probabilities as they are, so they are calibrated\n"
            return _Form("calibrator", "CalibratorContract", f"{config}calibrator: {{name: my_method}}\n{_BUDGET}")
        if self is Kind.budget:
            return _Form("budget", "BudgetContract", "budget: {name: my_method, mean_tokens: 256}\n")
        if self is Kind.regularizer:
            return _Form("regularizer", "RegularizerContract", _BUDGET + "regularizer: {name: my_method}\n")
        config = "condenser: {name: my_method}\ncache: {condensed_slots: 32}\n"
        return _Form("condenser", "TierContract", _BUDGET + config)


def new_plugin(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help=f"One of {', '.join(kind.value for kind in Kind)}.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name in configurations, such as my_method.")],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder", metavar="DIR", show_default=False, help="Where to write. Default: a new folder of that name."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a plugin that works, to change into your own: the code, its test, a configuration, a package."""
    _check_name(kind, name)
    folder = Path(name) if folder is None else folder
    written = _write(folder, _contents(kind, name))
    for path in written:
        typer.echo(f"wrote {path}")
    config = folder / f"{name}.yaml"
    typer.echo(
        f"\nNext:\n"
        f"  python -m pytest {folder / f'test_{name}.py'}\n"
        f'  hardkv generate --config {config} "Why is the sky blue?"\n'
        f"  hardkv compare --config {config}\n"
        f"  pip install -e {folder}"
    )


def _check_name(kind: Kind, name: str) -> None:
    """Refuse a name that cannot be a component's, a module's and a class's at once."""
    from hardkv.registry import load_registry

    words = keyword.iskeyword(name) or keyword.iskeyword(_title(name))
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or words or name.startswith("test_"):
        raise InputError(
            f"NAME {name!r}: expected lower_case letters, digits and _, starting with a letter, neither a word of"
            " Python nor test_...; write for example my_method"
        )
    slot = kind.form.slot
    for entry in load_registry().all():
        if (entry.slot, entry.name) == (slot, name):
            raise InputError(f"NAME {name!r}: there is a {slot} of that name, from {entry.plugin}; choose another")
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        raise InputError(f"NAME {name!r}: there is a module of that name, {spec.origin}; choose another")


def _contents(kind: Kind, name: str) -> dict[str, str]:
    """Give the text of every file by its name."""
    form = kind.form
    template = files("hardkv.cli.plugin_templates") / f"{kind.name}.py"
    test = _TEST.format(kind=kind.value.replace("-", " "), contract=form.contract)
    texts = {
        f"{name}.py": template.read_text(encoding="utf-8"),
        f"test_{name}.py": test + (_HELD if kind is Kind.tier else ""),
        f"{name}.yaml": _CONFIG + form.config,
        "pyproject.toml": _PACKAGE.format(distribution=name.replace("_", "-").strip("-"), slot=form.slot),
    }
    return {file: text.replace("my_method", name).replace("MyMethod", _title(name)) for file, text in texts.items()}


def _title(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _write(folder: Path, texts: dict[str, str]) -> list[Path]:
    """Write every file, or none.

    Raises:
        InputError: a file is there already, or cannot be written.
    """
    paths = {folder / file: text for file, text in texts.items()}
    there = [str(path) for path in paths if path.exists()]
    if there:
        raise InputError(
            f"{', '.join(there)}: {'is' if len(there) == 1 else 'are'} there already, and nothing was written;"
            " choose another name or --folder"
        )
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink()
        for parent in made:
            if parent.is_dir():
                parent.rmdir()
        where = error.filename or folder
        raise InputError(f"{where}: cannot be written: {error.strerror}; nothing was written") from None
    return written
