"""The page: a table of contents, one section for each file, one style for light and dark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hardkv import __version__
from hardkv.errors import InputError
from hardkv.evaluation.pages.markup import paragraph, table
from hardkv.evaluation.pages.sections import section

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f23; --paper: #ffffff; --soft: #f3f4f6; --line: #d5d9de; --link: #0b57b0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --paper: #14171a; --soft: #1f2328; --line: #3a4149; --link: #7db4ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem 1.25rem 4rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
a { color: var(--link); }
h2 { border-top: 1px solid var(--line); padding-top: 1.2rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; margin: .8rem 0; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { background: var(--soft); white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td.long { min-width: 20rem; }
pre { background: var(--soft); padding: .7rem .9rem; overflow-x: auto; border-radius: .3rem; }
code { overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .9rem; }
dt { opacity: .75; }
dd { margin: 0; overflow-wrap: anywhere; }
details { margin: .6rem 0; }
summary { cursor: pointer; }
figure { margin: 1rem 0; }
svg { width: 100%; max-width: 56rem; height: auto; font: 13px system-ui, sans-serif; fill: var(--ink); }
svg .title { font-weight: 600; font-size: 14px; }
svg .value { font-size: 12px; opacity: .8; }
svg .grid { stroke: var(--line); }
svg .range { stroke: var(--ink); stroke-width: 2; opacity: .7; }
svg polyline { fill: none; stroke-width: 2.5; }
.c0 { fill: #3b7dd8; } .c1 { fill: #e0803a; } .c2 { fill: #3f9d5f; } .c3 { fill: #c9485b; }
.c4 { fill: #8766c9; } .c5 { fill: #a8763e; } .c6 { fill: #c55fa6; } .c7 { fill: #6d7784; }
.s0 { stroke: #3b7dd8; } .s1 { stroke: #e0803a; } .s2 { stroke: #3f9d5f; } .s3 { stroke: #c9485b; }
.s4 { stroke: #8766c9; } .s5 { stroke: #a8763e; } .s6 { stroke: #c55fa6; } .s7 { stroke: #6d7784; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
"""
_NAMES = {
    "compare": "Methods compared",
    "fidelity": "Fidelity",
    "retrieval": "Retrieval",
    "math": "Mathematics",
    "decode": "Decode speed",
    "prefill": "Prefill",
    "memory": "Memory",
    "kernels": "Kernels",
}


@dataclass(frozen=True)
class Result:
    """One file of ours, read."""

    path: Path
    found: dict[str, Any]

    @property
    def title(self) -> str:
        """What the section is called."""
        kind = str(self.found.get("kind", ""))
        model = self.found.get("model")
        subject = f": {model}" if isinstance(model, str) else ""
        return f"{_NAMES.get(kind, self.path.stem)}{subject} ({self.path.name})"


def read_result(path: Path) -> Result:
    """Read one JSON file.

    Raises:
        InputError: it is not there, or no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a JSON file, as --output writes it ({error})") from None
    if isinstance(found, list) and all(isinstance(row, dict) for row in found):
        found = {"rows": found}
    if not isinstance(found, dict):
        raise InputError(f"{path}: expected a JSON object, as --output writes it, got {type(found).__name__}")
    return Result(path, found)


def write_page(results: Sequence[Result], title: str) -> str:
    """The whole page; it refers to nothing outside itself."""
    entries, bodies = [], []
    for number, result in enumerate(results, 1):
        entries.append(f'<li><a href="#r{number}">{escape(result.title)}</a></li>')
        bodies.append(f'<section id="r{number}"><h2>{escape(result.title)}</h2>\n{_body(result)}\n</section>')
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
    )
    count = "one file" if len(results) == 1 else f"{len(results)} files"
    made = paragraph(f"Written by hardkv {__version__} from {count}.")
    contents = f"<nav><ol>{''.join(entries)}</ol></nav>"
    return f"{head}<body>\n<h1>{escape(title)}</h1>\n{made}\n{contents}\n{''.join(bodies)}\n</body></html>\n"


def _body(result: Result) -> str:
    try:
        return section(result.found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # A file of a kind that we know, with other content: what it holds is still worth showing.
        note = paragraph(f"This is no '{result.found.get('kind')}' result as hardkv writes it: {error!r}")
        return note + table([{"key": key, "value": value} for key, value in result.found.items()])
