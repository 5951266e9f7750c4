"""The configuration for other readers: a JSON Schema for editors, a commented YAML for people."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from hardkv.config.settings import ComponentSpec, HardKVConfig
from hardkv.interfaces import Component
from hardkv.registry import SLOTS, Registry, load_registry

_COMMENT_WIDTH = 110


def config_schema(registry: Registry | None = None) -> dict[str, Any]:
    """Give the JSON Schema of the YAML file, with the options of all components in `registry`, else all installed."""
    registry = registry or load_registry()
    mode: JsonSchemaMode = "validation"
    entries = registry.all()
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(HardKVConfig, mode)]
    models += [(entry.component.Config, mode) for entry in entries]
    references, shared = models_json_schema(models, title="HardKVConfig")
    definitions: dict[str, Any] = shared["$defs"]

    def definition(model: type[BaseModel]) -> dict[str, Any]:
        found: dict[str, Any] = definitions[references[model, mode]["$ref"].rsplit("/", 1)[1]]
        return found

    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **definition(HardKVConfig)}
    for slot in SLOTS.values():
        choices = []
        for entry in (entry for entry in entries if entry.slot == slot):
            options = definition(entry.component.Config)
            title = f"{slot} {entry.name}"
            definitions[f"{slot}_{entry.name}"] = {
                **options,
                "title": title,
                "description": entry.summary,
                "properties": {"name": {"const": entry.name}, **options.get("properties", {})},
                "required": ["name", *options.get("required", [])],
            }
            choices.append({"$ref": f"#/$defs/{slot}_{entry.name}"})
        slot_schema = schema["properties"][slot]
        slot_schema.pop("$ref", None)
        slot_schema["oneOf"] = choices
    schema["$defs"] = definitions
    return _only_used(schema)


def default_yaml(registry: Registry | None = None) -> str:
    """Give a YAML file that says what an empty one means, with every key explained and every option shown."""
    registry = registry or load_registry()
    config = HardKVConfig()
    lines = ["# hardkv configuration. Every key may be left out; the values here are the defaults."]
    for key, field in HardKVConfig.model_fields.items():
        value = getattr(config, key)
        lines += ["", *_comment(field.description or "", "")]
        if isinstance(value, ComponentSpec):
            lines += [f"{key}:", *_component_lines(registry, key, value)]
        elif isinstance(value, BaseModel):
            lines += [f"{key}:"]
            for name, inner in type(value).model_fields.items():
                lines += _comment(inner.description or "", "  ")
                lines += [f"  {name}: {_scalar(getattr(value, name))}"]
        else:
            lines += [f"{key}: {_scalar(value)}"]
    return "\n".join(lines) + "\n"


def _component_lines(registry: Registry, slot: str, spec: ComponentSpec) -> list[str]:
    interface = next(base for base, name in SLOTS.items() if name == slot)
    component: type[Component] = registry.get(interface, spec.name)
    lines = [*_comment(f"One of: {', '.join(registry.names(interface))}", "  "), f"  name: {spec.name}"]
    for name, field in component.Config.model_fields.items():
        lines += _comment(field.description or "", "  ")
        if name in spec.options:
            lines += [f"  {name}: {_scalar(spec.options[name])}"]
        else:
            default = "..." if field.is_required() else _scalar(field.get_default(call_default_factory=True))
            lines += [f"  # {name}: {default}"]
    return lines


def _comment(text: str, indent: str) -> list[str]:
    prefix = f"{indent}# "
    return textwrap.wrap(text, _COMMENT_WIDTH, initial_indent=prefix, subsequent_indent=prefix)


def _scalar(value: Any) -> str:
    # JSON is YAML; a plain word needs no quotes unless YAML takes it for something else, such as `on`
    if isinstance(value, str) and value.isidentifier() and yaml.safe_load(value) == value:
        return value
    return json.dumps(value)


def _only_used(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop definitions that nothing refers to any more."""
    definitions = schema.pop("$defs")
    kept: dict[str, Any] = {}
    pending = [schema]
    while pending:
        text = json.dumps(pending.pop())
        for name in definitions:
            if name not in kept and f'"#/$defs/{name}"' in text:
                kept[name] = definitions[name]
                pending.append(definitions[name])
    return {**schema, "$defs": kept}
