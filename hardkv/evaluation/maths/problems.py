"""Problems and their answers, from a local file or from a hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardkv.errors import InputError
from hardkv.evaluation.maths.optional import needed

FORMATS = {
    "U-MATH": ("problem_statement", "golden_answer"),
    "GSM8K": ("question", "answer"),
    "MATH-500": ("problem", "answer"),
    "AIME": ("Problem", "Answer"),
}
"""Fields of question and answer; GSM8K's are also those of some copies of AIME, and MATH-500's of others."""

_ENDINGS = (".json", ".jsonl", ".parquet")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ID_FIELDS = ("id", "ID", "unique_id", "uuid")


@dataclass(frozen=True)
class Problem:
    """One problem with its reference answer."""

    name: str
    """The file's own id, else the row, from 1 on."""
    key: str
    """Hash of question and answer: the same wherever the problem stands in a file."""
    question: str
    answer: str


@dataclass(frozen=True)
class Problems:
    """What a file holds."""

    problems: list[Problem]
    fields: tuple[str, str]
    """Where question and answer were found."""
    left_out: dict[str, str]
    """Names of problems that cannot be asked, and why."""


def read_problems(
    source: str,
    split: str = "test",
    subset: str | None = None,
    question_field: str | None = None,
    answer_field: str | None = None,
) -> Problems:
    """Read a JSON, JSONL or parquet file, or a data set of a hub by its id.

    Raises:
        InputError: no such file, not reachable, or fields that are not known.
    """
    rows = _rows(source, split, subset)
    fields = _fields(source, rows, question_field, answer_field)
    problems: list[Problem] = []
    left_out: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for number, row in enumerate(rows, start=1):
        name = next((str(row[field]) for field in _ID_FIELDS if row.get(field) is not None), str(number))
        question, answer = (_text(source, number, row, field) for field in fields)
        if row.get("has_image"):
            left_out[name] = "has an image"
            continue
        answer = _final(answer)
        key = hashlib.sha256(f"{question}\0{answer}".encode()).hexdigest()[:16]
        seen[key] += 1
        if seen[key] > 1:
            key = f"{key}#{seen[key]}"
        problems.append(Problem(name, key, question, answer))
    return Problems(problems, fields, left_out)


def _rows(source: str, split: str, subset: str | None) -> list[dict[str, Any]]:
    path = Path(source)
    if path.is_file():
        rows = _read_file(path)
    elif path.suffix in _ENDINGS:
        raise InputError(f"{source}: no such file")
    elif _HUB_ID.fullmatch(source):
        rows = _read_hub(source, split, subset)
    else:
        raise InputError(f"{source}: expected a file ({', '.join(_ENDINGS)}) or a data set's id, such as openai/gsm8k")
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{source}: expected a list of objects, one for each problem")
    return rows


def _read_file(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        rows: list[Any] = needed("pyarrow.parquet", "a parquet file").read_table(path).to_pylist()
        return rows
    if path.suffix not in _ENDINGS:
        raise InputError(f"{path}: expected a name that ends in {', '.join(_ENDINGS)}")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected UTF-8 {path.suffix[1:].upper()} ({error})") from None
    return found if isinstance(found, list) else []


def _read_hub(name: str, split: str, subset: str | None) -> list[Any]:
    datasets = needed("datasets", "a data set of a hub")
    try:
        return [dict(row) for row in datasets.load_dataset(name, subset, split=split)]
    # The library has no base class of its errors, and passes on those of three others.
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{name}: cannot be loaded from the hub ({first}). Check --split and --subset; without a network, download"
            " the data set's parquet or JSONL file elsewhere and give its path instead"
        ) from None


def _fields(
    source: str, rows: Sequence[dict[str, Any]], question_field: str | None, answer_field: str | None
) -> tuple[str, str]:
    present = rows[0].keys()
    for option, field in (("--question-field", question_field), ("--answer-field", answer_field)):
        if field is not None and field not in present:
            raise InputError(f"{option} {field}: no such field in {source}; it has {', '.join(sorted(present))}")
    for question, answer in FORMATS.values():
        chosen = (question_field or question, answer_field or answer)
        if set(chosen) <= present:
            return chosen
    known = "; ".join(f"{name}: {' and '.join(fields)}" for name, fields in FORMATS.items())
    raise InputError(
        f"{source}: no fields of a known format ({known}); it has {', '.join(sorted(present))}. Name them with"
        " --question-field and --answer-field"
    )


def _text(source: str, number: int, row: dict[str, Any], field: str) -> str:
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise InputError(f"{source}: problem {number}: {field}: expected a text or a number, got {value!r}"[:300])
    return str(value)


def _final(answer: str) -> str:
    """What follows the last `####`, as GSM8K marks an answer after its reasoning; else the whole."""
    return answer.rpartition("####")[2].strip()
