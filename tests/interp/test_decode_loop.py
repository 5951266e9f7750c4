"""The whole decode loop with the kernels in place of the plain forms, as a CUDA device would run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Any

import pytest

from benchmarks.gpu_check.parity import OPERATORS
from hardkv import HardKVRuntime
from tests.aot.cases import launches
from tests.test_decode_loop import as_on_cuda
from tests.test_runtime import BASE, CACHE, _Breaks, prompt
from tests.tiny_models import loaded

pytestmark = pytest.mark.interp

SMALL = {**CACHE, "interval": 5, "local_window": 4, "query_rows": 8}
METHODS: dict[str, dict[str, Any]] = {
    "threshold": {},
    "a plugin's own update": {"scorer": None},
    "top_p over a window": {
        "scorer": {"name": "window_max", "online": False},
        "budget": {"name": "top_p", "p": 0.8, "floor_tokens": 16},
    },
    "merge": {"condenser": {"name": "merge"}, "cache": {**SMALL, "condensed_slots": 8}},
}
KERNELS = {
    "threshold": ("score_update", "threshold_budget", "window_scores"),
    "a plugin's own update": ("threshold_budget",),
    "top_p over a window": ("topp_threshold",),
    "merge": ("score_update", "threshold_budget", "window_scores"),
}


@pytest.fixture
def launched() -> Iterator[Counter[str]]:
    """Let the dispatcher pick the kernels on this device too; counts the calls."""
    calls: Counter[str] = Counter()

    def counted(launch: Any) -> Any:
        @wraps(launch)
        def call(*arguments: Any) -> Any:
            calls[launch.__name__] += 1
            return launch(*arguments)

        return call

    with ExitStack() as stack:
        for operator, launch in launches().values():
            plain = operator._init_fn
            operator.register_kernel("cpu")(counted(launch))
            stack.callback(operator.register_kernel("cpu"), plain)
        yield calls


def generated(model: Any, method: dict[str, Any], padded: bool) -> list[Any]:
    settings = {key: value for key, value in method.items() if value is not None}
    config = {**BASE, "cache": SMALL, "regularizer": {"name": "rewrite"}, **settings}
    runtime = HardKVRuntime.from_config(config, loaded=model)
    if "scorer" in method and method["scorer"] is None:
        object.__setattr__(runtime._cache.parts, "scorer", _Breaks("never"))
    if padded:
        as_on_cuda(runtime)
    prompts = [prompt(90, 60), prompt(91, 45)]
    return list(runtime.generate(prompts, max_new_tokens=12, ignore_eos=True))


def test_every_operator_with_a_kernel_is_found() -> None:
    assert set(launches()) == OPERATORS


@pytest.mark.parametrize("method", METHODS)
def test_the_loop_on_kernels_gives_the_same_tokens(method: str, request: pytest.FixtureRequest) -> None:
    model = loaded("llama", num_hidden_layers=2)
    plain = generated(model, METHODS[method], padded=False)
    launches: Counter[str] = request.getfixturevalue("launched")
    with_kernels = generated(model, METHODS[method], padded=True)
    for one, other in zip(plain, with_kernels, strict=True):
        assert one.stats.compressions == 3
        assert other.token_ids == one.token_ids
        assert other.stats == one.stats
    for name in ("open_slots", "append", "ragged_decode", "rewrite", *KERNELS[method]):
        assert launches[f"launch_{name}"], name
