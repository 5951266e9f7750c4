"""Scores given once, when a token enters, stay with the token wherever it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hardkv import ConfigError, EnteringTokens, EntryScorer, HardKVRuntime, ScoreView
from hardkv.config import load_config
from hardkv.model_adapter import read_geometry
from hardkv.policies.scorers.kvzap import KVzap
from tests.test_decode_loop import as_on_cuda
from tests.tiny_models import loaded, tiny_model

CONFIG: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "cache": {"interval": 8, "local_window": 8, "query_rows": 16, "page_slots": 8, "prefill_chunk_tokens": 16},
    "budget": {"name": "top_k", "mean_tokens": 24},
}


def wanted(positions: Tensor, layer: int) -> Tensor:
    """A number for a position in each of two heads, unlike that of its neighbours, `[..., 2, N]` of `[..., 2, N]`."""
    head = torch.arange(2)[:, None]
    return ((positions * 7919 + layer * 31 + head * 17) % 101).float() / 101.0


class Stamp(EntryScorer):
    """Scores a token by a number made of its position, layer and head, and checks what it finds later."""

    name: ClassVar[str] = "stamp"
    entered: ClassVar[list[tuple[int, int]]] = []
    looked: ClassVar[list[int]] = []

    def enter(self, tokens: EnteringTokens) -> Tensor:
        rows, heads, count, _ = tokens.keys.shape
        self.entered.append((rows, count))
        assert tokens.queries.shape == (rows, heads, 2, count, 16)
        return wanted(tokens.positions[:, None].expand(rows, heads, count), tokens.layer)

    def score(self, view: ScoreView) -> Tensor:
        assert view.statistic is not None
        for row, layer in enumerate(view.layers):
            found = torch.where(view.valid[row], view.statistic[row], 0.0)
            assert torch.equal(found, torch.where(view.valid[row], wanted(view.positions[row], layer), 0.0))
        self.looked.append(int(view.valid.sum()))
        return super().score(view)


@pytest.mark.parametrize("regularizer", ["auto", "rewrite", "sparse_load", "flatten_max"])
@pytest.mark.parametrize("adjust", [None, as_on_cuda], ids=["cpu", "as_on_cuda"])
def test_a_score_stays_with_its_token(regularizer: str, adjust: Callable[[HardKVRuntime], object] | None) -> None:
    model = loaded("llama")
    ready = load_config({**CONFIG, "regularizer": {"name": regularizer}})
    Stamp.entered.clear()
    Stamp.looked.clear()
    runtime = HardKVRuntime(ready.config, replace(ready.components, scorer=Stamp()), model)
    if adjust is not None:
        adjust(runtime)
    prompts = [list(range(60)), list(range(100, 140)), list(range(20))]
    answers = runtime.generate(prompts, max_new_tokens=60, ignore_eos=True)
    assert [answer.finish_reason for answer in answers] == ["length"] * 3
    assert runtime.stats().compressions >= 3 * 5
    assert len(Stamp.looked) >= 3 * 5
    assert {count for _, count in Stamp.entered} == {60, 40, 20, 1}
    assert max(rows for rows, _ in Stamp.entered) >= 3


def test_the_best_by_entry_score_are_kept() -> None:
    model = loaded("llama")
    ready = load_config({**CONFIG, "cache": {**CONFIG["cache"], "sinks": 0, "local_window": 1, "interval": 64}})
    runtime = HardKVRuntime(ready.config, replace(ready.components, scorer=Stamp()), model)
    runtime.generate(list(range(100)), max_new_tokens=1, ignore_eos=True)
    kept: list[Tensor] = []

    class Look(Stamp):
        def score(self, view: ScoreView) -> Tensor:
            kept.append(view.positions.clone())
            return super().score(view)

    runtime = HardKVRuntime(ready.config, replace(ready.components, scorer=Look()), model)
    runtime.generate(list(range(100)), max_new_tokens=70, ignore_eos=True)
    second = kept[4:8]  # four layers a pass
    for layer, positions in enumerate(second):
        for head in range(2):
            first = wanted(torch.arange(100).expand(2, 100), layer)[head]
            first[99] = 2.0  # the local window
            best = sorted(range(100), key=lambda j: (-float(first[j]), -j))[:24]
            found = [int(j) for j in positions[0, head] if j < 100]
            assert found == sorted(best)


def test_a_broken_score_on_entry_ends_its_own_sequence_alone() -> None:
    class Broken(Stamp):
        name: ClassVar[str] = "broken_stamp"

        def enter(self, tokens: EnteringTokens) -> Tensor:
            if tokens.keys.shape[2] == 1 and bool((tokens.positions == 67).any()):
                raise RuntimeError("no score at 67")
            return super().enter(tokens)

    model = loaded("llama")
    ready = load_config(CONFIG)
    prompts = [list(range(60)), list(range(100, 140))]
    whole = HardKVRuntime(ready.config, replace(ready.components, scorer=Stamp()), model)
    alone = whole.generate(prompts, max_new_tokens=20, ignore_eos=True)
    runtime = HardKVRuntime(ready.config, replace(ready.components, scorer=Broken()), model)
    first, second = runtime.generate(prompts, max_new_tokens=20, ignore_eos=True)
    assert first.finish_reason == "error"
    assert first.token_ids == alone[0].token_ids[:8]
    assert second.token_ids == alone[1].token_ids
    assert runtime._cache.pool.manager.used_pages == 0


def test_hidden_states_are_seen_on_entry_beside_a_ring_of_queries_alone() -> None:
    """The calibrator asks for queries; nobody asks for hidden states later."""

    class Sees(Stamp):
        name: ClassVar[str] = "sees"
        seen: ClassVar[list[tuple[int, ...]]] = []

        @property
        def needs_hidden_states(self) -> bool:
            return True

        def enter(self, tokens: EnteringTokens) -> Tensor:
            assert tokens.hidden_states is not None
            self.seen.append(tuple(tokens.hidden_states.shape))
            return super().enter(tokens)

    ready = load_config({**CONFIG, "budget": {"name": "threshold", "mean_tokens": 24}})
    runtime = HardKVRuntime(ready.config, replace(ready.components, scorer=Sees()), loaded())
    answer = runtime.generate(list(range(60)), max_new_tokens=30, ignore_eos=True)
    assert answer.finish_reason == "length"
    assert runtime._cache.ring is not None
    assert runtime._cache.ring.hidden.numel() == 0
    assert set(Sees.seen) == {(1, 60, 64), (1, 1, 64)}


def networks(folder: Path, layers: int = 4, hidden: int | None = None) -> Path:
    """A file with a network for each layer: linear, or with `hidden` numbers between."""
    torch.manual_seed(3)
    tensors = {}
    for layer in range(layers):
        if hidden is None:
            tensors[f"layers.{layer}.weight"] = torch.randn(2, 64)
            tensors[f"layers.{layer}.bias"] = torch.randn(2)
        else:
            tensors[f"layers.{layer}.0.weight"] = torch.randn(hidden, 64)
            tensors[f"layers.{layer}.0.bias"] = torch.randn(hidden)
            tensors[f"layers.{layer}.2.weight"] = torch.randn(2, hidden)
            tensors[f"layers.{layer}.2.bias"] = torch.randn(2)
    file = folder / "model.safetensors"
    save_file(tensors, file)
    return file


@pytest.mark.parametrize("hidden", [None, 5])
def test_kvzap_is_its_network(tmp_path: Path, hidden: int | None) -> None:
    file = networks(tmp_path, hidden=hidden)
    scorer = KVzap(KVzap.Config(weights=str(tmp_path)))
    scorer.check_model(read_geometry(tiny_model("llama")))
    torch.manual_seed(0)
    states = torch.randn(2, 6, 64) * 0.1
    blank = torch.zeros(2, 2, 6, 16)
    tokens = EnteringTokens(1, blank, blank, blank[:, :, None], torch.zeros(2, 6, dtype=torch.int64), states)
    scores = scorer.enter(tokens)
    from safetensors.torch import load_file

    tensors = {name: tensor.double() for name, tensor in load_file(file).items()}
    for row in range(2):
        for token in range(6):
            content = states[row, token].double()
            if hidden is None:
                content = tensors["layers.1.weight"] @ content + tensors["layers.1.bias"]
            else:
                content = tensors["layers.1.0.weight"] @ content + tensors["layers.1.0.bias"]
                content = content * 0.5 * (1.0 + torch.erf(content / 2.0**0.5))
                content = tensors["layers.1.2.weight"] @ content + tensors["layers.1.2.bias"]
            torch.testing.assert_close(scores[row, :, token].double(), content.exp(), rtol=1e-4, atol=1e-6)


def test_kvzap_serves_a_generation(tmp_path: Path) -> None:
    config = {**CONFIG, "scorer": {"name": "kvzap", "weights": str(networks(tmp_path))}}
    runtime = HardKVRuntime.from_config({**config, "budget": {"name": "threshold", "mean_tokens": 24}}, loaded=loaded())
    answer = runtime.generate(list(range(60)), max_new_tokens=40, ignore_eos=True)
    assert answer.finish_reason == "length"
    assert answer.stats.mean_tokens_after_compression == [24.0] * len(answer.stats.mean_tokens_after_compression)
    assert len({count for layer in answer.stats.tokens_kept for count in layer}) > 1


def test_kvzap_refuses_weights_of_another_model(tmp_path: Path) -> None:
    file = networks(tmp_path, layers=3)
    config = {**CONFIG, "scorer": {"name": "kvzap", "weights": str(file)}}
    with pytest.raises(ConfigError, match=r"has no layers\.3\.weight; the model has 4 layers"):
        HardKVRuntime.from_config(config, loaded=loaded())
    save_file({f"layers.{layer}.weight": torch.zeros(3, 32) for layer in range(4)}, file)
    with pytest.raises(ConfigError, match="maps 32 numbers to 3; the model has hidden size 64 and 2 KV heads"):
        HardKVRuntime.from_config(config, loaded=loaded())
    save_file({"head.weight": torch.zeros(3, 32)}, file)
    with pytest.raises(ConfigError, match=r"holds 'head\.weight' of shape \(3, 32\); expected layers"):
        HardKVRuntime.from_config(config, loaded=loaded())
    with pytest.raises(ConfigError, match=r"cannot read .*none\.safetensors"):
        load_config({**CONFIG, "scorer": {"name": "kvzap", "weights": str(tmp_path / "none.safetensors")}})
