"""A plugin three ways, each in a fresh virtual environment, as the tutorial says: a file, a package, `new-plugin`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hardkv
import hardkv_kernels
from hardkv import HardKVRuntime
from hardkv.cli.new_plugin import Kind
from tests.test_docs import blocks
from tests.tiny_models import loaded

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "write_a_plugin.md"
PACKAGE = ROOT / "examples" / "hardkv-recency"
TITLED = {block.title: block.code for block in blocks(PAGE) if block.title is not None}
PROMPT = "".join(chr(97 + (7 * index + index // 5) % 26) for index in range(150))
SMALL = {"cache.interval": 16, "cache.local_window": 8, "cache.query_rows": 16, "budget.mean_tokens": 40}
OFFLINE = "--no-deps --no-build-isolation --no-index --quiet --disable-pip-version-check"
# The same properties, on fewer cases than `HYPOTHESIS_PROFILE` asks of this process.
FEW = """\
from hypothesis import settings

settings.register_profile("few", max_examples=2, deadline=None)
settings.load_profile("few")
"""


@dataclass
class Environment:
    """A virtual environment of its own, which sees this one's packages, and a model that its commands may load."""

    folder: Path
    model: Path

    def __call__(self, command: str, cwd: Path) -> str:
        """Run a command line with this environment's programs; gives stdout."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HYPOTHESIS"))}
        variables |= {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(shlex.split(command), cwd=cwd, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def generate(self, command: str, cwd: Path) -> dict[str, Any]:
        """Run a `hardkv generate` of the tutorial on the tiny model, with settings of its size."""
        changes = {"model.id": self.model, "model.dtype": "float32", **SMALL}
        options = " ".join(f"--set {key}={value}" for key, value in changes.items())
        result = self(f"{command} {options} --max-new-tokens 40 --set generation.ignore_eos=true --raw --json", cwd)
        found: dict[str, Any] = json.loads(result)
        return found

    def known(self, cwd: Path) -> dict[tuple[str, str], str]:
        """The plugin of every component, by slot and name."""
        return {(row["slot"], row["name"]): row["plugin"] for row in json.loads(self("hardkv plugins --json", cwd))}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment; hardkv, pip and what they need are those of this process, as nothing is downloaded."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, symlinks=True)
    sources = [Path(module.__file__ or "").parents[1] for module in (hardkv, hardkv_kernels)]
    installed = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "this_process.pth").write_text("\n".join([*map(str, sources), *installed]))
    for name, module in (("hardkv", "hardkv.cli"), ("pip", "pip._internal.cli.main")):
        script = folder / "bin" / name
        script.write_text(f"#!{folder}/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        script.chmod(0o755)
    model = tmp_path_factory.mktemp("model")
    tiny = loaded("llama", num_hidden_layers=2)
    tiny.model.save_pretrained(model)
    tiny.tokenizer.save_pretrained(model)
    return Environment(folder, model)


@pytest.fixture(scope="module")
def expected(run: Environment) -> Callable[[str], list[int]]:
    """Tokens that a built-in scorer leads to, with the settings that the tutorial's commands get here."""

    def tokens(scorer: str) -> list[int]:
        config: dict[str, Any] = {"model": {"id": str(run.model), "dtype": "float32"}, "scorer": {"name": scorer}}
        config |= {"budget": {"name": "top_k"}, "cache": {}}
        for path, value in SMALL.items():
            section, key = path.split(".")
            config[section][key] = value
        runtime = HardKVRuntime.from_config(config)
        one = runtime.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
        return list(one.token_ids)

    return tokens


def told(command: str) -> str:
    """A command line, which the tutorial must give as it stands."""
    assert command in PAGE.read_text().splitlines(), f"not in {PAGE.name}: {command}"
    return command


def test_a_file_beside_the_configuration(
    run: Environment, tmp_path: Path, expected: Callable[[str], list[int]]
) -> None:
    for name in ("recency.py", "test_recency.py", "run.yaml"):
        (tmp_path / name).write_text(TITLED[name])
    (tmp_path / "conftest.py").write_text(FEW)
    assert len(TITLED["recency.py"].splitlines()) <= 28
    assert " passed" in run(told("python -m pytest -q test_recency.py"), tmp_path)
    listed = run(told("hardkv plugins recency --config run.yaml"), tmp_path)
    assert "scorer recency  (plugin recency)" in listed
    assert "scorer.half_life" in listed
    generate = told('hardkv generate --config run.yaml "Why is the sky blue?"')
    found = run.generate(generate.replace('"Why is the sky blue?"', PROMPT), tmp_path)
    assert found["runtime"]["compressions"] == 3
    assert found["runtime"]["mean_tokens_after_compression"] == 40
    # The newest tokens are what `streaming` keeps, and `key_norm` does not.
    assert found["token_ids"] == expected("streaming")
    assert found["token_ids"] != expected("key_norm")
    assert ("scorer", "recency") not in run.known(tmp_path)


def test_a_package(run: Environment, tmp_path: Path, expected: Callable[[str], list[int]]) -> None:
    source = (PACKAGE / "src" / "hardkv_recency" / "recency.py").read_text()
    assert source == TITLED["recency.py"]
    assert TITLED["pyproject.toml"] == (PACKAGE / "pyproject.toml").read_text()
    package = shutil.copytree(PACKAGE, tmp_path / "hardkv-recency")
    (tmp_path / "conftest.py").write_text(FEW)
    assert ("scorer", "recency") not in run.known(tmp_path)
    run(told("pip install ./hardkv-recency").replace("install", f"install {OFFLINE}"), tmp_path)
    try:
        assert run.known(tmp_path)["scorer", "recency"] == "recency"
        assert " passed" in run(told("python -m pytest -q hardkv-recency"), tmp_path)
        found = run.generate(f"hardkv generate --config {package / 'run.yaml'} {PROMPT}", tmp_path)
        assert found["runtime"]["compressions"] == 3
        assert found["token_ids"] == expected("streaming")
        # A configuration that names it all the same, and none at all.
        (tmp_path / "named.yaml").write_text("plugins: [recency]\nscorer: {name: recency}\n")
        assert ": valid (smollm2; recency, " in run("hardkv config check named.yaml", tmp_path)
    finally:
        run("pip uninstall --yes --quiet hardkv-recency", tmp_path)
    assert ("scorer", "recency") not in run.known(tmp_path)


def test_new_plugin(run: Environment, tmp_path: Path) -> None:
    """What it writes passes its tests, decodes, and is known everywhere once installed: every kind of it."""
    out = run(told("hardkv new-plugin scorer my_method"), tmp_path)
    (tmp_path / "conftest.py").write_text(FEW)
    commands = [line.strip() for line in out.split("Next:\n")[1].splitlines()]
    tests, generate, compare, install = commands
    assert compare == "hardkv compare --config my_method/my_method.yaml"
    found = run.generate(generate.replace('"Why is the sky blue?"', PROMPT), tmp_path)
    assert (len(found["token_ids"]), found["runtime"]["compressions"]) == (40, 3)

    folders = {kind: f"own_{kind.name}" for kind in Kind if kind is not Kind.scorer}
    calls = [["new-plugin", kind.value, folder] for kind, folder in folders.items()]
    (tmp_path / "write_all.py").write_text(f"from hardkv.cli import main\nassert not any(map(main, {calls}))\n")
    run("python write_all.py", tmp_path)
    assert " passed" in run(f"{tests} -q {' '.join(folders.values())}", tmp_path)
    assert install == "pip install -e my_method"
    editable = " ".join(f"-e ./{folder}" for folder in ["my_method", *folders.values()])
    run(f"pip install {OFFLINE} {editable}", tmp_path)
    try:
        known = run.known(tmp_path / "own_tier")
        assert known["scorer", "my_method"] == "my_method"
        for kind, folder in folders.items():
            assert known[kind.form.slot, folder] == folder
        # Installed so, the file that the configuration names is the installed one: it is loaded once.
        assert ": valid (smollm2; my_method, " in run("hardkv config check my_method/my_method.yaml", tmp_path)
    finally:
        names = " ".join(f"hardkv-{folder.replace('_', '-')}" for folder in ["my_method", *folders.values()])
        run(f"pip uninstall --yes --quiet {names}", tmp_path)


CONTRACTS = """\
import page
from hardkv.testing import BudgetContract, CalibratorContract, RegularizerContract, ScorerContract, TierContract

KINDS = [BudgetContract, CalibratorContract, RegularizerContract, ScorerContract, TierContract]
for name, component in list(vars(page).items()):
    for contract in KINDS:
        if isinstance(component, type) and issubclass(component, contract.interface):
            globals()[f"Test{name}"] = type(f"Test{name}", (contract,), {"component": component()})
"""


def test_every_example_of_the_tutorial_holds_to_its_contract(run: Environment, tmp_path: Path) -> None:
    shown = [block.code for block in blocks(PAGE) if block.language == "python" and "class " in block.code]
    shown = [code for code in shown if "Contract" not in code]
    (tmp_path / "page.py").write_text("\n".join(shown))
    (tmp_path / "test_page.py").write_text(CONTRACTS)
    (tmp_path / "conftest.py").write_text(FEW)
    listed = run("python -m pytest -q --collect-only test_page.py", tmp_path)
    tested = {line.split("::")[1] for line in listed.splitlines() if "::" in line}
    assert len(tested) == 9
    assert " passed" in run("python -m pytest -q test_page.py", tmp_path)


def test_a_name_taken_by_an_installed_plugin_is_refused(run: Environment, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "hardkv-recency")
    run(f"pip install {OFFLINE} ./hardkv-recency", tmp_path)
    try:
        with pytest.raises(AssertionError, match="there is a scorer of that name, from recency; choose another"):
            run("hardkv new-plugin scorer recency", tmp_path)
    finally:
        run("pip uninstall --yes --quiet hardkv-recency", tmp_path)
