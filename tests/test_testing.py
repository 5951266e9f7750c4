"""The rest of the conformance kit: what capture refuses, how a failure is reproduced, and the model with sinks."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from hardkv import HardKVRuntime
from hardkv.policies.scorers.key_norm import KeyNorm
from hardkv.policies.scorers.streaming import Streaming
from hardkv.testing import ScorerContract, assert_capture_safe, tiny_sink_model
from hardkv.testing import strategies as cases
from hardkv.testing.draws import REGIMES
from hardkv.types import ScoreView

EIGHT = torch.arange(8.0)
UNSAFE: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "item": (lambda x: x * float(x.sum()), "_local_scalar_dense", "keep the number on the device"),
    "branch": (lambda x: x if x.sum() > 0 else -x, "_local_scalar_dense", "keep the number on the device"),
    "equal": (lambda x: torch.equal(x, x), "equal", "keep the number on the device"),
    "nonzero": (lambda x: torch.nonzero(x), "nonzero", "keep the shape: `torch.where`"),
    "mask": (lambda x: x[x > 2], "index by a mask", "keep the shape: `torch.where`"),
    "masked write": (lambda x: x.clone().__setitem__(x > 2, 0.0), "index_put_ by a mask", "keep the shape"),
    "masked_select": (lambda x: x.masked_select(x > 2), "masked_select", "keep the shape"),
    "unique": (lambda x: torch.unique(x), "_unique2", "keep the shape"),
    "literal": (lambda x: x + torch.tensor([1.0] * 8), "lift_fresh", "make it on the device"),
    "to the host": (lambda x: x.cpu(), "_to_copy between devices", "stay on the input's device"),
    "from the host": (lambda x: torch.zeros_like(x).copy_(torch.ones(8)), "copy_ between devices", "stay on the input"),
    "made on the host": (
        lambda x: x + torch.arange(8),
        "raised FakeTensorDeviceMismatchError",
        "give `device=x.device`",
    ),
    "numpy": (lambda x: x.numpy(), "raised RuntimeError", "Its tensors hold no data"),
}


@pytest.mark.parametrize("name", list(UNSAFE))
def test_capture_names_the_operator_the_line_and_the_cure(name: str) -> None:
    function, operator, cure = UNSAFE[name]
    with pytest.raises(AssertionError) as caught:
        assert_capture_safe(function, EIGHT)
    message = str(caught.value)
    line = function.__code__.co_firstlineno
    assert message.startswith(f"not capture-safe: test_testing.py:{line} `")
    assert operator in message
    assert cure in message


def test_capture_lets_device_work_pass() -> None:
    def work(x: Tensor, index: Tensor) -> Tensor:
        places = torch.arange(x.shape[0], device=x.device)
        kept = torch.where(places < x.sum(), x, 0.0).masked_fill(x > 3, 1.0)
        return kept.to(torch.float64)[index].float().sort().values.cumsum(-1) + x.new_zeros(())

    assert_capture_safe(work, EIGHT, torch.arange(8))
    assert work(EIGHT, torch.arange(8)).shape == (8,)


def test_capture_of_what_makes_a_generator() -> None:
    def draw(x: Tensor) -> Tensor:
        return x + torch.rand(8, generator=torch.Generator(x.device).manual_seed(1), device=x.device)

    assert_capture_safe(draw, EIGHT, elsewhere=False)
    with pytest.raises(AssertionError, match="META device type not an accelerator"):
        assert_capture_safe(draw, EIGHT)


@pytest.mark.parametrize(
    "draw",
    [
        cases.score_views,
        cases.score_rows,
        cases.claims,
        cases.selections,
        cases.entering_tokens,
        cases.token_batches,
    ],
)
def test_the_repr_of_a_case_rebuilds_it(draw: Callable[[], Any]) -> None:
    import hardkv.testing.cases as names

    @given(case=draw())
    def check(case: Any) -> None:
        assert eval(repr(case), vars(names)) == case

    check()


@given(case=cases.score_views())
def test_views_are_what_a_runtime_gives(case: Any) -> None:
    """Position order with gaps, a token in every head, NaN wherever nothing may look, positions of rows that exist."""
    view = case.view()
    assert case.regime in REGIMES
    assert bool(view.valid.any(-1).all())
    for positions, valid in zip(view.positions.flatten(0, 1), view.valid.flatten(0, 1), strict=True):
        held = positions[valid].tolist()
        assert held == sorted(set(held))
    for tensor in (view.keys, view.values):
        assert bool(tensor[view.valid].isfinite().all())
        assert bool(tensor[~view.valid].isnan().all())
    assert bool((view.statistic[view.valid] >= 0).all())
    assert bool(view.row_valid.any(-1).all())
    rows = view.queries.permute(0, 3, 1, 2, 4)
    assert bool(rows[view.row_valid].isfinite().all())
    assert bool(rows[~view.row_valid].isnan().all())
    assert len(view.output_weights) == len(view.keys)


class LoudKeyNorm(KeyNorm):
    """Tells heads apart by their number."""

    def score(self, view: ScoreView) -> Tensor:
        return super().score(view) * torch.arange(1.0, 1.0 + view.valid.shape[1])[:, None, None]


class Between(ScorerContract):
    """Named so that pytest leaves it alone; it fails on purpose."""

    component = LoudKeyNorm()


Between.__test__ = False


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before Python 3.11")
@pytest.mark.parametrize("test", ["test_heads_permute", "test_capture_safe"])
def test_a_failure_prints_lines_that_reproduce_it(test: str, tmp_path: Path) -> None:
    """Of a check that takes the component alone, and of one that reads its contract."""
    with pytest.raises(AssertionError) as caught:
        getattr(Between(), test)()
    printed = re.search(r"To reproduce this, run:\n\n(.*?\n\))\n", notes_of(caught.value), re.DOTALL)
    assert printed is not None
    script = printed[1]
    assert "LoudKeyNorm(LoudKeyNorm.Config())" in script
    assert "ScoreCase(seed=" in script
    (tmp_path / "again.py").write_text(script)
    with pytest.raises(AssertionError) as again:
        runpy.run_path(str(tmp_path / "again.py"))
    assert str(again.value) == str(caught.value)


def test_a_component_that_no_module_holds_is_said_to_be_so() -> None:
    class Local(Streaming):
        def score(self, view: ScoreView) -> Tensor:
            return super().score(view) / 0.0

    mine = type("Mine", (ScorerContract,), {"component": Local(), "max_examples": 5})
    with pytest.raises(AssertionError) as caught:
        mine().test_finite()
    if sys.version_info >= (3, 11):  # before, exceptions have no notes
        assert "Mine cannot be imported: move it to the top of its module" in notes_of(caught.value)


def phrases(seed: int, count: int) -> list[int]:
    """Tokens of new phrases, each of 12 tokens that come nowhere else, and each said twice."""
    rng, ids = torch.Generator().manual_seed(seed), [256]
    for index in range(count):
        phrase = (index * 12 + torch.randperm(12, generator=rng)).tolist()
        ids += phrase * 2
    return ids


def test_the_tiny_model_is_the_same_every_time() -> None:
    first, second, other = tiny_sink_model(3), tiny_sink_model(3), tiny_sink_model(4)
    for (name, one), two in zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    assert not torch.equal(first.model.state_dict()["lm_head.weight"], other.model.state_dict()["lm_head.weight"])
    assert first.tokenizer("hé")["input_ids"][0] == 256
    assert first.tokenizer.decode(first.tokenizer("hé")["input_ids"], skip_special_tokens=True) == "hé"


@pytest.mark.parametrize("seed", [0, 1])
def test_the_tiny_model_attends_its_first_token_and_copies(seed: int) -> None:
    loaded, ids = tiny_sink_model(seed), torch.tensor([phrases(5, 20)])
    with torch.inference_mode():
        model: Any = loaded.model
        out = model(ids, output_attentions=True)
    mass = torch.stack(out.attentions)[:, 0, :, 16:, 0]  # [L, heads, N]
    assert float(mass.mean()) > 0.3
    assert bool((mass.mean((1, 2)) > 0.3).all())
    loss = -torch.log_softmax(out.logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
    again = torch.arange(len(loss)) % 24 >= 13  # the second time a phrase is said, but for its first token
    assert float(loss[again].mean()) < 1.0
    assert float(loss[~again].mean()) > 4.0


def test_dropping_the_sinks_of_the_tiny_model_shows() -> None:
    loaded, ids = tiny_sink_model(), phrases(1, 20)

    def log_probabilities(**settings: Any) -> Tensor:
        cache = {"sinks": 4, "local_window": 32, "interval": 16, **settings.pop("cache", {})}
        config = {"scorer": {"name": "streaming"}, "budget": {"name": "top_k", "mean_tokens": 64}, "cache": cache}
        runtime = HardKVRuntime.from_config({**config, **settings}, loaded=loaded)
        return runtime.teacher_force([ids[:200]], [ids[200:300]])[0][1:]

    full = log_probabilities(compression=False)
    kept, dropped = (
        float((full.exp() * (full - log_probabilities(cache={"sinks": sinks}))).sum(-1).mean()) for sinks in (4, 0)
    )
    assert dropped > 3 * kept
    assert dropped > 0.5
