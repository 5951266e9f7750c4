"""One call, sequence or row never harms another; each of these was once possible."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hardkv import (
    EnteringTokens,
    EntryScorer,
    HardKVCache,
    HardKVError,
    HardKVRuntime,
    InputError,
    Layout,
    PluginError,
)
from hardkv.config import load_config
from hardkv.graph import Graphs
from hardkv.regularize.rewrite import Rewrite
from hardkv.tiers.evict import Evict
from tests.tiny_models import loaded, tiny_model

SMALL: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "cache": {"interval": 8, "local_window": 8, "query_rows": 16, "page_slots": 8},
    "budget": {"name": "top_k", "mean_tokens": 24},
}


def built(model: Any = None, config: dict[str, Any] = SMALL, **parts: Any) -> HardKVRuntime:
    ready = load_config(config)
    return HardKVRuntime(ready.config, replace(ready.components, **parts), model or loaded())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_folding_serves_lower_precision(dtype: torch.dtype) -> None:
    served = loaded()
    served.model.to(dtype)  # type: ignore[arg-type]  # its decorator hides the annotation
    runtime = built(served, {**SMALL, "condenser": {"name": "nearest_merge", "min_similarity": -1.0}})
    answers = runtime.generate([list(range(60)), list(range(40))], max_new_tokens=20, ignore_eos=True)
    assert [answer.finish_reason for answer in answers] == ["length", "length"]
    assert runtime.stats().compressions >= 4


def test_a_refused_call_leaves_the_share_of_a_running_one() -> None:
    config = {**SMALL, "budget": {"name": "bytes", "total": 330_000, "least_tokens": 24}}
    runtime = built(config=config)
    running = runtime.as_completed([list(range(200))] * 3, max_new_tokens=10, ignore_eos=True)
    first = next(running)
    share = runtime._cache.admission.share_tokens
    with pytest.raises(HardKVError, match="already generating"):
        runtime.generate([1] * 100)
    runtime.stream([1] * 50)  # made, never run
    assert runtime._cache.admission.share_tokens == share
    assert [first[1].finish_reason, *(answer.finish_reason for _, answer in running)] == ["length"] * 3


def test_a_call_between_two_results_is_refused() -> None:
    """With one lane nothing is open between two sequences, though more are to come."""
    runtime = built(config={**SMALL, "cache": {**SMALL["cache"], "max_sequences": 1}})
    running = runtime.as_completed([[1] * 8, [2] * 30], max_new_tokens=4, ignore_eos=True)
    next(running)
    with pytest.raises(HardKVError, match="already generating"):
        runtime.generate([3, 4], max_new_tokens=2)
    assert next(running)[1].finish_reason == "length"
    assert list(running) == []
    assert runtime.generate([3, 4], max_new_tokens=2, ignore_eos=True).finish_reason == "length"


def test_after_the_last_piece_of_a_stream_the_runtime_is_free() -> None:
    runtime = built()
    for piece in runtime.stream(list(range(20)), max_new_tokens=3, ignore_eos=True):
        if piece.finish_reason is not None:
            assert runtime.generate([3, 4], max_new_tokens=2, ignore_eos=True).finish_reason == "length"


class Recording(Graphs):
    """Takes graphs as a CUDA device would, but cannot replay one."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), pads=True)
        self.captures = True

    def capture(self, key: Hashable, body: Callable[[], Any]) -> None:
        body()

    def run(self, key: Hashable, body: Callable[[], Any]) -> Any:
        raise AssertionError("replayed a graph in which the plugin had failed unseen")


def test_a_plugin_that_fails_in_every_step_is_not_captured_away() -> None:
    class Squeezes(EntryScorer):
        name: ClassVar[str] = "squeezes"

        def enter(self, tokens: EnteringTokens) -> Tensor:
            scores: Tensor = tokens.keys.float().norm(dim=-1)
            squeezed: Tensor = scores.squeeze(-1) if scores.shape[-1] == 1 else scores
            return squeezed

    runtime = built(scorer=Squeezes())
    runtime._loop.graphs = Recording()
    (answer,) = runtime.generate([list(range(30))], max_new_tokens=5, ignore_eos=True)
    assert answer.finish_reason == "error"
    assert "scorer 'squeezes'" in str(answer.error)


def test_a_foreign_loop_can_reset_after_an_open_failed_halfway() -> None:
    made = []

    class Second(Evict):
        def fresh(self) -> Evict:
            made.append(1)
            if len(made) == 2:
                raise RuntimeError("no second tier")
            return Evict()

    model: Any = tiny_model("llama")
    cache = HardKVCache(model, SMALL, max_tokens=80)
    parts = cache._cache.parts
    assert parts is not None
    object.__setattr__(parts, "condenser", Second())
    ids = torch.randint(0, 250, (2, 20))
    with pytest.raises(PluginError, match="no second tier"):
        model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    cache.reset()
    out = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert out.shape == (2, 24)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("world", "expected token ids from 0 to 258"),
        ([[5, 6], [7]], "expected token ids from 0 to 258"),
        ([5, True], "expected token ids from 0 to 258"),
        ([5, -1], "expected token ids from 0 to 258"),
    ],
)
def test_given_is_token_ids_and_nothing_else(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        built().generate(list(range(20)), given=given, max_new_tokens=2)


def test_given_may_be_a_tensor() -> None:
    runtime = built()
    plain = runtime.generate(list(range(20)), given=[5, 6], max_new_tokens=3, ignore_eos=True)
    tensor = runtime.generate(list(range(20)), given=torch.tensor([5, 6]), max_new_tokens=3, ignore_eos=True)
    assert tensor.token_ids == plain.token_ids


def test_outputs_of_the_wrong_kind_end_their_sequence_alone() -> None:
    class Floats(Rewrite):
        def layout(self, selection: Any, cost: Any, limits: Any) -> Layout:
            found = super().layout(selection, cost, limits)
            return replace(found, keep=found.keep.float())

    long, short = list(range(60)), list(range(8))  # the short one is never selected from
    runtime = built(regularizer=Floats())
    broken, whole = runtime.generate([long, short], max_new_tokens=14, ignore_eos=True)
    assert broken.finish_reason == "error"
    assert "gave keep [L, H, N] as torch.float32; expected bool" in str(broken.error)
    assert whole.finish_reason == "length"

    class Nothing(Evict):
        def fresh(self) -> Any:
            return None

    (answer,) = built(condenser=Nothing()).generate([long], max_new_tokens=3)
    assert "gave None as a fresh tier; expected a CacheTier" in str(answer.error)


def test_output_weights_are_given_for_all_layers_or_none() -> None:
    geometry = built().geometry
    first, second = geometry.output_weights[:2]
    assert geometry.facts((0, 1))["output_weights"] == (first, second)
    partly = replace(geometry, output_weights=(None, *geometry.output_weights[1:]))
    assert partly.facts((0, 1))["output_weights"] == ()
    assert len(partly.facts((1, 2))["output_weights"]) == 2
