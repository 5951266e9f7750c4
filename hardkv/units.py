"""Bytes as people write them."""

from __future__ import annotations

import re
from typing import Any

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: Any) -> Any:
    """Give the bytes in a text such as `2GiB` or `500 MB`; anything that is no text passes unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"expected bytes as a whole number or with a unit, such as 2GiB or 500MB (got {value!r})")
    return int(float(match[1]) * _UNITS[match[2].upper()])
