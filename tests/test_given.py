"""Given tokens: fed after the prompt through decode steps, then the model goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardkv import HardKVRuntime
from hardkv.errors import InputError
from tests.tiny_models import loaded

PROMPT = [(7 * index) % 250 for index in range(90)]
GIVEN = [[3, 1, 4, 1, 5], [9], []]
SMALL: dict[str, Any] = {"model": {"dtype": "float32"}, "cache": {"interval": 16, "query_rows": 16, "page_slots": 8}}


@pytest.mark.parametrize("rules", [{}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.3}])
def test_with_every_token_kept_given_tokens_are_like_prompt_tokens(rules: dict[str, Any]) -> None:
    runtime = HardKVRuntime.from_config({**SMALL, "compression": False}, loaded=loaded())
    prompts = [PROMPT, PROMPT[:40], PROMPT[:33]]
    plain = runtime.generate(
        [[*ids, *more] for ids, more in zip(prompts, GIVEN, strict=True)], max_new_tokens=20, **rules
    )
    given = runtime.generate(prompts, given=GIVEN, max_new_tokens=20, **rules)
    assert [one.token_ids for one in given] == [one.token_ids for one in plain]
    assert [one.text for one in given] == [one.text for one in plain]


def test_the_prompt_is_compressed_without_them() -> None:
    config = {**SMALL, "budget": {"name": "top_k", "mean_tokens": 48}}
    runtime = HardKVRuntime.from_config(config, loaded=loaded())
    one = runtime.generate(PROMPT, given=[1] * 40, max_new_tokens=4)
    assert one.stats.mean_tokens_after_compression[0] == pytest.approx(48, abs=1)
    assert one.stats.prompt_tokens == 90
    assert one.stats.tokens_seen == 90 + 40 + 3
    assert len(one.token_ids) == 4


def test_a_given_end_token_ends_nothing() -> None:
    runtime = HardKVRuntime.from_config(SMALL, loaded=loaded())
    assert len(runtime.generate(PROMPT, given=[257, 257], max_new_tokens=3, stop_token_ids=(257,)).token_ids) >= 1


def test_wrong_given_tokens_are_refused() -> None:
    runtime = HardKVRuntime.from_config(SMALL, loaded=loaded())
    with pytest.raises(InputError, match="given: expected one list of token ids for each of 2 prompts"):
        runtime.generate([PROMPT, PROMPT], given=[[1]])
    with pytest.raises(InputError, match=r"expected token ids from 0 to 258 after each prompt, got \[999\]"):
        runtime.generate(PROMPT, given=[999])
    rows = runtime.teacher_force([PROMPT], [[1, 2, 3]])
    assert torch.stack(rows).shape == (1, 3, 259)
