"""A preset is where a configuration starts from; whatever is said overrides it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardkv.config import CacheSettings, HardKVConfig, load_config
from hardkv.config.assigning import load_assigned
from hardkv.config.presets import PRESETS, with_preset
from hardkv.errors import ConfigError


def test_balanced_is_what_an_empty_file_means() -> None:
    assert HardKVConfig.model_validate({"preset": "balanced"}) == HardKVConfig()
    assert load_config({}).config.preset == "balanced"


def test_presets_trade_tokens_for_memory() -> None:
    kept = {name: HardKVConfig.model_validate({"preset": name}).budget.options["mean_tokens"] for name in PRESETS}
    assert kept["quality"] > kept["balanced"] > kept["fast"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_run(name: str) -> None:
    found = load_config({"preset": name})
    assert found.components.budget.target_tokens(10_000) == found.config.budget.options["mean_tokens"]


@given(name=st.sampled_from(sorted(PRESETS)), sinks=st.integers(0, 64), interval=st.none() | st.integers(1, 512))
def test_what_is_said_wins_and_the_rest_is_the_presets(name: str, sinks: int, interval: int | None) -> None:
    cache: dict[str, Any] = {"sinks": sinks, **({} if interval is None else {"interval": interval})}
    found, plain = (HardKVConfig.model_validate({"preset": name, **more}) for more in ({"cache": cache}, {}))
    assert found.cache == plain.cache.model_copy(update=cache)
    assert found.budget == plain.budget
    assert HardKVConfig.model_validate(found.model_dump()) == found


def test_another_component_has_none_of_the_presets_options() -> None:
    given = {"preset": "fast", "budget": {"name": "top_k", "mean_tokens": 7}}
    assert HardKVConfig.model_validate(given).budget.options == {"mean_tokens": 7}
    same = {"preset": "fast", "budget": {"name": "threshold", "floor_share": 0.5}}
    assert HardKVConfig.model_validate(same).budget.options == {"mean_tokens": 512, "floor_share": 0.5}


def test_sections_that_are_built_already_stay() -> None:
    config = HardKVConfig(preset="fast", cache=CacheSettings(sinks=1))
    assert (config.cache.sinks, config.cache.interval) == (1, CacheSettings().interval)


def test_assignments_start_from_the_preset() -> None:
    for order in ([("preset", "fast"), ("budget.floor_share", 0.1)], [("budget.floor_share", 0.1), ("preset", "fast")]):
        budget = load_assigned(None, order, "--set").config.budget
        assert budget.options == {"mean_tokens": 512, "floor_share": 0.1}


@pytest.mark.parametrize("wrong", ["fats", 3, None, ["fast"]])
def test_an_unknown_preset_names_the_known_ones(wrong: object) -> None:
    with pytest.raises(ConfigError, match="'quality', 'balanced' or 'fast'"):
        load_config({"preset": wrong, "cache": {"sinks": 2}})


def test_with_preset_leaves_its_argument_alone() -> None:
    values = {"preset": "fast", "cache": {"sinks": 2}}
    with_preset(values)
    assert values == {"preset": "fast", "cache": {"sinks": 2}}
