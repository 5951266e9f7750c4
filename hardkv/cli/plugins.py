"""`hardkv plugins`: every component that a configuration can name, and its options."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hardkv.cli.configuring import read_configuration
from hardkv.cli.session import ConfigFile, Debug, Json, output, print_json
from hardkv.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from hardkv.registry import Registered

_BOUNDS = {"minimum": ">= {}", "exclusiveMinimum": "> {}", "maximum": "<= {}", "exclusiveMaximum": "< {}"}


def plugins(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", show_default=False, help="Show the options of this component.")
    ] = None,
    config: ConfigFile = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List every scorer, calibrator, budget, regularizer and condenser; with NAME, its options."""
    entries = read_configuration(config, []).registry.all()
    if name is not None:
        known = [entry.name for entry in entries]
        if name not in known:
            raise InputError(f"no component is called '{name}'.{did_you_mean(name, known)} Known: {', '.join(known)}")
        entries = [entry for entry in entries if entry.name == name]
    if as_json:
        print_json([_described(entry, with_options=name is not None) for entry in entries])
    elif name is None:
        output().print(_overview(entries))
    else:
        for entry in entries:
            _print_options(entry)


def _overview(entries: list[Registered]) -> Table:
    table = Table("slot", "name", "plugin", "summary")
    for column in table.columns[:3]:
        column.no_wrap = True
    for entry in entries:
        table.add_row(entry.slot, Text(entry.name, "bold"), entry.plugin, Text(entry.summary))
    return table


def _described(entry: Registered, with_options: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "slot": entry.slot,
        "name": entry.name,
        "plugin": entry.plugin,
        "summary": entry.summary,
    }
    if with_options:
        described["options"] = _options(entry)
    return described


def _options(entry: Registered) -> list[dict[str, Any]]:
    properties = entry.component.Config.model_json_schema(mode="validation").get("properties", {})
    return [
        {
            "name": option,
            "allowed": _allowed(properties[option]),
            "required": field.is_required(),
            "default": properties[option].get("default"),
            "description": field.description or "",
        }
        for option, field in entry.component.Config.model_fields.items()
    ]


def _allowed(schema: dict[str, Any]) -> str:
    """Say what a property's JSON Schema lets through."""
    if "anyOf" in schema:
        return " or ".join(_allowed(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    kind = str(schema.get("type", "any"))
    bounds = [words.format(schema[key]) for key, words in _BOUNDS.items() if key in schema]
    return " ".join([kind, *bounds])


def _print_options(entry: Registered) -> None:
    console = output()
    console.print(Text.assemble((f"{entry.slot} {entry.name}", "bold"), f"  (plugin {entry.plugin})"))
    console.print(Text(inspect.cleandoc(entry.component.__doc__ or entry.summary)))
    options = _options(entry)
    if not options:
        console.print(f"It has no options: {entry.slot}: {{name: {entry.name}}}", markup=False)
        return
    table = Table("option", "allowed", "default", "what and why")
    table.columns[0].no_wrap = True
    for option in options:
        default = "required" if option["required"] else json.dumps(option["default"])
        path = f"{entry.slot}.{option['name']}"
        table.add_row(path, Text(option["allowed"]), Text(default), Text(option["description"]))
    console.print(table)
