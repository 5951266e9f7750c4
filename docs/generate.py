"""Writes the parts of the documentation that code knows better: settings, their bounds and reasons, the methods.

mkdocs calls `on_page_markdown` for each page; a line `<!-- generated: WHAT -->` is replaced by what `WHAT` gives.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from hardkv.cli.app import app
from hardkv.config import HardKVConfig, default_yaml
from hardkv.registry import Registered, load_registry

_RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
_PICTURES = Path(__file__).parent / "images"
_MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_KINDS = {
    "boolean": "`true`, `false`",
    "integer": "whole number",
    "null": "`null`",
    "object": "mapping",
    "string": "text",
}
_BOUNDS = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "exclusiveMaximum": "below {}"}


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill in the generated parts of one page."""
    return _MARK.sub(lambda mark: PARTS[mark[1]](), markdown)


def _default_yaml() -> str:
    return f"```yaml\n{default_yaml(load_registry())}```"


def _settings() -> str:
    parts = []
    plain: list[str] = []
    for key, field in HardKVConfig.model_fields.items():
        value = field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel) and key in ("model", "cache", "generation"):
            parts.append(f"### `{key}`\n\n{field.description}\n\n{_options_table(type(value), f'{key}.')}")
        else:
            plain.append(key)
    return "\n\n".join(["### Top level", _options_table(HardKVConfig, "", plain), *parts])


def _catalogue(slot: str) -> Callable[[], str]:
    def write() -> str:
        entries = [entry for entry in load_registry().all() if entry.slot == slot and entry.plugin == "builtin"]
        return "\n\n".join(_method(entry) for entry in entries)

    return write


def _method(entry: Registered) -> str:
    text = inspect.cleandoc(entry.component.__doc__ or entry.summary)
    parts = [f"### `{entry.name}` {{ #{entry.slot}-{entry.name} }}", text]
    if entry.component.Config.model_fields:
        parts.append(_options_table(entry.component.Config, f"{entry.slot}."))
    return "\n\n".join(parts)


def _options_table(model: type[BaseModel], prefix: str, keys: list[str] | None = None) -> str:
    properties = model.model_json_schema()["properties"]
    lines = ["| key | default | allowed | what and why |", "|---|---|---|---|"]
    for key, field in model.model_fields.items():
        if keys is not None and key not in keys:
            continue
        default = "required" if field.is_required() else f"`{_shown(field.get_default(call_default_factory=True))}`"
        cells = [f"`{prefix}{key}`", default, _allowed(properties[key]), field.description or ""]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump()
        return "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return json.dumps(value).strip('"')


def _allowed(schema: dict[str, Any]) -> str:
    """Say in words what a property's JSON Schema lets through."""
    if "anyOf" in schema:
        return " or ".join(_allowed(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema or "allOf" in schema:
        return "a component: its name and options"
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return "list of " + _allowed(schema.get("items", {}))
    bounds = [words.format(schema[key]) for key, words in _BOUNDS.items() if key in schema]
    return " ".join([_KINDS.get(kind, kind), *bounds])


def measurements() -> str:
    """Tables of every committed result, each with its command; README.md holds the same text."""
    tables = {
        "fidelity.json": _fidelity,
        "held_out.json": _held_out_line,
        "retrieval.json": _retrieval,
        "decode_cpu.json": _decode,
    }
    return "\n\n".join(write(name) for name, write in tables.items() if (_RESULTS / name).is_file())


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_RESULTS / name).read_text(encoding="utf-8"))
    return found


def _made(found: dict[str, Any], name: str) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    return f"`{found['command']}` gives `benchmarks/results/{name}` ({found['dtype']}, {found['machine']}, {versions})."


def _fidelity(name: str) -> str:
    """A table for each number of rounds, the rows of each budget best first."""
    found = _result(name)
    rounds = dict.fromkeys(row["rounds"] for row in found["rows"])
    tables = [_fidelity_table(found, [row for row in found["rows"] if row["rounds"] == one]) for one in rounds]
    return "\n\n".join([*tables, _made(found, name)])


def _fidelity_table(found: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    full = next(row for row in rows if row["mean_budget"] is None)
    ran = [row for row in rows if row.get("kl") is not None]
    ran.sort(key=lambda row: (-row["mean_budget"], row["kl"]))
    rounds = full["rounds"]
    when = "one compression" if rounds == 1 else f"{rounds} rounds of compression while decoding"
    lines = [
        f"| {row['mean_budget']:,} | `{row['method']}` | {row['kl']:.4f}{_error(row['kl_standard_error'])} "
        f"| {row['top1_agreement']:.3f} | {row['perplexity']:.2f} | {_mean(row['attention_mass_kept'])} "
        f"| {_or_empty(row['mean_tokens'], '.1f')} |"
        for row in ran
    ]
    ratios = [f"At {row['mean_budget']:,} tokens the default has {told}." for row in ran if (told := _kl_ratios(row))]
    return "\n".join(
        [
            f"**Fidelity, {when}**: `{found['model']}`, {len(found['texts'])} texts of {full['prompt_tokens']:,} "
            f"tokens, then {full['fed_tokens']:,} given ones; KL to the full cache in nats per token, lower is better, "
            "± its standard error over texts; "
            f"with the full cache the perplexity is {full['perplexity']:.2f}. {' '.join(ratios)}".rstrip(),
            "",
            "| mean budget | method | KL | same top token | perplexity | attention mass kept | mean tokens per head |",
            "|---|---|---|---|---|---|---|",
            *lines,
        ]
    )


def _kl_ratios(row: dict[str, Any]) -> str:
    """How the default's KL compares with uniform SnapKV's and with that of the best other method."""
    methods = {name: ratio for name, ratio in row.get("kl_ratio_to", {}).items() if "+" in name}
    if "snapkv+top_k" not in methods:
        return ""
    best = max(methods, key=lambda name: methods[name])
    told = f"{methods['snapkv+top_k']:.2f} times the KL of uniform SnapKV"
    return told if best == "snapkv+top_k" else f"{told}, {methods[best]:.2f} times that of `{best}`"


def _error(standard_error: float | None) -> str:
    return "" if standard_error is None else f" ± {standard_error:.4f}"


def _held_out_line(name: str) -> str:
    """The ratios on texts that no setting was chosen on, in a sentence."""
    found = _result(name)
    told = [f"{ratios} at {row['mean_budget']:,} tokens" for row in found["rows"] if (ratios := _kl_ratios(row))]
    return (
        f"The default's settings were chosen on these texts. On {len(found['texts'])} others, after one compression, "
        f"it has {' and '.join(told)}.\n\n{_made(found, name)}"
    )


def _held_out() -> str:
    """The fidelity tables of texts that no setting was chosen on, or that they have not been measured."""
    name = "held_out.json"
    if not (_RESULTS / name).is_file():
        return f"Not yet measured; `--output benchmarks/results/{name}` makes it."
    return _fidelity(name)


def _mean(values: list[float] | None) -> str:
    return "" if not values else f"{sum(values) / len(values):.3f}"


def _frontier() -> str:
    """The picture of the fidelity results, where there is one."""
    if not (_PICTURES / "fidelity.png").is_file():
        return ""
    return "![KL over the mean budget, and attention mass kept by layer, a line for each method](images/fidelity.png)"


def _retrieval(name: str) -> str:
    """Accuracy of each method over all depths, by task."""
    found = _result(name)
    plan, tasks = found["plan"], found["plan"]["tasks"]

    def accuracy(method: str, task: str) -> str:
        cells = [cell for cell in found["cells"] if (cell["method"], cell["task"]) == (method, task)]
        samples = sum(cell["samples"] for cell in cells)
        return f"{sum(cell['accuracy'] * cell['samples'] for cell in cells) / samples:.3f}"

    lines = [
        f"| {_or_empty(row.get('mean_tokens'), ',.0f')} | `{row['method']}` | "
        + " | ".join(accuracy(row["method"], task) for task in tasks)
        + f" | {row['accuracy']:.3f} ± {row['standard_error']:.3f} | {_or_empty(row['share_of_full_cache'], '.2f')} |"
        for row in found["summary"]
    ]
    each, lengths = len(plan["depths"]) * plan["samples"], ", ".join(f"{tokens:,}" for tokens in plan["contexts"])
    return "\n".join(
        [
            f"**Finding what is hidden**: `{found['model']}`, {lengths} tokens, {each} prompts of each task at "
            f"{len(plan['depths'])} depths, difficulty {plan['difficulty']}; the prompt with its question is "
            "compressed before the answer is written.",
            "",
            f"| mean tokens per head | {' | '.join(['cache', *tasks, 'all', 'accuracy to that of the full cache'])} |",
            "|---" * (len(tasks) + 4) + "|",
            *lines,
            "",
            _made(found, name),
        ]
    )


def _decode(name: str) -> str:
    """Speed and bytes of each way in the largest case, and what those that compress do to the predictions."""
    found = _result(name)
    case = (found["batch"], found["context_tokens"])
    rows = [row for row in found["rows"] if (row["batch"], row["context_tokens"]) == case]
    kl = {row["way"]: row["kl"] for row in found.get("fidelity", [])}
    ratios = {row["hardkv_to"]: row for row in found["ratios"] if (row["batch"], row["context_tokens"]) == case}
    named = {"uncompressed": "the same runtime uncompressed", "transformers": "transformers' default cache"}
    told = [f"{ratios[way]['median']:.2f} times as fast as {words}" for way, words in named.items() if way in ratios]
    lines = [
        f"| `{row['way']}` | {row['tokens_per_s']:.1f} | {_or_empty(row['step_ms'], '.1f')} "
        f"| {_or_empty(row['prefill_seconds'], '.0f')} | {_times(ratios.get(row['way']))} "
        f"| {_mebibytes(row['kv_bytes'])} | {_or_empty(row['mean_tokens'], ',.0f')} "
        f"| {_or_empty(kl.get(row['way']), '.4f')} |"
        for row in rows
        if row["note"] is None
    ]
    rest = [f"- `{row['way']}`: {row['note']}" for row in rows if row["note"] is not None]
    settings = found.get("fidelity_settings")
    apart = (
        ""
        if settings is None
        else (
            f" The KL was measured apart, in {settings['dtype']}: {len(settings['texts'])} texts of "
            f"{settings['prompt_tokens']:,} tokens at a mean of {settings['mean_budget']}, {settings['rounds']} "
            "compressions."
        )
    )
    return "\n".join(
        [
            f"**Decoding on a CPU**: `{found['model']}`, {found['batch']} sequences of {found['context_tokens']:,} "
            f"tokens, mean budget {found['mean_budget']:,}, compressed every {found['interval']} steps, passes "
            f"included. hardkv is {', '.join(told)}. Its cache takes {_shares(rows)}. Tokens/s: the median turn, "
            "passes included; ms per step: the median step, without passes; times as fast: the median ratio, turn by "
            f"turn, lowest and highest.{apart}",
            "",
            "| cache | tokens/s | ms per step | prefill s | hardkv is times as fast | KV MiB | mean tokens per head "
            f"| KL{'' if settings is None else ' at ' + str(settings['mean_budget'])} |",
            "|---|---|---|---|---|---|---|---|",
            *lines,
            "",
            *([*rest, ""] if rest else []),
            _made(found, name),
        ]
    )


def _shares(rows: list[dict[str, Any]]) -> str:
    """Bytes of hardkv's cache as shares of those of the two caches that keep everything."""
    held = {row["way"]: row["kv_bytes"] for row in rows if row["note"] is None}
    full = {"uncompressed": "the uncompressed runtime's", "transformers": "transformers' default cache's"}
    shares = [f"{held['hardkv'] / held[way]:.3f} of {words}" for way, words in full.items() if held.get(way)]
    return f"{', '.join(shares)} KV bytes"


def _times(ratio: dict[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _mebibytes(count: int | None) -> str:
    return "not counted" if count is None else f"{count / 2**20:,.0f}"


def _defaults() -> str:
    """The settings around the default, by how they do over the budgets, or that they have not been measured."""
    name = "defaults.json"
    if not (_RESULTS / name).is_file():
        return f"**Settings around the default**: not yet measured; `--output benchmarks/results/{name}` makes them."
    found = _result(name)
    kl: dict[str, dict[int, float]] = {}
    for row in found["rows"]:
        if row.get("kl") is not None:
            kl.setdefault(row["method"], {})[row["mean_budget"]] = row["kl"]
    default = kl["default"]
    shares = {method: [one[budget] / default[budget] for budget in default] for method, one in kl.items()}
    order = sorted(kl, key=lambda method: math.prod(shares[method]))
    lines = [
        f"| `{method}` | {' | '.join(f'{kl[method][budget]:.4f}' for budget in default)} "
        f"| {math.prod(shares[method]) ** (1 / len(default)):.2f} |"
        for method in order
    ]
    full = next(row for row in found["rows"] if row["mean_budget"] is None)
    return "\n".join(
        [
            f"**Settings around the default**: `{found['model']}`, {len(found['texts'])} texts of "
            f"{full['prompt_tokens']:,} tokens, then {full['fed_tokens']:,} given ones, {full['rounds']} compressions; "
            "KL at a mean of so many tokens per head, and its geometric mean over the budgets as a share of the "
            "default's.",
            "",
            f"| setting | {' | '.join(f'{budget:,}' for budget in default)} | to the default |",
            "|---" * (len(default) + 2) + "|",
            *lines,
            "",
            _made(found, name),
        ]
    )


def _compare() -> str:
    """Every method at one mean budget, best first, or that it has not been measured."""
    name = "compare.json"
    if not (_RESULTS / name).is_file():
        return f"**Results**: not yet measured; `hardkv compare --output benchmarks/results/{name}` makes them."
    found = _result(name)
    ran = [row for row in found["rows"] if row["kl"] is not None]
    lines = [
        f"| `{row['method']}` | {row['kl']:.4f} | {row['top1_agreement']:.3f} | {_or_empty(row['mean_tokens'], '.1f')} "
        f"| {row['kv_bytes'] / 2**20:.0f} | {_or_empty(row['compression_ms'], ',.0f')} |"
        for row in ran
    ]
    rest = [f"- `{row['method']}`: {row['note']}" for row in found["rows"] if row["note"] is not None]
    rounds = found["rounds"]
    when = "one compression" if rounds == 1 else f"{rounds} compressions"
    return "\n".join(
        [
            f"**Every method at one mean budget**: `{found['model']}`; texts: {', '.join(found['texts'])}; "
            f"{found['prompt_tokens']:,} tokens of each, then {found['fed_tokens']:,} given ones; {when} of each text "
            f"to a mean of {found['mean_budget']:,} tokens per head. With every token kept, the KV cache takes "
            f"{found['reference']['kv_bytes'] / 2**20:.0f} MiB.",
            "",
            "| method | KL | same top token | mean tokens kept per head | KV MiB | ms per compression |",
            "|---|---|---|---|---|---|",
            *lines,
            "",
            *([*rest, ""] if rest else []),
            _made(found, name),
        ]
    )


def _or_empty(value: float | None, pattern: str) -> str:
    return "" if value is None else format(value, pattern)


def _kernels_aot() -> str:
    """What each kernel compiled to; kinds of one kernel are given by their largest."""
    found = _result("kernels_aot.json")
    targets = sorted({row["target"] for row in found["rows"]})
    largest: dict[tuple[str, str, int], dict[int, tuple[int, ...]]] = {}
    for row in found["rows"]:
        key = (row["kernel"], row["dtype"], row["head_dim"])
        numbers = tuple(row[name] for name in ("registers", "shared_bytes", "spills"))
        kept = largest.setdefault(key, {})
        kept[row["target"]] = tuple(map(max, numbers, kept.get(row["target"], numbers)))
    lines = [
        f"| `{kernel}` | {precision} | {head_dim or 'any'} | "
        + " | ".join(
            f"{registers} | {shared:,} | {spills}" for registers, shared, spills in (kept[each] for each in targets)
        )
        + " |"
        for (kernel, precision, head_dim), kept in sorted(largest.items())
    ]
    heads = [f"sm_{target} {what}" for target in targets for what in ("registers", "shared bytes", "spills")]
    return "\n".join(
        [
            f"| kernel | tensors | head dim | {' | '.join(heads)} |",
            "|" + "---|" * (3 + len(heads)),
            *lines,
            "",
            f"`{found['command']}` gives `benchmarks/results/kernels_aot.json` "
            f"({', '.join(f'{package} {version}' for package, version in found['versions'].items())}).",
        ]
    )


def _gpu_check() -> str:
    """What the GPU check found, or that it has not been run."""
    name = "gpu_check.json"
    if not (_RESULTS / name).is_file() or _result(name)["dry_run"]:
        return "**Results**: not yet measured."
    found = _result(name)
    parts = found["parts"]
    status = "\n".join(
        f"| {part} | {what['status']} | {len(what['rows'])} | {len(what['failures'])} | {what['seconds']} |"
        for part, what in parts.items()
    )
    targets = [target for what in parts.values() for target in what["targets"]]
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    blocks = [
        f"**Results** on {found['machine'].get('device', 'an unknown device')}:",
        f"| part | outcome | rows | failures | seconds |\n|---|---|---|---|---|\n{status}",
        _plain_table(targets, ("target", "wanted", "value", "met")),
        _plain_table(
            _largest_errors(parts.get("parity", {}).get("rows", [])),
            ("operator", "dtype", "cases", "error", "share of tolerance"),
        ),
        _plain_table(
            parts.get("layout", {}).get("rows", []), ("length", "layout", "form", "ms", "gb_per_s", "share_of_copy")
        ),
        _plain_table(
            parts.get("end_to_end", {}).get("rows", []),
            ("context", "cache", "tokens_per_s", "step_ms", "compression_share", "compressions", "kv_gib"),
        ),
        _plain_table(
            parts.get("endurance", {}).get("rows", []),
            ("run", "steps", "median_step_ms", "compressions", "steps_watched", "growth_bytes"),
        ),
        f"`{found['command']}` gives `benchmarks/results/{name}` ({versions}).",
    ]
    return "\n\n".join(block for block in blocks if block)


def _largest_errors(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The case of each operator and type that takes most of its tolerance."""
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row["error"] is None:
            continue
        key = (row["operator"], row["dtype"] or "any")
        share, cases = row["share"], 1
        if key in worst:
            cases += worst[key]["cases"]
            if worst[key]["share of tolerance"] >= share:
                worst[key]["cases"] = cases
                continue
        worst[key] = {
            "operator": key[0],
            "dtype": key[1],
            "cases": cases,
            "error": row["error"],
            "share of tolerance": share,
        }
    return list(worst.values())


def _plain_table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
    """Some columns of rows of a result file; nothing where there is no row."""
    if not rows:
        return ""

    def cell(value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in rows]
    heads = " | ".join(column.replace("_", " ") for column in columns)
    return "\n".join([f"| {heads} |", "|" + "---|" * len(columns), *lines])


def _commands() -> str:
    """Every command with every option, as `--help` has it."""

    def write(command: Any, path: str) -> list[str]:
        parts = []
        shown = [each for each in command.params if each.name not in ("install_completion", "show_completion")]
        if shown and not getattr(command, "commands", None):
            rows = [_flag(each) for each in shown]
            summary = inspect.cleandoc(command.help or "").split("\n")[0]
            parts.append(f"### `{path}`\n\n{summary}\n\n| option | what it does |\n|---|---|\n" + "\n".join(rows))
        for name, inner in getattr(command, "commands", {}).items():
            parts += write(inner, f"{path} {name}")
        return parts

    return "\n\n".join(write(typer.main.get_command(app), "hardkv"))


def _flag(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    elif parameter.metavar:
        names = f"{names} `{parameter.metavar}`"
    return f"| {names} | {parameter.help or ''} |".replace("\n", " ")


PARTS: dict[str, Callable[[], str]] = {
    "default_yaml": _default_yaml,
    "settings": _settings,
    "measurements": measurements,
    "frontier": _frontier,
    "defaults": _defaults,
    "held_out": _held_out,
    "compare": _compare,
    "commands": _commands,
    "kernels_aot": _kernels_aot,
    "gpu_check": _gpu_check,
    **{f"{slot}s": _catalogue(slot) for slot in ("scorer", "calibrator", "budget", "regularizer", "condenser")},
}
