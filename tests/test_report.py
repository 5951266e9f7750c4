"""`hardkv report`: one page from result files, whatever they hold."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hardkv.cli import main
from hardkv.errors import InputError
from hardkv.evaluation.pages import Result, read_result, write_page
from hardkv.evaluation.pages.charts import Bar, bars, lines
from hardkv.evaluation.pages.markup import table, text

EVIL = "<script>alert('x')</script>&\""
HEAD = {"command": f"hardkv bench {EVIL}", "machine": "a machine", "versions": {"hardkv": "9.9"}, "model": "tiny"}
DECODE_ROW = {
    "way": "hardkv",
    "batch": 2,
    "context_tokens": 1000,
    "tokens_per_s": 50.0,
    "tokens_per_s_turns": [40.0, 60.0],
    "kv_bytes": 2**21,
    "note": None,
}
ABSENT = {**DECODE_ROW, "way": EVIL, "tokens_per_s": None, "tokens_per_s_turns": [], "kv_bytes": None, "note": EVIL}
MEMORY = [
    {"way": way, "batch": 1, "context_tokens": tokens, "kv_bytes": tokens * size, "sequences_in_room": 5, "note": None}
    for way, size in (("hardkv", 100), ("uncompressed", 1000))
    for tokens in (1000, 2000, 4000)
]
RESULTS: dict[str, dict[str, Any]] = {
    "compare": {"kind": "compare", **HEAD, "rows": [{"method": "default", "kl": 0.125, "note": None}]},
    "decode": {
        "kind": "decode",
        **HEAD,
        "complete": False,
        "peer_versions": {"kvpress": {"kvpress": "0.5"}},
        "ratios": [{"hardkv_to": "uncompressed", "median": 2.5}],
        "fidelity": [{"way": "hardkv", "kl": 0.0625, "note": None}, {"way": "vllm", "kl": None, "note": "not run"}],
        "rows": [DECODE_ROW, ABSENT],
    },
    "prefill": {
        "kind": "prefill",
        **HEAD,
        "rows": [{**DECODE_ROW, "first_token_seconds": 1.5, "first_token_seconds_turns": [1.0, 2.0]}],
    },
    "memory": {"kind": "memory", **HEAD, "room_bytes": 2**30, "rows": MEMORY},
    "retrieval": {
        "kind": "retrieval",
        **HEAD,
        "summary": [
            {"method": "hardkv", "accuracy": 0.75, "samples": 4},
            {"method": EVIL, "accuracy": 1, "samples": 4},
        ],
        "plan": {"seed": 7},
    },
    "unknown": {"anything": EVIL, "methods": {"a": {"kl": 0.5, "deep": {"er": [1]}}, "b": {"kl": 0.25}}},
}


class Checker(HTMLParser):
    """Every tag closed in order; collects what the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.references += [str(value) for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(*names: str) -> str:
    return write_page([Result(Path(f"{name}.json"), RESULTS[name]) for name in names], f"All {EVIL}")


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


def test_a_page_of_every_kind_is_whole_safe_and_refers_to_itself_alone() -> None:
    html = page(*RESULTS)
    checker = checked(html)
    assert "script" not in checker.seen
    assert "<script" not in html
    assert checker.references == [f"#r{number}" for number in range(1, len(RESULTS) + 1)]
    assert not re.search(r"https?:|url\(|@import", html)
    for number in range(1, len(RESULTS) + 1):
        assert f'id="r{number}"' in html
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html
    for chart in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(chart)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("compare", ["Methods compared: tiny (compare.json)", ">0.1250<", ">0.125<"]),
        ("decode", ["Decode speed: tiny", ">50<", "hardkv  2 x 1,000", "Broken off", "kvpress ran with", ">2.5<"]),
        ("prefill", ["Prefill: tiny", ">1.5<", "time to the first token"]),
        ("memory", ["Memory: tiny", "sequences that fit in 1,073,741,824 bytes", "tokens of context", "<polyline"]),
        ("retrieval", ["Retrieval: tiny", ">0.75<", "accuracy", "Settings"]),
        ("unknown", ["unknown (unknown.json)", ">methods<", ">0.25<", "anything"]),
    ],
)
def test_what_a_section_shows(name: str, words: list[str]) -> None:
    html = page(name)
    for word in words:
        assert word in html, word
    if name != "unknown":
        assert "a machine" in html
        assert "hardkv 9.9" in html
        assert "hardkv bench &lt;script&gt;" in html


def test_a_known_kind_with_other_content_is_still_shown() -> None:
    html = write_page([Result(Path("odd.json"), {"kind": "decode", "rows": [{"no": 1}]})], "t")
    checked(html)
    assert "This is no &#x27;decode&#x27; result as hardkv writes it: KeyError" in html


def test_bars_are_as_long_as_their_numbers() -> None:
    chart = ElementTree.fromstring(bars("t", [Bar("a", 1.0), Bar("b", 4.0, 1, 2.0, 4.0), Bar("c", 0.0)]))
    widths = [float(rect.attrib["width"]) for rect in chart.iter("rect")]
    assert widths[1] == pytest.approx(4 * widths[0], abs=0.3)
    assert widths[2] == 0
    (line,) = chart.iter("line")
    assert float(line.attrib["x2"]) - float(line.attrib["x1"]) == pytest.approx(widths[1] / 2, abs=0.2)
    assert bars("t", []) == ""


def test_lines_need_two_places_and_end_at_the_top() -> None:
    assert lines("t", {"a": [(10, 1.0)]}, "x", "y") == ""
    chart = ElementTree.fromstring(lines("t", {"a": [(100, 2.0), (10, 1.0)]}, "x", "y"))
    (path,) = chart.iter("polyline")
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in path.attrib["points"].split())
    assert x0 < x1
    assert y0 - y1 == pytest.approx(130)


def test_cells() -> None:
    assert [text(value) for value in (None, True, 12345, 0.123456, 1e6, "<b>", [1, 0.25])] == [
        *("", "yes", "12,345", "0.1235", "1,000,000", "&lt;b&gt;", "1, 0.25")
    ]
    assert table([{"a": None, "b": 1}]).count("<th>") == 1
    assert "<details><summary>41 rows" in table([{"a": 1}] * 41)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name, found in RESULTS.items():
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(found))
    out = tmp_path / "report.html"
    assert main(["report", *map(str, files), "--out", str(out), "--title", "Mine"]) == 0
    assert f"wrote {out}" in capsys.readouterr().err
    checked(out.read_text())
    assert "<h1>Mine</h1>" in out.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*(file.name for file in files), "report.html"])


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "number.json").write_text("3")
    with pytest.raises(InputError, match=r"number.json: expected a JSON object, as --output writes it, got int"):
        read_result(tmp_path / "number.json")
    for name, words in (("missing.json", "no such file"), ("broken.json", "expected a JSON file")):
        assert main(["report", str(tmp_path / name), "--out", str(tmp_path / "out.html")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()
    (tmp_path / "rows.json").write_text('[{"a": 1}]')
    assert main(["report", str(tmp_path / "rows.json"), "--out", str(tmp_path / "no" / "out.html")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
