"""Configuration: what is valid survives a round trip; what is not is refused with path, value and cure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from hardkv.config import HardKVConfig, config_schema, default_yaml, limits_at, load_config
from hardkv.errors import ConfigError, HardKVError, PluginError

ISSUE = """\
# run.yaml
model: {id: smollm2, dtype: bfloat16, device: cpu}
plugins: []
cache: {sinks: 4, local_window: 32, query_rows: 128, interval: 128, lower: null, upper: null, page_slots: 32, condensed_slots: 0, pool_bytes: null}
scorer: {name: attention_power}
calibrator: {name: exact}
budget: {name: threshold, mean_tokens: 1024, floor_share: 0.2}
regularizer: {name: auto, mode: per_head}
condenser: {name: evict}
generation: {max_new_tokens: 256, temperature: 0.0}
compression: true
seed: 0
"""  # noqa: E501  # as it stands in the issue

SECTIONS = {"model": "model", "cache": "cache", "generation": "generation"}


def refused(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return str(caught.value)


def known_keys() -> Iterator[tuple[str, str]]:
    """Every (section, key) of the configuration; the top level is the section ''."""
    for key, field in HardKVConfig.model_fields.items():
        yield "", key
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) and key in SECTIONS:
            for inner in field.annotation.model_fields:
                yield key, inner


def integer_bounds() -> dict[str, tuple[int, int | None]]:
    """Path of every whole number in the configuration, with the bounds that its schema states."""
    schema = config_schema()
    found: dict[str, tuple[int, int | None]] = {}

    def visit(path: str, node: Mapping[str, Any]) -> None:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
        for key, inner in node.get("properties", {}).items():
            visit(f"{path}.{key}".lstrip("."), inner)
        for choice in [node, *node.get("anyOf", [])]:
            if choice.get("type") == "integer":
                low = choice.get("minimum", choice.get("exclusiveMinimum", -1) + 1)
                found[path] = (low, choice.get("maximum", choice.get("exclusiveMaximum")))

    visit("", schema)
    return found


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


class TestValid:
    def test_the_yaml_of_the_issue_is_the_default(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_text(ISSUE)
        assert load_config(path).config == HardKVConfig()
        assert load_config(str(path)).config == HardKVConfig()

    def test_file_mapping_and_config_agree(self, tmp_path: Path) -> None:
        values = {"budget": {"name": "top_k", "mean_tokens": 192}, "cache": {"pool_bytes": "2GiB"}}
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(values))
        one = load_config(values).config
        assert one == load_config(path).config == load_config(HardKVConfig.model_validate(values)).config
        assert one.cache.pool_bytes == 2 * 1024**3

    def test_components_are_what_was_named(self) -> None:
        parts = load_config(
            {"scorer": {"name": "snapkv", "kernel": 5}, "budget": {"name": "top_p", "p": 0.8}}
        ).components
        assert (parts.scorer.name, parts.scorer.config.model_dump()["kernel"]) == ("snapkv", 5)
        assert (parts.budget.name, parts.budget.config.model_dump()["p"]) == ("top_p", 0.8)
        assert parts.needs_queries
        assert parts.calibrates

    def test_the_default_needs_neither_queries_nor_calibration(self) -> None:
        parts = load_config({}).components
        assert not parts.needs_queries
        assert not parts.calibrates

    def test_every_load_builds_fresh_components(self) -> None:
        assert load_config({}).components.scorer is not load_config({}).components.scorer

    @pytest.mark.parametrize(
        ("text", "expected"),
        [("512", 512), ("1KB", 1000), ("1 KiB", 1024), ("1.5GiB", 3 * 2**29), ("2gb", 2 * 10**9), ("7 B", 7)],
    )
    def test_bytes_with_units(self, text: str, expected: int) -> None:
        assert load_config({"cache": {"pool_bytes": text}}).config.cache.pool_bytes == expected

    def test_exponents_are_numbers(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_text("generation: {temperature: 1e-2, min_p: 5E-1, top_p: 9.0e-1}\n")
        generation = load_config(path).config.generation
        assert (generation.temperature, generation.min_p, generation.top_p) == (0.01, 0.5, 0.9)

    def test_a_merge_key_may_be_overridden(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_text("generation: {<<: {top_k: 5}, top_k: 6}\n")
        assert load_config(path).config.generation.top_k == 6

    def test_a_config_is_frozen(self) -> None:
        with pytest.raises(ValidationError, match="frozen"):
            HardKVConfig().cache.sinks = 3

    @given(
        st.fixed_dictionaries(
            {},
            optional={
                "seed": st.integers(0, 2**63 - 1),
                "compression": st.booleans(),
                "model": st.fixed_dictionaries({"id": st.text(min_size=1, max_size=8)}),
                "cache": st.fixed_dictionaries(
                    {
                        "sinks": st.integers(0, 16),
                        "local_window": st.integers(1, 256),
                        "page_slots": st.sampled_from([8, 16, 32, 64, 128, 256]),
                        "pool_bytes": st.none() | st.integers(1, 2**50) | st.integers(1, 99).map(lambda n: f"{n}MiB"),
                    }
                ),
                "generation": st.fixed_dictionaries(
                    {
                        "temperature": st.floats(0.0, 100.0),
                        "min_p": st.floats(0.0, 1.0),
                        "stop": st.lists(st.text(min_size=1, max_size=8), max_size=3),
                        "stop_token_ids": st.lists(st.integers(0, 10**6), max_size=3),
                    }
                ),
                "budget": st.fixed_dictionaries(
                    {
                        "name": st.sampled_from(["threshold", "ada"]),
                        "mean_tokens": st.integers(300, 4096),
                        "floor_share": st.floats(0.0, 1.0),
                    }
                ),
            },
        )
    )
    def test_round_trip_through_yaml(self, values: dict[str, Any]) -> None:
        config = load_config(values).config
        again = yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))
        assert load_config(again).config == config


class TestUnknownKeys:
    @given(st.sampled_from(sorted(known_keys())), st.data())
    def test_a_typo_of_any_key_names_it(self, where: tuple[str, str], data: st.DataObject) -> None:
        section, key = where
        at = data.draw(st.integers(0, len(key) - 1))
        typo = data.draw(
            st.sampled_from(
                [key[:at] + key[at] + key[at:], key[:at] + "x" + key[at:]]
                + ([key[:at] + key[at + 1] + key[at] + key[at + 2 :]] if len(key) > 5 and at + 1 < len(key) else [])
            )
        )
        if typo in {known for _, known in known_keys()}:
            return
        message = refused({section: {typo: 1}} if section else {typo: 1})
        path = f"{section}.{typo}" if section else typo
        assert message.startswith(f"config: {path}: unknown key (got 1).")
        assert f" Did you mean '{key}'?" in message

    def test_message(self) -> None:
        assert refused({"model": {"dtyp": "float32"}}) == (
            "config: model.dtyp: unknown key (got 'float32'). Did you mean 'dtype'? Known: id, dtype, device,"
            " pack_weights, revision"
        )

    def test_a_key_in_the_wrong_place_names_the_right_one(self) -> None:
        assert "config: sinks: unknown key (got 4). 'sinks' belongs under 'cache'. Known: preset, model, " in refused(
            {"sinks": 4}
        )
        assert "cache.temperature: unknown key (got 1). 'temperature' belongs under 'generation'." in refused(
            {"cache": {"temperature": 1}}
        )

    def test_component_options(self) -> None:
        assert refused({"budget": {"name": "threshold", "mean_token": 99}}) == (
            "config: budget 'threshold': mean_token: unknown key (got 99). Did you mean 'mean_tokens'?"
            " Known: mean_tokens, mean_share, floor_share [budget.mean_token]"
        )
        assert refused({"condenser": {"name": "evict", "slots": 3}}) == (
            "config: condenser 'evict': slots: unknown key (got 3). It has no options [condenser.slots]"
        )

    def test_component_names(self) -> None:
        message = refused({"scorer": {"name": "snapvk"}, "budget": {"name": "topp", "p": 0.9}})
        assert message.startswith("config has 2 faults:\n  unknown scorer 'snapvk'. Did you mean 'snapkv'? Known: ")
        assert (
            "\n  unknown budget 'topp'. Did you mean 'top_p'? Known: threshold, top_p, top_k, ada, "
            "pyramid, static_heads, bytes [budget.name]" in message
        )


class TestValues:
    @given(st.sampled_from(sorted(integer_bounds().items())), st.integers(1, 2**70))
    def test_any_integer_out_of_range_names_its_path(
        self, where: tuple[str, tuple[int, int | None]], beyond: int
    ) -> None:
        path, (low, high) = where
        assert f"{path}: Input should be g" in refused(nested(path, low - beyond))
        if high is not None:
            message = refused(nested(path, high + beyond))
            assert f"{path}: Input should be less" in message
            assert "(got " in message

    def test_the_schema_bounds_every_integer_from_below(self) -> None:
        assert len(integer_bounds()) == 15

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"cache": {"sinks": "4"}}, "cache.sinks: Input should be a valid integer (got '4')"),
            ({"cache": {"sinks": True}}, "cache.sinks: Input should be a valid integer (got True)"),
            ({"cache": {"sinks": 4.0}}, "cache.sinks: Input should be a valid integer (got 4.0)"),
            ({"compression": "no"}, "compression: Input should be a valid boolean (got 'no')"),
            (
                {"model": {"dtype": "bf16"}},
                "model.dtype: Input should be 'float32', 'bfloat16' or 'float16' (got 'bf16')",
            ),
            (
                {"model": {"dtype": "bfloat61"}},
                "model.dtype: Input should be 'float32', 'bfloat16' or 'float16' (got 'bfloat61')."
                " Did you mean 'bfloat16'?",
            ),
            (
                {"model": {"device": "gpu"}},
                "model.device: Input should be a torch device such as cpu, cuda or cuda:0 (got 'gpu')",
            ),
            ({"generation": {"top_p": 0.0}}, "generation.top_p: Input should be greater than 0 (got 0.0)"),
            (
                {"generation": {"max_new_tokens": 0}},
                "generation.max_new_tokens: Input should be greater than or equal to 1",
            ),
            ({"generation": {"temperature": float("nan")}}, "generation.temperature: Input should be a finite number"),
            ({"generation": {"stop": "end"}}, "generation.stop: Input should be a list (got 'end')"),
            ({"generation": {"stop": ["a", 3]}}, "generation.stop[1]: Input should be a valid string (got 3)"),
            ({"cache": {"page_slots": 24}}, "cache.page_slots: Input should be a power of two from 8 to 256 (got 24)"),
            ({"cache": {"pool_bytes": "2 GiBs"}}, "cache.pool_bytes: expected bytes as a whole number or with a unit"),
            ({"cache": {"pool_bytes": 0}}, "cache.pool_bytes: Input should be greater than 0 (got 0)"),
            ({"cache": None}, "cache: expected a mapping with keys such as sinks, local_window, "),
            ({"scorer": "snapkv"}, "; write `scorer: {name: snapkv}`"),
            ({"scorer": {"kernel": 7}}, "scorer.name: missing; it has no default"),
            ({"scorer": {"name": 7}}, "scorer.name: Input should be a valid string (got 7)"),
            ({"scorer": {"name": "snapkv", "kernel": 6}}, "scorer 'snapkv': kernel: "),
            (
                {"budget": {"name": "threshold", "mean_tokens": -5}},
                "budget 'threshold': mean_tokens: Input should be greater than or equal to 1 (got -5)"
                " [budget.mean_tokens]",
            ),
            (
                {"regularizer": {"name": "auto", "mode": "per_heda"}},
                "regularizer 'auto': mode: Input should be 'per_head', 'per_layer' or 'union' (got 'per_heda')."
                " Did you mean 'per_head'? [regularizer.mode]",
            ),
        ],
    )
    def test_message(self, values: dict[str, Any], message: str) -> None:
        assert message in refused(values)
        assert message in refused({**values, "seed": 1})

    def test_every_fault_is_named_at_once(self) -> None:
        assert refused({"seed": -1, "cache": {"sinks": -1, "interval": 0}}).split("\n") == [
            "config has 3 faults:",
            "  cache.sinks: Input should be greater than or equal to 0 (got -1)",
            "  cache.interval: Input should be greater than or equal to 1 (got 0)",
            "  seed: Input should be greater than or equal to 0 (got -1)",
        ]

    def test_a_long_value_is_cut(self) -> None:
        assert refused({"cache": {"sinks": "x" * 500}}).endswith("xxx...)")
        assert len(refused({"cache": {"sinks": "x" * 500}})) < 150

    def test_an_unchecked_copy_is_checked(self) -> None:
        config = HardKVConfig()
        cache = config.cache.model_copy(update={"sinks": -3})
        assert "cache.sinks: Input should be" in refused(config.model_copy(update={"cache": cache}))

    def test_a_source_of_the_wrong_type(self) -> None:
        assert refused(7) == "expected the path of a YAML file, a mapping or a HardKVConfig (got a int)"


class TestContradictions:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (
                {"cache": {"local_window": 64, "lower": 64}},
                "cache.local_window (64) must be below cache.lower (64): ",
            ),
            ({"cache": {"lower": 900, "upper": 800}}, "cache.lower (900) must not be above cache.upper (800)"),
            (
                {"cache": {"upper": 36}},
                "cache.sinks + cache.local_window (4 + 32) must be below cache.upper (36): protected tokens alone",
            ),
            (
                {"cache": {"prefill_chunk_tokens": 100}},
                "cache.prefill_chunk_tokens (100) must not be below cache.query_rows (128): ",
            ),
            (
                {"budget": {"name": "threshold", "mean_tokens": 36}},
                "budget.mean_tokens (36) must be above cache.sinks + cache.local_window (4 + 32): ",
            ),
            (
                {"budget": {"name": "top_k", "mean_tokens": 900}, "cache": {"upper": 800}},
                "budget.mean_tokens (900) must not be above cache.upper (800), which no head exceeds",
            ),
            (
                {"budget": {"name": "top_p", "floor_tokens": 20, "cap_tokens": 30}},
                "budget.cap_tokens (30) must be above cache.sinks + cache.local_window (4 + 32): ",
            ),
            (
                {"budget": {"name": "top_p", "floor_tokens": 900}, "cache": {"upper": 800}},
                "budget.floor_tokens (900) must not be above cache.upper (800), which no head exceeds",
            ),
            (
                {"budget": {"name": "top_p", "floor_tokens": 300, "cap_tokens": 200}},
                "budget 'top_p': floor_tokens (300) must not exceed cap_tokens (200)",
            ),
            (
                {"budget": {"name": "ada", "mean_tokens": 100, "mean_share": 0.1}},
                "budget 'ada': give exactly one of mean_tokens (a count) and mean_share",
            ),
            (
                {"scorer": {"name": "snapkv"}, "cache": {"query_rows": 16}},
                "scorer.rows (32) must not be above cache.query_rows (16), the queries that are held",
            ),
            (
                {"condenser": {"name": "merge"}},
                "condenser 'merge' needs room: set cache.condensed_slots above 0 (got 0)",
            ),
            (
                {"cache": {"condensed_slots": 16}},
                "cache.condensed_slots (16) must be 0 with condenser 'evict', which keeps nothing;",
            ),
        ],
    )
    @pytest.mark.parametrize("compression", [True, False])
    def test_message(self, values: dict[str, Any], message: str, compression: bool) -> None:
        assert message in refused({**values, "compression": compression})

    @pytest.mark.parametrize(
        "values",
        [
            {"cache": {"local_window": 63, "lower": 64}},
            {"cache": {"lower": 800, "upper": 1024}},
            {"budget": {"name": "threshold", "mean_tokens": 37}},
            {"budget": {"name": "threshold", "mean_share": 0.01}, "cache": {"upper": 64}},
            {"scorer": {"name": "snapkv", "rows": 16}, "cache": {"query_rows": 16}},
            {"condenser": {"name": "merge"}, "cache": {"condensed_slots": 16}},
        ],
    )
    def test_the_edge_is_allowed(self, values: dict[str, Any]) -> None:
        assert load_config(values).config == HardKVConfig.model_validate(values)


class TestLimits:
    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ({}, (1024, 4096)),
            ({"cache": {"lower": 2000}}, (2000, 4096)),
            ({"cache": {"lower": 5000}}, (5000, 5000)),
            ({"cache": {"upper": 1500}}, (1024, 1500)),
            ({"budget": {"name": "threshold", "mean_share": 0.1}}, (200, 800)),
            ({"budget": {"name": "threshold", "mean_share": 0.1}, "cache": {"upper": 100}}, (100, 100)),
            ({"budget": {"name": "top_p"}}, (36, 2000)),
        ],
    )
    def test_what_is_null_comes_from_the_budget(self, values: dict[str, Any], expected: tuple[int, int]) -> None:
        loaded = load_config(values)
        limits = limits_at(loaded.config.cache, loaded.components.budget, seen_tokens=2000, total_layers=3)
        assert (limits.lower, limits.upper) == expected
        assert (limits.sinks, limits.local_window, limits.seen_tokens, limits.total_layers) == (4, 32, 2000, 3)


class TestFiles:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "run.yaml: is empty; `hardkv config init` writes a commented default"),
            ("# only a comment\n", "run.yaml: is empty; `hardkv config init` writes a commented default"),
            ("- 1\n- 2\n", "run.yaml: expected keys such as `model:` and `cache:` at the top (got a list)"),
            ("smollm2\n", "run.yaml: expected keys such as `model:` and `cache:` at the top (got a str)"),
            (
                "cache: {sinks: 4\n",
                "run.yaml: not valid YAML in line 2: while parsing a flow mapping, expected ',' or '}'",
            ),
            (
                "seed: !!python/name:os.system\n",
                "run.yaml: not valid YAML in line 1: could not determine a constructor",
            ),
            ("seed: 1\ncache: {}\nseed: 2\n", "run.yaml: duplicate key 'seed' in lines 1 and 3: remove one of them"),
            (
                "cache:\n  sinks: 1\n  sinks: 1\n",
                "run.yaml: duplicate key 'sinks' in lines 2 and 3: remove one of them",
            ),
            ("scorer: {name: snapkv, rows: 1, rows: 2}\n", "run.yaml: duplicate key 'rows' in lines 1 and 1"),
            ("3: 4\n", "run.yaml: 3: unknown key"),
            ("? [1]\n: 2\n", "run.yaml: not valid YAML in line 1: while constructing a mapping, found unhashable key"),
        ],
    )
    def test_message(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        assert f"{tmp_path}/{message}" in refused(path)

    def test_no_such_file(self, tmp_path: Path) -> None:
        (tmp_path / "run.yaml").touch()
        assert refused(tmp_path / "runn.yaml") == (
            f"{tmp_path / 'runn.yaml'}: no such file. Did you mean 'run.yaml'?"
            " `hardkv config init` writes a commented default"
        )
        assert f"The folder {tmp_path / 'no'} does not exist either." in refused(tmp_path / "no" / "run.yaml")

    def test_a_folder(self, tmp_path: Path) -> None:
        assert refused(tmp_path) == f"{tmp_path}: is a folder; give the YAML file in it"

    def test_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00\x80")
        assert "run.yaml: could not be read: " in refused(tmp_path / "run.yaml")

    def test_a_plugin_that_is_missing_is_a_plugin_error(self) -> None:
        with pytest.raises(PluginError, match=r"plugin 'no_such_plugin': no file no_such_plugin\.py in "):
            load_config({"plugins": ["no_such_plugin"]})

    @given(
        st.dictionaries(
            st.text(max_size=9),
            st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=4),
            min_size=1,
        )
    )
    def test_nonsense_is_always_a_hardkv_error(self, values: dict[str, Any]) -> None:
        if set(values) & set(HardKVConfig.model_fields):
            return
        with pytest.raises(HardKVError, match="unknown key"):
            load_config(values)


class TestForReaders:
    def test_the_default_yaml_is_the_default(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_text(default_yaml())
        assert load_config(path).config == HardKVConfig()

    def test_the_default_yaml_explains_every_key(self) -> None:
        lines = default_yaml().splitlines()
        assert max(map(len, lines)) <= 120
        for index, line in enumerate(lines):
            if ":" in line and not line.lstrip().startswith("#"):
                assert lines[index - 1].lstrip().startswith("#"), f"no comment above {line!r}"

    def test_the_default_yaml_shows_every_key_and_option(self) -> None:
        text = default_yaml()
        for section, key in known_keys():
            assert f"\n{'  ' if section else ''}{key}:" in text
        assert "  # One of: threshold, top_p, top_k, ada, pyramid, static_heads, bytes\n  name: threshold\n" in text
        assert "  # decay: 0.98\n" in text

    def test_every_option_that_is_shown_is_its_default(self) -> None:
        shown = default_yaml().replace("  # power:", "  power:").replace("  # decay:", "  decay:")
        built = load_config(yaml.safe_load(shown)).components.scorer
        assert built.config == load_config({}).components.scorer.config

    def test_the_schema_knows_names_and_options(self) -> None:
        schema = config_schema()
        names = [choice["$ref"].rsplit("/", 1)[1] for choice in schema["properties"]["budget"]["oneOf"]]
        assert names[:4] == ["budget_threshold", "budget_top_p", "budget_top_k", "budget_ada"]
        option = schema["$defs"]["budget_threshold"]["properties"]["floor_share"]
        assert (option["minimum"], option["maximum"], option["default"]) == (0.0, 1.0, 0.2)
        assert schema["$defs"]["budget_top_k"]["properties"]["name"] == {"const": "top_k"}
        assert schema["$defs"]["budget_top_k"]["required"] == ["name"]
        assert schema["additionalProperties"] is False
        assert {"type": "string"} in schema["$defs"]["CacheSettings"]["properties"]["pool_bytes"]["anyOf"]

    def test_every_reference_of_the_schema_resolves(self) -> None:
        schema = config_schema()

        def references(node: Any) -> Iterator[str]:
            if isinstance(node, dict):
                yield from ([node["$ref"]] if "$ref" in node else [])
                for inner in node.values():
                    yield from references(inner)
            elif isinstance(node, list):
                for inner in node:
                    yield from references(inner)

        assert {name.removeprefix("#/$defs/") for name in references(schema)} == set(schema["$defs"])

    def test_every_option_is_described(self) -> None:
        schema = config_schema()
        nodes = {"": schema, **schema["$defs"]}
        bare = [
            f"{title}.{key}"
            for title, node in nodes.items()
            for key, option in node.get("properties", {}).items()
            if "description" not in option and "const" not in option
        ]
        assert bare == []
