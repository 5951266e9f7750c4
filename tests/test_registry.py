# mypy: disable-error-code="type-abstract"
# an interface is the key that components are looked up by
"""Registry: built-ins, entry points and one-file plugins come in through one hook; mistakes name plugin and cure."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardkv.config import load_config
from hardkv.errors import ConfigError, PluginError
from hardkv.interfaces import Budget, CacheTier, Calibrator, ImportanceScorer, Regularizer
from hardkv.registry import SLOTS, Registry, load_registry

RECENCY = '''\
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

import hardkv


class Recency(hardkv.ImportanceScorer):
    """Newer tokens score higher."""

    name: ClassVar[str] = "recency"

    class Config(hardkv.Options):
        half_life: int = Field(default=256, gt=0, description="Tokens after which a score has halved.")

    def score(self, view: hardkv.ScoreView) -> Tensor:
        age = view.positions.amax(-1, keepdim=True) - view.positions
        return torch.exp2(-age / self.config.half_life).masked_fill(~view.valid, 0.0)[:, :, None]


@hardkv.hookimpl
def hardkv_components():
    return [Recency]
'''

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a plugin file into the folder of the configuration."""

    def do(text: str, name: str = "my_plugin.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        return path

    return do


def refused(folder: Path, *plugins: str) -> str:
    with pytest.raises(PluginError) as caught:
        load_registry(plugins or ["my_plugin"], folder)
    return str(caught.value)


class TestBuiltins:
    def test_every_name_is_registered(self) -> None:
        registry = load_registry()
        assert set(registry.names(ImportanceScorer)) == {
            *("attention_power", "attention", "window_max", "output_drop", "expected_attention", "snapkv", "rkv"),
            *("value_aware", "h2o", "scissorhands", "tova", "quest", "keydiff", "lagkv", "key_norm", "streaming"),
            *("random", "kvzap", "kvpress"),
        }
        assert set(registry.names(Calibrator)) == {"exact", "temperature", "softmax"}
        assert set(registry.names(Budget)) == {
            *("top_p", "top_k", "threshold", "ada", "pyramid", "static_heads", "bytes")
        }
        assert set(registry.names(Regularizer)) == {"sparse_load", "rewrite", "flatten_max", "flatten_sum", "auto"}
        assert set(registry.names(CacheTier)) == {"evict", "merge", "nearest_merge"}

    def test_the_file_is_named_for_the_component(self) -> None:
        for entry in load_registry().all():
            assert entry.component.__module__.rsplit(".", 1)[1] == entry.name
            assert entry.plugin == "builtin"
            assert entry.summary

    def test_all_goes_slot_by_slot(self) -> None:
        slots = [entry.slot for entry in load_registry().all()]
        assert list(dict.fromkeys(slots)) == list(SLOTS.values())

    def test_two_registries_share_nothing(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY, "recency.py")
        assert "recency" in load_registry(["recency"], tmp_path).names(ImportanceScorer)
        assert "recency" not in load_registry().names(ImportanceScorer)

    def test_importing_hardkv_loads_no_plugin_and_no_builtin(self) -> None:
        code = "import hardkv, sys; print([m for m in sys.modules if m.startswith(('hardkv.', 'pluggy', 'torch'))])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


class TestBuild:
    @pytest.fixture
    def registry(self, write: Write, tmp_path: Path) -> Registry:
        write(RECENCY, "recency.py")
        return load_registry(["recency"], tmp_path)

    def test_options_reach_a_fresh_instance(self, registry: Registry) -> None:
        first = registry.build(ImportanceScorer, {"name": "recency", "half_life": 7})
        second = registry.build(ImportanceScorer, {"name": "recency"})
        assert first.config.model_dump() == {"half_life": 7}
        assert second.config.model_dump() == {"half_life": 256}
        assert first is not second
        assert type(first) is registry.get(ImportanceScorer, "recency")

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (
                {"name": "recency", "half_life": -1},
                "scorer 'recency': half_life: Input should be greater than 0 (got -1) [scorer.half_life]",
            ),
            (
                {"name": "recency", "half_lief": 3},
                "scorer 'recency': half_lief: unknown key (got 3). Did you mean 'half_life'? Known: half_life"
                " [scorer.half_lief]",
            ),
        ],
    )
    def test_a_wrong_option_is_named(self, registry: Registry, spec: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            registry.build(ImportanceScorer, spec)
        assert str(caught.value) == message

    def test_all_wrong_options_are_named(self, registry: Registry) -> None:
        with pytest.raises(ConfigError) as caught:
            registry.build(ImportanceScorer, {"name": "recency", "half_life": "x", "y": 1})
        lines = str(caught.value).split("\n")
        assert len(lines) == 2
        assert "half_life: Input should be a valid integer" in lines[0]
        assert "y: unknown key (got 1). Known: half_life" in lines[1]

    def test_an_unknown_name_lists_the_known_ones(self, registry: Registry) -> None:
        with pytest.raises(ConfigError) as caught:
            registry.get(ImportanceScorer, "recencey")
        message = str(caught.value)
        assert message.startswith("unknown scorer 'recencey'. Did you mean 'recency'? Known: attention_power, ")
        assert message.endswith(", recency [scorer.name]")

    def test_a_name_of_another_slot_says_so(self, registry: Registry) -> None:
        with pytest.raises(ConfigError, match=r"unknown budget 'recency'\. 'recency' is a scorer\. Known: "):
            registry.get(Budget, "recency")

    def test_no_name_lists_the_known_ones(self, registry: Registry) -> None:
        with pytest.raises(ConfigError, match=r"scorer\.name: missing\. Known: attention_power"):
            registry.build(ImportanceScorer, {})

    @given(st.text(min_size=1, max_size=12))
    def test_any_unknown_name_is_a_config_error(self, name: str) -> None:
        registry = Registry(load_registry().all())
        if name in registry.names(Calibrator):
            return
        with pytest.raises(ConfigError, match="unknown calibrator"):
            registry.build(Calibrator, {"name": name})

    def test_a_constructor_that_fails_names_the_component(self, write: Write, tmp_path: Path) -> None:
        broken = "    def __init__(self, config=None):\n        raise ValueError('no luck')\n\n    def score("
        write(RECENCY.replace("    def score(", broken))
        registry = load_registry(["my_plugin"], tmp_path)
        with pytest.raises(PluginError, match=r"scorer 'recency' \(.*my_plugin\.py\) .* no luck"):
            registry.build(ImportanceScorer, {"name": "recency"})


class TestLocalPlugins:
    def test_recency_runs_from_a_yaml_file(self, write: Write, tmp_path: Path) -> None:
        assert len(RECENCY.splitlines()) <= 28
        write(RECENCY, "recency.py")
        run = write("plugins: [recency]\nscorer: {name: recency, half_life: 9}\n", "run.yaml")
        before, modules = list(sys.path), set(sys.modules)
        loaded = load_config(run)
        assert loaded.components.scorer.config.model_dump() == {"half_life": 9}
        summaries = {entry.name: entry.summary for entry in loaded.registry.all() if entry.plugin == "recency"}
        assert summaries == {"recency": "Newer tokens score higher."}
        assert sys.path == before
        assert "recency" not in set(sys.modules) - modules

    def test_recency_is_found_in_the_current_folder(
        self, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(RECENCY, "recency.py")
        monkeypatch.chdir(tmp_path)
        loaded = load_config({"plugins": ["recency"], "scorer": {"name": "recency"}})
        assert loaded.components.scorer.name == "recency"

    @pytest.mark.parametrize(
        ("file", "named"),
        [
            ("sub/recency.py", "sub/recency.py"),
            ("sub/recency.py", "sub.recency"),
            ("recency/__init__.py", "recency"),
        ],
    )
    def test_ways_to_name_a_file(self, write: Write, tmp_path: Path, file: str, named: str) -> None:
        write(RECENCY, file)
        assert "recency" in load_registry([named], tmp_path).names(ImportanceScorer)

    def test_an_absolute_path_works(self, write: Write) -> None:
        assert "recency" in load_registry([str(write(RECENCY))]).names(ImportanceScorer)

    def test_a_plugin_may_import_its_neighbour(self, write: Write, tmp_path: Path) -> None:
        write("HALF_LIFE = 5\n", "hardkv_test_neighbour.py")
        text = "from hardkv_test_neighbour import HALF_LIFE\n" + RECENCY.replace("default=256", "default=HALF_LIFE")
        write(text)
        before = list(sys.path)
        component = load_registry(["my_plugin"], tmp_path).get(ImportanceScorer, "recency")
        assert component.Config().model_dump() == {"half_life": 5}
        assert sys.path == before

    def test_a_changed_file_is_read_again(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY)
        load_registry(["my_plugin"], tmp_path)
        write(RECENCY.replace('"recency"', '"recency_two"'))
        assert "recency_two" in load_registry(["my_plugin"], tmp_path).names(ImportanceScorer)

    def test_a_plugin_named_twice_loads_once(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY)
        registry = load_registry(["my_plugin", "my_plugin.py"], tmp_path)
        assert registry.names(ImportanceScorer).count("recency") == 1


class TestMistakes:
    def test_no_such_plugin(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY, "recency.py")
        message = refused(tmp_path, "recencey")
        assert message.startswith(f"plugin 'recencey': no file recencey.py in {tmp_path} or ")
        assert message.endswith(
            "no installed module or entry point of that name. Did you mean 'recency'? Correct `plugins:` or install it"
        )

    def test_no_such_file(self, tmp_path: Path) -> None:
        message = refused(tmp_path, "recency.py")
        assert message.startswith(f"plugin 'recency.py': no such file; looked for {tmp_path / 'recency.py'}, ")

    def test_import_error(self, write: Write, tmp_path: Path) -> None:
        path = write("\nimport no_such_module\n")
        before = set(sys.modules)
        assert refused(tmp_path) == (
            f"plugin 'my_plugin' ({path}): import failed with ModuleNotFoundError: No module named 'no_such_module'"
            f" (line 2 of {path}); install what it imports, or take it out of `plugins:`"
        )
        assert not [name for name in set(sys.modules) - before if name.startswith("hardkv_local")]

    def test_syntax_error(self, write: Write, tmp_path: Path) -> None:
        path = write("def broken(:\n")
        message = refused(tmp_path)
        assert message.startswith(f"plugin 'my_plugin' ({path}): import failed with SyntaxError: ")
        assert "line 1" in message
        assert message.endswith("; repair the file, or take it out of `plugins:`")

    def test_no_hook(self, write: Write, tmp_path: Path) -> None:
        path = write("VALUE = 1\n")
        assert refused(tmp_path) == (
            f"plugin 'my_plugin' ({path}): has no hook 'hardkv_components'. To cure it, write `@hardkv.hookimpl` above"
            " `def hardkv_components(): return [YourComponent]`"
        )

    def test_hook_without_its_marker(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY.replace("@hardkv.hookimpl\n", ""))
        assert ": hardkv_components lacks its marker; write `@hardkv.hookimpl` above " in refused(tmp_path)

    def test_hook_misspelt(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY.replace("def hardkv_components", "def hardkv_component"))
        assert refused(tmp_path).endswith(
            ": unknown hook 'hardkv_component'. Did you mean 'hardkv_components'? The only hook is 'hardkv_components'"
        )

    def test_hook_misspelt_without_its_marker(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY.replace("def hardkv_components", "def hardkv_component").replace("@hardkv.hookimpl\n", ""))
        assert "has no hook 'hardkv_components'. Is it 'hardkv_component'?" in refused(tmp_path)

    def test_hook_with_an_argument(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY.replace("hardkv_components()", "hardkv_components(config)"))
        message = refused(tmp_path)
        assert "config" in message
        assert "`def hardkv_components(): return [YourComponent]`" in message

    def test_hook_that_raises(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY.replace("return [Recency]", "raise KeyError('lost')"))
        assert refused(tmp_path).endswith(": hardkv_components raised KeyError: 'lost'; repair it")

    @pytest.mark.parametrize("given", ["Recency", "None", "{Recency: 1}"])
    def test_hook_that_gives_no_list(self, write: Write, tmp_path: Path, given: str) -> None:
        write(RECENCY.replace("[Recency]", given))
        assert ": hardkv_components must return a list of classes (got " in refused(tmp_path)

    def test_an_instance_for_a_class(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY.replace("[Recency]", "[Recency()]"))
        assert refused(tmp_path).endswith(": hardkv_components gave an instance; give the class Recency itself")

    @pytest.mark.parametrize("base", ["object", "hardkv.Component"])
    def test_wrong_base_class(self, write: Write, tmp_path: Path, base: str) -> None:
        write(RECENCY.replace("Recency(hardkv.ImportanceScorer)", f"Recency({base})"))
        assert refused(tmp_path).endswith(
            ": Recency implements none of the interfaces; subclass exactly one of"
            " ImportanceScorer, Calibrator, Budget, Regularizer, CacheTier"
        )

    def test_two_interfaces(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY.replace("(hardkv.ImportanceScorer)", "(hardkv.ImportanceScorer, hardkv.Budget)"))
        assert "Recency implements several interfaces; subclass exactly one of" in refused(tmp_path)

    def test_no_name(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY.replace('    name: ClassVar[str] = "recency"\n', ""))
        assert refused(tmp_path).endswith(
            ': Recency needs a name in lower_case (it has none); write `name = "my_scorer"` in the class'
        )

    @pytest.mark.parametrize("name", ["Recency", "", "a-b", "1st"])
    def test_a_name_that_yaml_readers_would_mistype(self, write: Write, tmp_path: Path, name: str) -> None:
        write(RECENCY.replace('"recency"', repr(name)))
        assert f"Recency needs a name in lower_case (got {name!r})" in refused(tmp_path)

    def test_a_duplicate_name_names_both_modules(self, write: Write, tmp_path: Path) -> None:
        one, two = write(RECENCY, "one.py"), write(RECENCY, "two.py")
        message = refused(tmp_path, "one", "two")
        assert message.startswith("two components are called scorer 'recency': ")
        assert f"({one}, plugin 'one')" in message
        assert f"({two}, plugin 'two'). Load one alone, if they are the same, or rename one" in message

    def test_a_name_that_a_builtin_has(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY.replace('"recency"', '"snapkv"'))
        message = refused(tmp_path)
        assert "hardkv.policies.scorers.snapkv.SnapKV" in message
        assert "plugin 'my_plugin'). " in message

    def test_config_is_no_options(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY.replace("class Config(hardkv.Options)", "class Config"))
        assert refused(tmp_path).endswith(": Recency.Config is no Options; write `class Config(hardkv.Options):`")

    def test_an_option_called_name(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY.replace("half_life: int = Field(default=256, gt=0, ", 'name: str = Field(default="x", '))
        assert "Recency.Config has an option 'name', which is the component's own; rename it" in refused(tmp_path)

    def test_abstract_methods_left(self, write: Write, tmp_path: Path) -> None:
        write(RECENCY.replace("def score", "def scores"))
        assert refused(tmp_path).endswith(": Recency does not implement score of ImportanceScorer; add it")


class TestEntryPoints:
    @pytest.fixture
    def site(self, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A folder on sys.path with an installed distribution that declares one entry point."""
        write(RECENCY, "site/hardkv_test_recency.py")
        write(
            "Metadata-Version: 2.1\nName: hardkv-test-recency\nVersion: 1.0\n",
            "site/hardkv_test_recency-1.0.dist-info/METADATA",
        )
        write("[hardkv]\nrecency = hardkv_test_recency\n", "site/hardkv_test_recency-1.0.dist-info/entry_points.txt")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        monkeypatch.delitem(sys.modules, "hardkv_test_recency", raising=False)
        importlib.invalidate_caches()
        return tmp_path / "site"

    def test_an_installed_plugin_needs_no_mention(self, site: Path) -> None:
        registry = load_registry()
        entry = next(entry for entry in registry.all() if entry.name == "recency")
        assert (entry.plugin, entry.component.__module__) == ("recency", "hardkv_test_recency")

    @pytest.mark.parametrize("named", ["recency", "hardkv_test_recency"])
    def test_mentioning_it_loads_it_once(self, site: Path, named: str) -> None:
        assert load_registry([named]).names(ImportanceScorer).count("recency") == 1

    def test_a_local_file_that_is_the_installed_one_loads_once(self, site: Path) -> None:
        assert load_registry(["hardkv_test_recency"], site).names(ImportanceScorer).count("recency") == 1

    def test_a_broken_one_names_the_distribution(self, site: Path) -> None:
        (site / "hardkv_test_recency.py").write_text("1 / 0\n")
        with pytest.raises(PluginError) as caught:
            load_registry()
        assert str(caught.value) == (
            "plugin 'recency' (entry point hardkv_test_recency of hardkv-test-recency): import failed with"
            f" ZeroDivisionError: division by zero (line 1 of {site / 'hardkv_test_recency.py'});"
            " repair it or `pip uninstall hardkv-test-recency`"
        )

    def test_an_installed_module_without_entry_point_can_be_named(self, site: Path) -> None:
        (site / "hardkv_test_recency-1.0.dist-info" / "entry_points.txt").unlink()
        assert "recency" not in load_registry().names(ImportanceScorer)
        assert "recency" in load_registry(["hardkv_test_recency"]).names(ImportanceScorer)
