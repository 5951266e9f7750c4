"""What a method is told of the model: rotary frequencies, output projections, hidden states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hardkv import HardKVRuntime, ImportanceScorer, OnlineScorer, PluginError, ScoreView
from hardkv.config import load_config
from hardkv.model_adapter import read_geometry
from hardkv.policies.scorers.rotation import rotate_by
from tests.tiny_models import FAMILIES, loaded, tiny_model

CONFIG: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "cache": {"interval": 8, "local_window": 8, "query_rows": 16, "page_slots": 8},
    "budget": {"name": "top_k", "mean_tokens": 24},
}


@pytest.mark.families
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_frequencies_turn_a_query_as_the_model_does(family: str, dtype: torch.dtype) -> None:
    """Seen in the first layer, where a token's hidden state does not depend on its position."""
    model: Any = tiny_model(family).to(dtype)  # type: ignore[arg-type]  # its decorator hides the annotation
    geometry = read_geometry(model)
    assert all(turn is not None for turn in geometry.frequencies)
    assert geometry.hidden_size == 64
    turn = geometry.frequencies[0]
    assert turn is not None
    queries = []
    for position in (3, 40):
        calls: list[Any] = []

        class Watch:
            def attend(self, call: Any, sliding_window: int | None, calls: list[Any] = calls) -> Tensor:
                calls.append(call)
                return torch.zeros_like(call.query).transpose(1, 2)

        from hardkv.model_adapter.attention import SERVER_ARGUMENT, serving

        with serving(model), torch.no_grad():
            model(
                input_ids=torch.tensor([[65]]),
                position_ids=torch.tensor([[position]]),
                use_cache=False,
                **{SERVER_ARGUMENT: Watch()},
            )
        queries.append(calls[0].query[0, :, 0].float())
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    size = float(queries[0].norm())
    assert float((rotate_by(queries[0], torch.tensor(37), turn) - queries[1]).norm()) < tolerance * size
    assert float((queries[0] - queries[1]).norm()) > 0.2 * size


def test_a_layer_without_rotation_has_frequency_zero() -> None:
    geometry = read_geometry(tiny_model("smollm3"))
    last = geometry.frequencies[-1]
    assert last is not None
    assert last.tolist() == [0.0] * 8
    first = geometry.frequencies[0]
    assert first is not None
    assert float(first[0]) == 1.0


def test_a_rotation_that_no_buffer_explains_is_not_known() -> None:
    model = tiny_model("llama")
    attention: Any = model.get_decoder().layers[1].self_attn
    projection = attention.q_proj
    position_noise = torch.linspace(-1.0, 1.0, 64)
    # the query then depends on the place in the sequence in a way that is no rotation
    projection.register_forward_hook(
        lambda module, inputs, out: out + position_noise * torch.arange(out.shape[1])[:, None]
    )
    frequencies = read_geometry(model).frequencies
    assert frequencies[1] is None
    assert frequencies[0] is not None


def test_output_weights_are_those_of_the_projection() -> None:
    model = tiny_model("llama")
    geometry = read_geometry(model)
    for layer, weight in enumerate(geometry.output_weights):
        attention: Any = model.get_decoder().layers[layer].self_attn
        assert weight is not None
        assert torch.equal(weight, attention.o_proj.weight)
        assert geometry.modules[layer] is attention


class Peek(ImportanceScorer):
    """Keeps what it was shown."""

    name: ClassVar[str] = "peek"
    seen: ClassVar[list[ScoreView]] = []

    @property
    def needs_hidden_states(self) -> bool:
        return True

    @property
    def needs_queries(self) -> bool:
        return True

    def score(self, view: ScoreView) -> Tensor:
        self.seen.append(view)
        return view.positions.float()[:, :, None]


@pytest.mark.parametrize("chunk", [16, 2048])
def test_hidden_states_are_the_inputs_of_the_attention_layer(chunk: int) -> None:
    """Queries made from them by hand, turned by the frequencies, are the queries that the view holds."""
    model = loaded("llama")
    ready = load_config({**CONFIG, "cache": {**CONFIG["cache"], "prefill_chunk_tokens": chunk}})
    Peek.seen.clear()
    runtime = HardKVRuntime(ready.config, replace(ready.components, scorer=Peek()), model)
    before = [len(module._forward_pre_hooks) for module in runtime.geometry.modules]
    runtime.generate([list(range(40, 90)), list(range(30))], max_new_tokens=12, ignore_eos=True)
    assert [len(module._forward_pre_hooks) for module in runtime.geometry.modules] == before
    assert len(Peek.seen) >= 8
    for view in Peek.seen:
        assert view.hidden_states is not None
        assert view.query_positions is not None
        assert view.queries is not None
        assert view.frequencies is not None
        assert len(view.modules) == len(view.layers)
        for layer, module in enumerate(view.modules):
            with torch.no_grad():
                projected: Tensor = module.q_proj(view.hidden_states[layer])  # type: ignore[operator]  # a linear layer
            still = projected.view(-1, 2, 2, 16)  # [W, H, G, D]
            for row in range(still.shape[0]):
                position = int(view.query_positions[layer, row])
                if position >= 0:
                    turned = rotate_by(still[row], torch.tensor(position), view.frequencies[layer])
                    torch.testing.assert_close(turned, view.queries[layer, :, :, row], rtol=1e-4, atol=1e-4)
    lengths = {view.keys.shape[2] for view in Peek.seen}
    assert len(lengths) > 1  # prompt and later passes


class Reader(OnlineScorer):
    """Keeps what it was given of prompts."""

    name: ClassVar[str] = "reader"
    prompts: ClassVar[list[ScoreView]] = []

    @property
    def prompt_rows(self) -> int:
        return 24

    def read_prompt(self, view: ScoreView) -> Tensor:
        self.prompts.append(view)
        return view.positions.float()

    def update(self, statistic: Tensor, probabilities: Tensor) -> None:
        statistic.add_(probabilities.sum(-2))

    def finish(self, statistic: Tensor, view: ScoreView) -> Tensor:
        return statistic.masked_fill(~view.valid, 0.0)[:, :, None]


def test_a_prompt_is_read_by_as_many_queries_as_the_scorer_asks_for_whatever_the_chunks() -> None:
    model = loaded("llama")
    read = []
    for chunk in (16, 17, 2048):
        ready = load_config({**CONFIG, "cache": {**CONFIG["cache"], "prefill_chunk_tokens": chunk}})
        Reader.prompts.clear()
        runtime = HardKVRuntime(ready.config, replace(ready.components, scorer=Reader()), model)
        runtime.generate([list(range(40, 90)), list(range(20))], max_new_tokens=3, ignore_eos=True)
        read.append(list(Reader.prompts))
    for views in read:
        assert len(views) == len(read[0]) > 0
        for view, whole in zip(views, read[-1], strict=True):
            tokens = view.keys.shape[2]
            assert view.query_positions is not None
            assert view.query_positions[0].tolist() == list(range(max(tokens - 24, 0), tokens))
            torch.testing.assert_close(view.queries, whole.queries, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("prompt_rows", 0, "scorer 'reader' .*gave 0 as prompt_rows; expected 1 or more, or None"),
        ("prompt_rows", 1 / 2, "scorer 'reader' .*gave 0.5 as prompt_rows"),
        ("prompt_rows", ZeroDivisionError("one over none"), "scorer 'reader' raised ZeroDivisionError: one over none"),
        ("fused", ZeroDivisionError("one over none"), "scorer 'reader' raised ZeroDivisionError: one over none"),
        ("read_prompt", torch.zeros(1), "scorer 'reader' .*a prompt's statistic"),
        ("read_prompt", ZeroDivisionError("one over none"), "scorer 'reader' raised ZeroDivisionError"),
    ],
)
def test_a_scorer_that_fails_at_a_prompt_is_named(
    method: str, answer: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(self: Reader, *view: ScoreView) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    ready = load_config(CONFIG)
    runtime = HardKVRuntime(ready.config, replace(ready.components, scorer=Reader()), loaded("llama"))
    with monkeypatch.context() as patched:
        if method == "fused":
            patched.setattr(Reader, "read_prompt", lambda self, view: None)
        patched.setattr(Reader, method, given if method == "read_prompt" else property(given))
        with pytest.raises(PluginError, match=message):
            runtime.generate(list(range(50)), max_new_tokens=2, ignore_eos=True)
    assert len(runtime.generate(list(range(50)), max_new_tokens=2, ignore_eos=True).token_ids) == 2


def test_hidden_states_are_counted_in_the_reserved_bytes() -> None:
    model = loaded("llama")
    ready = load_config(CONFIG)
    sizes = []
    for scorer in (Peek(), ready.components.scorer):
        runtime = HardKVRuntime(ready.config, replace(ready.components, scorer=scorer), model)
        runtime.generate(list(range(50)), max_new_tokens=2, ignore_eos=True)
        sizes.append(runtime._cache.ring.allocated_bytes if runtime._cache.ring is not None else 0)
    assert sizes[0] - sizes[1] >= 4 * 2 * 16 * 64 * 4  # layers, lanes and nobody, rows, hidden size, float32
