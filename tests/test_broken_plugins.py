"""Broken plugins: a message names plugin, file and cure; what breaks one sequence leaves the others as they were."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from hardkv import HardKVRuntime
from hardkv.config import load_config
from hardkv.errors import ConfigError, PluginError
from hardkv.model_adapter import LoadedModel
from hardkv.registry import load_registry
from hardkv.results import Generation
from tests.tiny_models import loaded

# While it is loaded


def template(kind: str) -> str:
    """A plugin that works, called `my_method`."""
    return (files("hardkv.cli.plugin_templates") / f"{kind}.py").read_text()


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[[str], Path]:
    """Write a plugin file."""

    def write(text: str) -> Path:
        path = tmp_path / "my_plugin.py"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("kind", "method", "interface"),
    [
        ("scorer", "score", "ImportanceScorer"),
        ("online_scorer", "finish", "ImportanceScorer"),
        ("entry_scorer", "enter", "ImportanceScorer"),
        ("calibrator", "calibrate", "Calibrator"),
        ("budget", "counts", "Budget"),
        ("regularizer", "layout", "Regularizer"),
        ("tier", "attend", "CacheTier"),
    ],
)
def test_a_method_misspelt(plugin: Callable[[str], Path], kind: str, method: str, interface: str) -> None:
    path = plugin(template(kind).replace(f"def {method}(", f"def {method}s("))
    with pytest.raises(PluginError) as caught:
        load_registry([str(path)])
    assert str(caught.value) == (
        f"plugin '{path}' ({path}): MyMethod does not implement {method} of {interface}; add it"
    )


@pytest.mark.parametrize(
    ("slot", "kind", "builtin"),
    [
        ("scorer", "scorer", "snapkv"),
        ("calibrator", "calibrator", "exact"),
        ("budget", "budget", "top_k"),
        ("regularizer", "regularizer", "auto"),
        ("condenser", "tier", "merge"),
    ],
)
class TestEverySlot:
    def test_a_name_that_a_builtin_has(self, plugin: Callable[[str], Path], slot: str, kind: str, builtin: str) -> None:
        path = plugin(template(kind).replace('"my_method"', f'"{builtin}"'))
        with pytest.raises(PluginError) as caught:
            load_registry([str(path)])
        message = str(caught.value)
        assert message.startswith(f"two components are called {slot} '{builtin}': hardkv.")
        assert message.endswith(f".MyMethod ({path}, plugin '{path}'). Rename one")

    def test_an_option_that_is_not_there(
        self, plugin: Callable[[str], Path], tmp_path: Path, slot: str, kind: str, builtin: str
    ) -> None:
        plugin(template(kind))
        run = tmp_path / "run.yaml"
        run.write_text(f"plugins: [my_plugin]\n{slot}: {{name: my_method, colour: red}}\n")
        with pytest.raises(ConfigError) as caught:
            load_config(run)
        message = str(caught.value)
        assert message.startswith(f"{run}: {slot} 'my_method': colour: unknown key (got 'red'). ")
        assert message.endswith(f" [{slot}.colour]")

    def test_a_constructor_that_fails(
        self, plugin: Callable[[str], Path], tmp_path: Path, slot: str, kind: str, builtin: str
    ) -> None:
        text = template(kind).replace("    def __init__(", "    def _unused(")
        broken = "    def __init__(self, config=None):\n        raise ValueError('no luck')\n\n    def "
        head, hook = text.split("\n\n\n@hardkv")
        plugin(f"{head.replace('    def ', broken, 1)}\n\n\n@hardkv{hook}".replace("    @property\n" + broken, broken))
        with pytest.raises(PluginError, match=rf"{slot} 'my_method' .*my_plugin.* could not be built .*: no luck"):
            load_config({"plugins": [str(tmp_path / "my_plugin.py")], slot: {"name": "my_method"}})


# While it runs

BROKEN = '''\
"""Components that break at one sequence, late: the one whose positions reach `LATE`."""

from typing import Any

import torch

import hardkv
from hardkv_kernels import attend_slots

LATE = 215  # past the second compression while decoding of a prompt of 190 tokens, for these settings
LATE_ATTENDS = 32 * 2  # the same in calls of one tier's `attend`, 2 layers


class Options(hardkv.Options):
    method: str = ""
    how: str = ""


class Breaking:
    """What a method answers, broken in the configured way if it is late."""

    def spoil(self, method: str, answer: Any, late: bool) -> Any:
        how = self.config.how if late and self.config.method == method else ""
        if how == "raises":
            raise ZeroDivisionError("one over none")
        if how == "nothing":
            return None
        if isinstance(answer, tuple):
            return (self.spoil(method, answer[0], late), *answer[1:])
        if how == "nan":
            return answer * float("nan")
        return answer[..., :-1] if how == "shape" else answer


class Scorer(Breaking, hardkv.ImportanceScorer):
    name = "broken_scorer"
    Config = Options

    def score(self, view):
        scores = -view.keys.float().norm(dim=-1).masked_fill(~view.valid, 0.0)[:, :, None]
        return self.spoil("score", scores, int(view.positions[view.valid].max()) >= LATE)


class Online(Breaking, hardkv.OnlineScorer):
    name = "broken_online_scorer"
    Config = Options

    def update(self, statistic, probabilities):
        """Count the steps that saw a slot: more than an interval only in a round that began below the window."""
        statistic.add_((probabilities.amax(-2) > 0).float())
        self.spoil("update", statistic, float(statistic.max()) > 17)

    def seed(self, statistic, rows):
        statistic.copy_(rows.mean(-3).sum(-2))

    def finish(self, statistic, view):
        scores = (statistic + 1e-3 * view.positions).masked_fill(~view.valid, 0.0)[:, :, None]
        return self.spoil("finish", scores, int(view.positions[view.valid].max()) >= LATE)


class Entry(Breaking, hardkv.EntryScorer):
    name = "broken_entry_scorer"
    Config = Options

    def enter(self, tokens):
        scores = -tokens.keys.float().norm(dim=-1)
        late = tokens.positions.amax(-1) >= LATE
        if self.config.how == "nan":
            return scores.masked_fill(late[:, None, None], float("nan"))
        return self.spoil("enter", scores, bool(late.any()))


class Calibrator(Breaking, hardkv.Calibrator):
    """Reads the position from the scores of `streaming`."""

    name = "broken_calibrator"
    needs_reference = False
    Config = Options

    def calibrate(self, scores, reference, valid, state):
        masked = (scores / 64).masked_fill(~valid[:, :, None], float("-inf"))
        answer = torch.softmax(masked, -1).masked_fill(~valid[:, :, None], 0.0)
        return self.spoil("calibrate", answer, float(scores.max()) >= LATE)


class Budget(Breaking, hardkv.Budget):
    """Reads the position from the scores of `streaming`, in `claim`."""

    name = "broken_budget"
    needs_probabilities = False
    Config = Options

    def claim(self, probabilities, valid):
        value = probabilities.amax(2)
        answer = value, torch.zeros_like(value, dtype=torch.int32)
        return self.spoil("claim", answer, float(value.max()) >= LATE)

    def counts(self, claims, limits):
        return self.spoil("counts", claims.resident.clamp(max=40), limits.seen_tokens >= LATE)

    def target_tokens(self, seen_tokens):
        return 40


class Regularizer(Breaking, hardkv.Regularizer):
    name = "broken_regularizer"
    Config = Options

    def layout(self, selection, cost, limits):
        late = limits.seen_tokens >= LATE
        keep = self.spoil("layout", selection.keep, late)
        if keep is None:
            return None
        kept = selection.keep.sum(-1)
        return hardkv.Layout(keep=keep, rewrite=torch.ones_like(kept, dtype=torch.bool), reserve_slots=kept)


class Tier(Breaking, hardkv.CacheTier):
    """Holds what is dropped last; knows its sequence by the length of the prompt."""

    name = "broken_tier"
    Config = Options
    holds_tokens = True

    def __init__(self, config=None):
        super().__init__(config)
        self.made, self.attended, self.long, self.buffers = 0, 0, False, []

    @property
    def late(self):
        return self.long and self.attended >= LATE_ATTENDS

    def fresh(self):
        self.made += 1
        tier = Tier(self.config)
        tier.second = self.made == 2
        return self.spoil("fresh", tier, tier.second) if self.config.how != "shape" else tier

    def allocate(self, shape):
        size = (shape.layers, shape.heads, shape.slots)
        self.buffers = [torch.zeros(*size, shape.head_dim), torch.zeros(*size, shape.head_dim), torch.full(size, -1e9)]
        self.spoil("allocate", None, self.second)

    def admit(self, layer, tokens):
        self.long = self.long or (not self.attended and tokens.mask.shape[1] >= 150)
        self.spoil("admit", None, self.late)
        keys, values, bias = (buffer[layer] for buffer in self.buffers)
        chosen = torch.sort(tokens.mask, dim=1, stable=True).indices[:, -keys.shape[1] :]
        spread = chosen[..., None].expand(-1, -1, keys.shape[-1])
        count = chosen.shape[1]
        keys[:, :count] = tokens.keys.gather(1, spread)
        values[:, :count] = tokens.values.gather(1, spread)
        bias[:, :count] = torch.where(tokens.mask.gather(1, chosen), 0.0, float("-inf"))

    def attend(self, layer, query, scaling, softcap=None):
        self.attended += 1
        answer = attend_slots(query, *(buffer[layer] for buffer in self.buffers), scaling, softcap)
        return self.spoil("attend", answer, self.late)

    @property
    def allocated_bytes(self):
        return sum(buffer.nbytes for buffer in self.buffers)

    def reset(self):
        self.buffers = []
        self.spoil("reset", None, self.long)


@hardkv.hookimpl
def hardkv_components():
    return [Scorer, Online, Entry, Calibrator, Budget, Regularizer, Tier]
'''
CACHE = {"sinks": 2, "local_window": 8, "query_rows": 16, "interval": 16, "page_slots": 8}
BASE: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "cache": CACHE,
    "budget": {"name": "threshold", "mean_tokens": 40},
    # `auto` weighs measured costs, so two runtimes may compact differently.
    "regularizer": {"name": "rewrite"},
    "generation": {"max_new_tokens": 40, "ignore_eos": True},
}
STREAMING = {"scorer": {"name": "streaming"}}
BESIDE: dict[str, dict[str, Any]] = {
    "calibrator": STREAMING,
    "budget": STREAMING,
    "tier": {"cache": {**CACHE, "condensed_slots": 8}},
}
"""What else the configuration of a kind needs."""


def prompt(seed: int, tokens: int) -> list[int]:
    return torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


SHORT, LONG, OTHER = prompt(0, 60), prompt(1, 190), prompt(2, 90)
TOLD = {
    "raises": "raised ZeroDivisionError: one over none; repair line ",
    "nan": "not finite",
    "shape": " of shape ",
    "nothing": " gave None",
}
COMPRESSIONS = 33
"""Tokens that the long sequence has when its second compression while decoding begins."""


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return loaded("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plugin") / "broken.py"
    file.write_text(BROKEN)
    return file


def configured(path: Path, kind: str, method: str = "", how: str = "") -> dict[str, Any]:
    slot = "condenser" if kind == "tier" else kind.rsplit("_", 1)[-1]
    part = {"name": f"broken_{kind}", "method": method, "how": how}
    return {**BASE, **BESIDE.get(kind, {}), "plugins": [str(path)], slot: part}


@pytest.fixture(scope="module")
def healthy(model: LoadedModel, path: Path) -> Callable[[str], tuple[list[Generation], Generation]]:
    """What two prompts lead to without the third, and the long one by itself, where nothing breaks."""
    known: dict[str, tuple[list[Generation], Generation]] = {}

    def run(kind: str) -> tuple[list[Generation], Generation]:
        if kind not in known:
            runtime = HardKVRuntime.from_config(configured(path, kind), loaded=model)
            known[kind] = (runtime.generate([SHORT, OTHER]), runtime.generate(LONG))
        return known[kind]

    return run


Healthy = Callable[[str], tuple[list[Generation], Generation]]


def one_fails(runtime: HardKVRuntime, wanted: tuple[list[Generation], Generation], bad: list[int]) -> Generation:
    """Generate for a batch whose second prompt fails; the others and what comes later are as without it."""
    first, failed, second = runtime.generate([SHORT, bad, OTHER])
    assert failed.finish_reason == "error"
    assert [first, second] == wanted[0]
    assert runtime._cache.pool.manager.used_pages == 0
    assert not runtime._cache.cascades
    assert runtime.generate([SHORT, OTHER]) == wanted[0]
    assert runtime._cache.pool.manager.used_pages == 0
    assert isinstance(failed, Generation)
    return failed


def says(failed: Generation, path: Path, kind: str, how: str) -> None:
    slot = "condenser" if kind == "tier" else kind.rsplit("_", 1)[-1]
    assert failed.error is not None
    assert failed.error.startswith(f"{slot} 'broken_{kind}' ")
    assert TOLD[how] in failed.error
    assert str(path) in failed.error


@pytest.mark.parametrize("how", ["raises", "nan", "shape", "nothing"])
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("scorer", "score"),
        ("online_scorer", "finish"),
        ("calibrator", "calibrate"),
        ("budget", "claim"),
    ],
)
def test_what_breaks_at_the_second_compression_fails_one_sequence(
    model: LoadedModel, path: Path, healthy: Healthy, kind: str, method: str, how: str
) -> None:
    runtime = HardKVRuntime.from_config(configured(path, kind, method, how), loaded=model)
    failed = one_fails(runtime, healthy(kind), LONG)
    says(failed, path, kind, how)
    assert failed.token_ids == healthy(kind)[1].token_ids[:COMPRESSIONS]


@pytest.mark.parametrize("how", ["raises", "shape", "nothing"])
@pytest.mark.parametrize(("kind", "method"), [("budget", "counts"), ("regularizer", "layout")])
def test_counts_and_layouts_that_break_fail_one_sequence(
    model: LoadedModel, path: Path, healthy: Healthy, kind: str, method: str, how: str
) -> None:
    runtime = HardKVRuntime.from_config(configured(path, kind, method, how), loaded=model)
    failed = one_fails(runtime, healthy(kind), LONG)
    says(failed, path, kind, how)
    assert failed.token_ids == healthy(kind)[1].token_ids[:COMPRESSIONS]


@pytest.mark.parametrize("regions", [True, False], ids=["layer by layer", "all at once"])
def test_an_update_that_raises_at_one_sequence_s_data_fails_that_one(
    model: LoadedModel, path: Path, healthy: Healthy, regions: bool
) -> None:
    """A prompt shorter than the window has a longer first round, so its statistic grows larger than any other's."""
    runtime = HardKVRuntime.from_config(configured(path, "online_scorer", "update", "raises"), loaded=model)
    runtime._cache.layer_regions = regions
    failed = one_fails(runtime, healthy("online_scorer"), prompt(3, 3))
    says(failed, path, "online_scorer", "raises")
    assert len(failed.token_ids) == 18


@pytest.mark.parametrize("how", ["raises", "shape", "nothing"])
def test_an_entry_score_that_breaks_while_decoding_fails_one_sequence(
    model: LoadedModel, path: Path, healthy: Healthy, how: str
) -> None:
    runtime = HardKVRuntime.from_config(configured(path, "entry_scorer", "enter", how), loaded=model)
    failed = one_fails(runtime, healthy("entry_scorer"), LONG)
    says(failed, path, "entry_scorer", how)
    # The token at position 215 is the 26th generated, the one chosen from it was never given.
    assert failed.token_ids == healthy("entry_scorer")[1].token_ids[:26]


def test_an_entry_score_that_is_not_finite_fails_its_sequence_when_it_counts(
    model: LoadedModel, path: Path, healthy: Healthy
) -> None:
    runtime = HardKVRuntime.from_config(configured(path, "entry_scorer", "enter", "nan"), loaded=model)
    failed = one_fails(runtime, healthy("entry_scorer"), LONG)
    says(failed, path, "entry_scorer", "nan")
    assert 26 <= len(failed.token_ids) <= COMPRESSIONS


def test_an_entry_score_that_raises_in_a_prompt_fails_that_prompt(
    model: LoadedModel, path: Path, healthy: Healthy
) -> None:
    runtime = HardKVRuntime.from_config(configured(path, "entry_scorer", "enter", "raises"), loaded=model)
    failed = one_fails(runtime, healthy("entry_scorer"), prompt(4, 230))
    says(failed, path, "entry_scorer", "raises")
    assert failed.token_ids == []


@pytest.mark.parametrize("how", ["raises", "nan", "shape", "nothing"])
def test_a_tier_that_answers_wrong_fails_its_sequence(
    model: LoadedModel, path: Path, healthy: Healthy, how: str
) -> None:
    runtime = HardKVRuntime.from_config(configured(path, "tier", "attend", how), loaded=model)
    failed = one_fails(runtime, healthy("tier"), LONG)
    says(failed, path, "tier", how)
    # The first call of the 32nd step is the last that answers right.
    assert failed.token_ids == healthy("tier")[1].token_ids[:32]


def test_a_tier_that_takes_nothing_in_fails_its_sequence(model: LoadedModel, path: Path, healthy: Healthy) -> None:
    runtime = HardKVRuntime.from_config(configured(path, "tier", "admit", "raises"), loaded=model)
    failed = one_fails(runtime, healthy("tier"), LONG)
    says(failed, path, "tier", "raises")
    assert failed.token_ids == healthy("tier")[1].token_ids[:COMPRESSIONS]


@pytest.mark.parametrize("method", ["fresh", "allocate"])
def test_a_tier_that_cannot_begin_fails_its_sequence(
    model: LoadedModel, path: Path, healthy: Healthy, method: str
) -> None:
    runtime = HardKVRuntime.from_config(configured(path, "tier", method, "raises"), loaded=model)
    failed = one_fails(runtime, healthy("tier"), LONG)
    says(failed, path, "tier", "raises")
    assert failed.token_ids == []


def test_a_tier_that_cannot_end_leaks_nothing(model: LoadedModel, path: Path, healthy: Healthy) -> None:
    runtime = HardKVRuntime.from_config(configured(path, "tier", "reset", "raises"), loaded=model)
    first, long, second = runtime.generate([SHORT, LONG, OTHER])
    assert [first, second] == healthy("tier")[0]
    assert long.token_ids == healthy("tier")[1].token_ids
    assert runtime._cache.pool.manager.used_pages == 0
    assert runtime.generate([SHORT, OTHER]) == healthy("tier")[0]


def test_a_single_prompt_raises_the_same(model: LoadedModel, path: Path) -> None:
    runtime = HardKVRuntime.from_config(configured(path, "scorer", "score", "raises"), loaded=model)
    with pytest.raises(PluginError) as caught:
        runtime.generate(LONG)
    line = 1 + BROKEN.splitlines().index('            raise ZeroDivisionError("one over none")')
    assert str(caught.value) == (
        f"scorer 'broken_scorer' raised ZeroDivisionError: one over none; repair line {line} of {path}"
    )
    assert runtime._cache.pool.manager.used_pages == 0
