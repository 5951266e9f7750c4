"""Scorer `kvpress` against each press's own scores, and in a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hardkv import HardKVRuntime
from hardkv.errors import ConfigError, UnsupportedModelError
from hardkv.model_adapter import LoadedModel
from hardkv.model_adapter.attention import NAME, serving
from hardkv.policies.scorers.expected_attention import ExpectedAttention
from hardkv.policies.scorers.kvpress import KVPress
from hardkv.policies.scorers.kvpress_presses import PRESSES, REFUSED
from hardkv.policies.scorers.snapkv import SnapKV
from hardkv.testing.cases import ScoreCase
from hardkv.testing.contracts import scorer as contract
from hardkv.types import ModelGeometry, ScoreView
from tests.test_runtime import BASE, MEAN, prompt
from tests.tiny_models import loaded, tiny_model

kvpress: Any = pytest.importorskip("kvpress", reason="kvpress is not installed: make bridges")

TOKENS, WINDOW = 60, 12
OPTIONS: dict[str, dict[str, Any]] = {
    "LagKVPress": {"n_sink": 2, "lag_size": 8},
    "RandomPress": {"seed": 5},
    "SnapKVPress": {"window_size": WINDOW},
    "ExpectedAttentionPress": {"n_future_positions": 40},
    "CapPress": {"n_future_positions": 40},
    "ExpectedAttentionStatsPress": {"n_future_positions": 40},
}
UNTRAINED = [name for name, reads in PRESSES.items() if not reads.trained]
HEADS, GROUP, DIM, LAYER = 2, 2, 16, 1


class Layer:
    """One attention layer of a tiny model, its keys, values and queries of a prompt, and the press's view of them."""

    def __init__(self, seed: int = 0) -> None:
        model: Any = tiny_model("llama", seed=seed)
        rotary = model.model.rotary_emb
        self.module = model.model.layers[LAYER].self_attn
        self.module.rotary_emb = rotary
        self.hidden = torch.randn(1, TOKENS, 64)
        self.embeddings = rotary(self.hidden, torch.arange(TOKENS)[None])
        with torch.no_grad():
            shape = (1, TOKENS, -1, DIM)
            project = (self.module.q_proj, self.module.k_proj, self.module.v_proj)
            queries, keys, values = (layer(self.hidden).view(shape).transpose(1, 2) for layer in project)
            queries, keys = apply_rotary_pos_emb(queries, keys, *self.embeddings)
        positions = torch.arange(TOKENS)
        self.view = ScoreView(
            keys=keys,
            values=values,
            positions=positions.expand(1, HEADS, -1),
            valid=torch.ones(1, HEADS, TOKENS, dtype=torch.bool),
            scaling=DIM**-0.5,
            layers=(LAYER,),
            queries=queries.view(1, HEADS, GROUP, TOKENS, DIM),
            query_positions=positions[None],
            frequencies=rotary.inv_freq[None].float(),
        )

    def own(self, press: Any, keys: Tensor, values: Tensor) -> Tensor:
        """The press's own scores `[H, n]`, from the layer's hidden states and weights."""
        with torch.no_grad():
            arguments = {"position_embeddings": self.embeddings}
            found: Tensor = press.score(self.module, self.hidden, keys, values, None, arguments)
        return found[0]

    def own_of(self, press: Any, valid: Tensor) -> list[Tensor]:
        """The press's own scores of each head's slots, all heads standing for that one."""
        found = []
        for head in range(HEADS):
            parts = (part[:, head : head + 1, valid[head]] for part in (self.view.keys, self.view.values))
            found.append(self.own(press, *(part.expand(-1, HEADS, -1, -1) for part in parts))[head])
        return found


def bridge(name: str, **options: Any) -> KVPress:
    """The scorer; trained presses get numbers in place of what they would load."""
    scorer = KVPress(KVPress.Config(press=name, options={**OPTIONS.get(name, {}), **options}))
    generator = torch.Generator().manual_seed(3)
    if name == "QFilterPress":
        scorer._press.q_filters = torch.randn(4, HEADS, DIM, generator=generator)
    if name == "ExpectedAttentionStatsPress":
        scorer._press.mu = torch.randn(4, HEADS * GROUP, DIM, generator=generator)
        root = torch.randn(4, HEADS * GROUP, DIM, DIM, generator=generator)
        scorer._press.cov = root @ root.transpose(-1, -2) / DIM
    return scorer


def ragged(seed: int = 0) -> Tensor:
    """Slots that are valid, `[H, N]`: a different number in each head, the window's among them."""
    valid = torch.rand(HEADS, TOKENS, generator=torch.Generator().manual_seed(seed)) < torch.tensor([[0.5], [0.8]])
    valid[:, -WINDOW:] = True
    assert valid[0].sum() != valid[1].sum()
    return valid


def assert_same(name: str, found: Tensor, expected: Tensor) -> None:
    """Equal scores of one head; the slots that a press keeps anyway may lie above all by another number.

    Presses put them at one more than the best score of all heads, and here they were shown other heads.
    """
    kept = torch.zeros_like(found, dtype=torch.bool)
    if name == "SnapKVPress":
        kept[-WINDOW:] = True
    elif PRESSES[name].rotates:
        kept[:4] = True
    torch.testing.assert_close(found[~kept], expected[~kept], rtol=2e-4, atol=2e-5)
    assert bool((found[kept] > found[~kept].max()).all())


def test_every_press_of_the_library_is_listed_once() -> None:
    classes = {name: value for name, value in vars(kvpress).items() if isinstance(value, type)}
    presses = {name for name, value in classes.items() if issubclass(value, kvpress.BasePress)}
    assert presses == {*PRESSES, *REFUSED}
    assert not PRESSES.keys() & REFUSED.keys()
    assert all(issubclass(classes[name], kvpress.ScorerPress) for name in PRESSES)


@pytest.mark.parametrize("name", PRESSES)
def test_scores_are_the_presss_own(name: str) -> None:
    layer, scorer = Layer(), bridge(name)
    found = scorer.score(layer.view)
    assert found.shape == (1, HEADS, 1, TOKENS)
    assert found.dtype == torch.float32
    expected = layer.own(scorer._press, layer.view.keys, layer.view.values)
    torch.testing.assert_close(found[0, :, 0], expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", PRESSES)
def test_each_head_is_scored_on_the_slots_it_holds(name: str) -> None:
    layer, scorer, valid = Layer(seed=1), bridge(name), ragged()
    hole = ~valid[None, :, :, None]
    keys, values = (part.masked_fill(hole, float("nan")) for part in (layer.view.keys, layer.view.values))
    found = scorer.score(replace(layer.view, keys=keys, values=values, valid=valid[None]))[0, :, 0]
    assert not found[~valid].any()
    for head, expected in enumerate(layer.own_of(scorer._press, valid)):
        assert_same(name, found[head, valid[head]], expected)


@pytest.mark.parametrize("name", PRESSES)
def test_a_view_of_several_layers_scores_as_each_alone(name: str) -> None:
    layer, other, scorer = Layer(), Layer(seed=1), bridge(name)
    fields = ("keys", "values", "positions", "queries", "query_positions", "frequencies")
    both: dict[str, Any] = {field: torch.cat([getattr(one.view, field) for one in (layer, other)]) for field in fields}
    valid = torch.stack([ragged(), ragged(1)])
    found = scorer.score(replace(layer.view, **both, valid=valid, layers=(LAYER, 3)))
    for row, one in enumerate((layer, other)):
        alone = scorer.score(replace(one.view, valid=valid[row : row + 1], layers=((LAYER, 3)[row],)))
        assert torch.equal(found[row : row + 1], alone)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", UNTRAINED)
def test_the_contract_of_scorers_holds(name: str, seed: int) -> None:
    small = {"SnapKVPress": {"window_size": 2}, "LagKVPress": {"n_sink": 1, "lag_size": 2}}.get(name, {})
    scorer, case = bridge(name, **small), ScoreCase(seed=seed, slots=14, rows=6)
    contract.check_shape(scorer, case)
    contract.check_finite(scorer, case)
    contract.check_blind_to_invalid_slots(scorer, case)
    contract.check_layers_are_independent(scorer, case)
    contract.check_inputs_unchanged(scorer, case)
    contract.check_deterministic(scorer, case)
    if not PRESSES[name].every_head:
        contract.check_heads_permute(scorer, case)
    if PRESSES[name].attention:
        contract.check_causal(scorer, case)


def test_snapkv_averages_the_attention_of_the_newest_rows_whatever_of_them_is_resident() -> None:
    """With kernel 1 it is our `snapkv`; the window's own tokens lie above all, also where a head lacks some."""
    layer, valid = Layer(), ragged()
    valid[0, -5:-2] = False
    view = replace(layer.view, valid=valid[None])
    found = bridge("SnapKVPress", kernel_size=1).score(view)[0, :, 0]
    ours = SnapKV(SnapKV.Config(kernel=1, rows=WINDOW)).score(view)[0, :, 0]
    torch.testing.assert_close(found[:, :-WINDOW], ours[:, :-WINDOW])
    assert bool((found[:, -WINDOW:][valid[:, -WINDOW:]] > 1).all())


def test_a_window_is_as_long_as_the_rows_that_were_written() -> None:
    layer = Layer()
    positions = layer.view.query_positions
    assert positions is not None
    few = replace(layer.view, query_positions=positions.masked_fill(positions < TOKENS - 3, -1))
    assert torch.equal(bridge("SnapKVPress").score(few), bridge("SnapKVPress", window_size=3).score(layer.view))
    none = replace(layer.view, query_positions=torch.full_like(positions, -1))
    assert torch.equal(bridge("SnapKVPress").score(none), torch.ones(1, HEADS, 1, TOKENS))


@pytest.mark.parametrize("name", ["StreamingLLMPress", "ExpectedAttentionPress", "CapPress"])
def test_a_head_that_holds_only_sinks_keeps_equal_scores(name: str) -> None:
    layer, valid = Layer(), ragged()
    valid[0, 4:] = False
    valid[0, :4] = True
    found = bridge(name).score(replace(layer.view, valid=valid[None]))[0, :, 0]
    assert torch.equal(found[0], valid[0].float())
    expected = layer.own_of(bridge(name)._press, valid[1:].expand(2, -1))[1]
    assert_same(name, found[1, valid[1]], expected)


def test_positions_to_come_count_from_the_newest_token() -> None:
    """A later sequence with the same distances scores the same, and as our `expected_attention` without sinks."""
    layer, scorer = Layer(), bridge("ExpectedAttentionPress", n_sink=0)
    moved = shifted(layer, 40_000)
    found = scorer.score(moved)
    torch.testing.assert_close(found, scorer.score(layer.view), rtol=1e-3, atol=1e-5)
    ours = ExpectedAttention(ExpectedAttention.Config(horizon=40)).score(moved)
    torch.testing.assert_close(found, ours, rtol=1e-3, atol=1e-5)


def shifted(layer: Layer, offset: int) -> ScoreView:
    """The layer's view `offset` positions later."""
    view = layer.view
    assert view.frequencies is not None
    assert view.queries is not None
    assert view.query_positions is not None
    angles = (offset * view.frequencies[0].double()).repeat(2)
    half = DIM // 2

    def turn(vectors: Tensor) -> Tensor:
        swapped = torch.cat([-vectors[..., half:], vectors[..., :half]], -1)
        return (vectors * angles.cos() + swapped * angles.sin()).float()

    positions, rows = view.positions + offset, view.query_positions + offset
    return replace(view, keys=turn(view.keys), queries=turn(view.queries), positions=positions, query_positions=rows)


# Models


def geometry(**changes: Any) -> ModelGeometry:
    config = SimpleNamespace(
        name_or_path="Llama-tiny", num_hidden_layers=4, num_attention_heads=4, head_dim=DIM, hidden_size=64
    )
    found = ModelGeometry(
        windows=(None,) * 4,
        heads=HEADS,
        group=GROUP,
        head_dim=DIM,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        max_positions=512,
        modules=(SimpleNamespace(config=config),) * 4,  # type: ignore[arg-type]  # what a press reads of a module
        frequencies=(torch.ones(DIM // 2),) * 4,
    )
    return replace(found, **changes)


@pytest.mark.parametrize("frequencies", [(), (None,) * 4, (torch.ones(DIM // 4),) * 4])
def test_a_model_whose_queries_cannot_be_moved_is_refused(frequencies: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="CapPress needs rotary embeddings with known frequencies"):
        bridge("CapPress").check_model(geometry(frequencies=frequencies))
    bridge("SnapKVPress").check_model(geometry(frequencies=frequencies))


def test_trained_statistics_are_read_from_a_folder(tmp_path: Path) -> None:
    trained = kvpress.presses.expected_attention_with_stats.ExpectedAttentionStats
    stats = trained(4, HEADS * GROUP, DIM, "texts", "tiny", 1, 8, 4)
    torch.nn.init.normal_(stats.query_mean)
    stats.save_pretrained(tmp_path)
    scorer = bridge("ExpectedAttentionStatsPress", stats_folder=str(tmp_path))
    scorer._press.mu = scorer._press.cov = None
    scorer.check_model(geometry())
    assert torch.equal(scorer._press.mu, stats.query_mean)
    missing = bridge("ExpectedAttentionStatsPress", stats_folder=str(tmp_path / "none"))
    missing._press.mu = missing._press.cov = None
    with pytest.raises(ConfigError, match="ExpectedAttentionStatsPress could not load what was trained for this"):
        missing.check_model(geometry())


def test_filters_are_those_of_the_model_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str) -> Tensor:
        asked.append(name)
        return torch.ones(4, HEADS, DIM, dtype=torch.bfloat16)

    monkeypatch.setattr(kvpress.QFilterPress, "load_q_filters", staticmethod(load))
    scorer = KVPress(KVPress.Config(press="QFilterPress"))
    scorer.check_model(geometry())
    assert asked == ["Llama-tiny"]
    assert scorer._press.q_filters.dtype == torch.float32


# Runs


def generated(scorer: dict[str, Any], served: LoadedModel) -> list[list[int]]:
    # `auto` goes by measured times, and what it leaves in place may come back.
    fixed = {"regularizer": {"name": "rewrite"}}
    runtime = HardKVRuntime.from_config({**BASE, **fixed, "scorer": scorer}, loaded=served)
    rows = runtime.generate([prompt(1, 100), prompt(2, 61)], max_new_tokens=60, ignore_eos=True)
    for row in rows:
        assert row.stats.mean_tokens_after_compression == pytest.approx([MEAN] * 4, rel=0.02)
    return [row.token_ids for row in rows]


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_run_compresses_by_each_press(name: str) -> None:
    rows = generated({"name": "kvpress", "press": name, "options": OPTIONS.get(name, {})}, loaded("llama"))
    assert [len(row) for row in rows] == [60, 60]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "phi3", "smollm3"])
def test_presses_that_read_queries_serve_every_family(family: str) -> None:
    scorer = {"name": "kvpress", "press": "ExpectedAttentionPress", "options": {"n_sink": 2}}
    rows = generated(scorer, loaded(family))
    assert [len(row) for row in rows] == [60, 60]


def test_a_run_gives_the_tokens_of_our_scorer_of_the_same_formula() -> None:
    served = loaded("llama")
    assert generated({"name": "kvpress", "press": "KnormPress"}, served) == generated({"name": "key_norm"}, served)


@pytest.fixture
def wrapped() -> Iterator[None]:
    """The library's wrappers around every attention function, ours among them."""
    with serving(tiny_model("llama")):
        before = dict(ALL_ATTENTION_FUNCTIONS.items())
    kvpress.patch_attention_functions()
    assert ALL_ATTENTION_FUNCTIONS[NAME] is not before[NAME]
    yield
    for name, function in before.items():
        ALL_ATTENTION_FUNCTIONS[name] = function


def test_the_librarys_wrappers_change_no_token(request: pytest.FixtureRequest) -> None:
    """Nor do masked tokens that a press left on the modules of a model that is served next."""
    served = loaded("llama")
    layers: Any = served.model.get_submodule("model.layers")
    plain = generated({"name": "window_max"}, served)
    request.getfixturevalue("wrapped")
    for layer in layers:
        layer.self_attn.masked_key_indices = (torch.zeros(1, dtype=torch.int64),) * 3
    assert generated({"name": "window_max"}, served) == plain
    assert all(layer.self_attn.masked_key_indices is None for layer in layers)
