"""`hardkv new-plugin`: what it writes works as it stands; what it refuses leaves nothing behind."""

from __future__ import annotations

import keyword
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hardkv import HardKVRuntime
from hardkv.cli import main
from hardkv.cli.new_plugin import Kind
from hardkv.config import HardKVConfig, load_config
from hardkv.model_adapter import LoadedModel
from tests.tiny_models import loaded

NAMES = {kind: f"own_{kind.name}" for kind in Kind}
CACHE = {"sinks": 2, "local_window": 8, "query_rows": 32, "interval": 16, "page_slots": 8}
PROMPT = torch.randint(0, 256, (120,), generator=torch.Generator().manual_seed(0)).tolist()

Called = tuple[int, str, str]
New = Callable[..., Called]


@pytest.fixture
def new(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> New:
    """Run the command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Called:
        code = main(["new-plugin", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return loaded("llama", num_hidden_layers=2)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)
def test_every_kind_decodes_and_compresses_as_written(new: New, tmp_path: Path, model: LoadedModel, kind: Kind) -> None:
    name = NAMES[kind]
    code, _, err = new(kind.value, name)
    assert (code, err) == (0, "")
    run = tmp_path / name / f"{name}.yaml"
    ready = load_config(run)
    assert getattr(ready.config, kind.form.slot).name == name
    assert getattr(ready.components, kind.form.slot).name == name
    assert ready.config.model == HardKVConfig().model.model_copy(update={"id": "smollm2"})

    written: dict[str, Any] = yaml.safe_load(run.read_text())
    slots = written.get("cache", {})
    budget = {**written["budget"], "mean_tokens": 40}
    small = {**written, "model": {"dtype": "float32"}, "cache": {**slots, **CACHE}, "budget": budget}
    run.write_text(yaml.safe_dump(small))
    runtime = HardKVRuntime.from_config(run, loaded=model)
    one = runtime.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    assert (one.finish_reason, len(one.token_ids), one.stats.compressions) == ("length", 40, 3)
    assert one.stats.mean_tokens_after_compression == pytest.approx([40] * 3, rel=0.05)
    assert runtime._cache.pool.manager.used_pages == 0


def test_it_writes_four_files_and_says_what_to_do_next(new: New, tmp_path: Path) -> None:
    code, out, err = new("scorer", "sky_blue")
    assert (code, err) == (0, "")
    names = ["pyproject.toml", "sky_blue.py", "sky_blue.yaml", "test_sky_blue.py"]
    assert sorted(path.name for path in (tmp_path / "sky_blue").iterdir()) == names
    assert [line for line in out.splitlines() if line.startswith("wrote ")] == [
        f"wrote sky_blue/{name}" for name in ("sky_blue.py", "test_sky_blue.py", "sky_blue.yaml", "pyproject.toml")
    ]
    for command in ("python -m pytest sky_blue/test_sky_blue.py", "hardkv compare --config sky_blue/sky_blue.yaml"):
        assert f"  {command}" in out
    text = "".join((tmp_path / "sky_blue" / name).read_text() for name in names)
    assert "class SkyBlue(hardkv.ImportanceScorer)" in text
    assert 'name = "hardkv-sky-blue"' in text
    assert "my_method" not in text
    assert "MyMethod" not in text


def test_a_folder_may_be_given(new: New, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    assert new("budget", "sky_blue", "--folder", "mine")[0] == 0
    assert load_config(tmp_path / "mine" / "sky_blue.yaml").components.budget.name == "sky_blue"
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        ("scorer", "Sky", "expected lower_case"),
        ("scorer", "1st", "expected lower_case"),
        ("scorer", "a-b", "expected lower_case"),
        ("scorer", "a.b", "expected lower_case"),
        ("scorer", "../a", "expected lower_case"),
        ("scorer", "", "expected lower_case"),
        ("scorer", "lambda", "neither a word of Python"),
        ("scorer", "none", "neither a word of Python"),
        ("scorer", "test_sky", "nor test_..."),
        ("scorer", "snapkv", "there is a scorer of that name, from builtin; choose another"),
        ("online-scorer", "h2o", "there is a scorer of that name"),
        ("calibrator", "exact", "there is a calibrator of that name"),
        ("budget", "top_k", "there is a budget of that name"),
        ("regularizer", "auto", "there is a regularizer of that name"),
        ("tier", "merge", "there is a condenser of that name"),
        ("scorer", "json", "there is a module of that name, "),
        ("scorer", "hardkv", "there is a module of that name, "),
        ("scorrer", "sky", "'scorrer' is not one of 'scorer', 'online-scorer', "),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(new: New, tmp_path: Path, kind: str, name: str, told: str) -> None:
    code, out, err = new(kind, name)
    assert (code, out) == (2, "")
    assert told in err
    assert list(tmp_path.iterdir()) == []


def test_a_name_of_another_slot_is_free(new: New) -> None:
    assert new("scorer", "merge")[0] == 0


def test_files_that_are_there_are_named_and_left_alone(new: New, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("mine")
    code, out, err = new("scorer", "sky_blue", "--folder", ".")
    assert (code, out) == (2, "")
    assert err.startswith("error: pyproject.toml: is there already, and nothing was written; ")
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]
    assert new("scorer", "sky_blue")[0] == 0
    code, _, err = new("scorer", "sky_blue")
    assert code == 2
    assert "sky_blue/sky_blue.py, sky_blue/test_sky_blue.py" in err


def test_a_write_that_fails_leaves_nothing_half_written(
    new: New, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Path.open

    def fail(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "pyproject.toml":
            raise OSError(28, "No space left on device", str(path))
        return plain(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fail)
    code, out, err = new("scorer", "sky_blue", "--folder", "some/where")
    assert (code, out) == (2, "")
    assert "some/where/pyproject.toml: cannot be written: No space left on device; nothing was written" in err
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_folder_should_be(new: New, tmp_path: Path) -> None:
    (tmp_path / "sky_blue").write_text("a file")
    code, _, err = new("scorer", "sky_blue")
    assert code == 2
    assert "sky_blue: cannot be written: " in err
    assert (tmp_path / "sky_blue").read_text() == "a file"


def test_every_kind_has_its_template() -> None:
    found = {path.name.removesuffix(".py") for path in files("hardkv.cli.plugin_templates").iterdir()}
    assert {kind.name for kind in Kind} == found - {"__init__", "__pycache__"}
    assert not any(keyword.iskeyword(kind.name) for kind in Kind)
