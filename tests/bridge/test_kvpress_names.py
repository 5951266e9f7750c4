"""Scorer `kvpress`: what it says of presses and options it cannot use, and without the library."""

from __future__ import annotations

import sys

import pytest

from hardkv.errors import ConfigError
from hardkv.policies.scorers.kvpress import KVPress
from hardkv.policies.scorers.kvpress_presses import PRESSES, REFUSED


def refusal(press: str, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        KVPress(KVPress.Config(press=press, options=options))
    return str(caught.value)


def test_the_library_is_imported_only_for_a_press(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    message = refusal("KnormPress")
    assert "scorer 'kvpress' needs the library kvpress" in message
    assert "`pip install 'hardkv[kvpress]'` and `pip install --no-deps kvpress==0.5.5`" in message
    assert "[scorer.name]" in message


@pytest.mark.parametrize(("press", "instead"), REFUSED.items())
def test_a_press_that_cannot_score_is_refused_before_the_library_is_needed(
    press: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    assert refusal(press) == f"scorer 'kvpress': {press} cannot serve as a scorer: {instead} [scorer.press]"


def test_a_misspelt_press_gets_a_hint() -> None:
    message = refusal("KNormPress")
    assert message.startswith("scorer 'kvpress': unknown press 'KNormPress'. Did you mean 'KnormPress'? Known: Knorm")
    assert all(press in message for press in PRESSES)


def test_faulty_options_are_named() -> None:
    pytest.importorskip("kvpress", reason="kvpress is not installed: make bridges")
    assert "the budget decides how many tokens stay" in refusal("KnormPress", compression_ratio=0.5)
    assert refusal("SnapKVPress", windowsize=3) == (
        "scorer 'kvpress': SnapKVPress has no option 'windowsize'. Did you mean 'window_size'? Known: window_size,"
        " kernel_size [scorer.options.windowsize]"
    )
    assert refusal("SnapKVPress", window_size="3") == (
        "scorer 'kvpress': SnapKVPress: window_size: Input should be a valid integer (got '3')"
        " [scorer.options.window_size]"
    )
    assert "leverage_type: Input should be 'key', 'value'" in refusal("CURPress", leverage_type="both")
    assert "RandomPress draws other numbers each time; write options: {seed: 0}" in refusal("RandomPress")
    assert "global generator with use_random_leverage" in refusal("CURPress", use_random_leverage=True)
    assert "SnapKVPress needs a window_size of at least 1 (got 0) [scorer.options]" in refusal(
        "SnapKVPress", window_size=0
    )
    assert "SnapKVPress needs an odd kernel_size (got 4; use 5)" in refusal("SnapKVPress", kernel_size=4)
