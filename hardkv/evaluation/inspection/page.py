"""A trace as one HTML file that loads nothing else: heat map, occupancy, positions, and the text with what is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TEMPLATE = Path(__file__).with_name("page.html")
_PLACE = "/*TRACE*/"


def page(found: Mapping[str, Any]) -> str:
    """The page of what `hardkv inspect --json` writes; its text cannot become markup or script."""
    data = json.dumps(found, ensure_ascii=True, separators=(",", ":"))
    # Inside a script element only these could end it or open a comment; in JSON they stand inside strings alone.
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return _TEMPLATE.read_text(encoding="utf-8").replace(_PLACE, data)
