"""The batched sampler against transformers' own logits processors, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hardkv import sampling
from hardkv.sampling import Sampler, SamplingRules, uniform_of, with_logprobs
from tests.no_sync import NoSync

VOCABULARY = 40
CPU = torch.device("cpu")
RULES = st.builds(
    SamplingRules,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 60]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
)


def stock_probabilities(logits: Tensor, rules: SamplingRules, history: list[int]) -> Tensor:
    """What transformers would draw from, `[V]`."""
    processors = LogitsProcessorList()
    if rules.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(rules.repetition_penalty))
    processors.append(TemperatureLogitsWarper(rules.temperature))
    if rules.top_k:
        processors.append(TopKLogitsWarper(rules.top_k))
    processors.append(TopPLogitsWarper(rules.top_p))
    processors.append(MinPLogitsWarper(rules.min_p))
    ids: Any = torch.tensor([history])
    scores: Any = logits[None].clone()
    return torch.softmax(processors(ids, scores)[0].double(), -1)


@given(seed=st.integers(0, 2**31), rules=st.lists(RULES, min_size=1, max_size=3), uniform=st.floats(0, 1 - 2**-24))
def test_a_row_draws_from_what_transformers_would(seed: int, rules: list[SamplingRules], uniform: float) -> None:
    """The token at which the cumulated probability passes the uniform number, for every row by its own rules."""
    rng = torch.Generator().manual_seed(seed)
    rows = len(rules)
    logits = torch.randn(rows, VOCABULARY, generator=rng) * 3
    histories = [torch.randint(0, VOCABULARY, (7,), generator=rng).tolist() for _ in rules]
    sampler = Sampler(rows, VOCABULARY, CPU)
    for lane, (rule, history) in enumerate(zip(rules, histories, strict=True)):
        sampler.open(rows - 1 - lane, rule, seed, history)
    lanes = torch.arange(rows).flip(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "uniform_of", lambda seeds, counts: torch.full(seeds.shape, uniform))
        chosen = sampler.choose(logits, lanes, draws=True, remembers=any(rule.remembers for rule in rules))
    for row, (rule, history) in enumerate(zip(rules, histories, strict=True)):
        probabilities = stock_probabilities(logits[row], rule, history)
        ranked, order = probabilities.sort(descending=True, stable=True)
        place = int((order == chosen[row]).nonzero())
        reached = ranked.cumsum(0)
        assert ranked[place] > 0.0
        assert reached[place] >= uniform - 1e-5
        assert reached[place] - ranked[place] <= uniform + 1e-5


def test_greedy_rows_stay_greedy_beside_rows_that_draw() -> None:
    sampler = Sampler(2, VOCABULARY, CPU)
    sampler.open(0, SamplingRules(), 1, [])
    sampler.open(1, SamplingRules(temperature=5.0), 1, [])
    logits = torch.randn(1, VOCABULARY).expand(2, -1)
    drawn = [sampler.choose(logits, torch.tensor([0, 1]), draws=True, remembers=False).tolist() for _ in range(30)]
    assert {greedy for greedy, _ in drawn} == {int(logits[0].argmax())}
    assert len({other for _, other in drawn}) > 5


def test_a_penalty_remembers_the_prompt_and_what_was_chosen() -> None:
    sampler = Sampler(2, 4, CPU)
    sampler.open(1, SamplingRules(repetition_penalty=10.0), 0, [3])
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    chosen = [int(sampler.choose(logits, torch.tensor([1]), draws=False, remembers=True)) for _ in range(4)]
    assert chosen == [2, 1, 0, 3]  # when all are penalised alike, the likeliest comes again
    sampler.open(1, SamplingRules(repetition_penalty=10.0), 0, [])
    assert int(sampler.choose(logits, torch.tensor([1]), draws=False, remembers=True)) == 3


@given(seed=st.integers(0, 2**63 - 1), count=st.integers(0, 2**31))
def test_uniform_numbers_are_those_of_splitmix64(seed: int, count: int) -> None:
    mask = (1 << 64) - 1
    mixed = (seed + (count + 1) * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    expected = ((mixed ^ (mixed >> 31)) >> 40) / 2**24
    assert float(uniform_of(torch.tensor([seed]), torch.tensor([count]))) == expected


def test_draws_follow_the_probabilities() -> None:
    """Over 20,000 draws no frequency is off by more than five standard deviations."""
    draws, probabilities = 20_000, torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampler = Sampler(1, 4, CPU)
    sampler.open(0, SamplingRules(temperature=1.0), 42, [])
    logits, lanes = probabilities.log().expand(1, -1), torch.tensor([0])
    chosen = torch.stack([sampler.choose(logits, lanes, draws=True, remembers=False)[0] for _ in range(draws)])
    frequency = torch.bincount(chosen, minlength=4) / draws
    deviation = torch.sqrt(probabilities * (1 - probabilities) / draws)
    assert ((frequency - probabilities).abs() < 5 * deviation).all()


def test_choosing_never_waits_for_the_device() -> None:
    samplers = [Sampler(2, VOCABULARY, CPU) for _ in range(2)]
    for sampler in samplers:
        sampler.open(0, SamplingRules(0.7, 5, 0.9, 0.01, 1.1), 3, [1, 2])
    logits, lanes = torch.randn(3, VOCABULARY), torch.tensor([0, 2, 2])  # the last lane stands for nobody
    with NoSync():  # type: ignore[no-untyped-call]
        watched = samplers[0].choose(logits, lanes, draws=True, remembers=True)
    assert torch.equal(watched, samplers[1].choose(logits, lanes, draws=True, remembers=True))
    assert watched[1:].tolist() == logits[1:].argmax(-1).tolist()


def test_logprobs_are_those_of_the_logits() -> None:
    logits = torch.randn(VOCABULARY)
    choice = with_logprobs(5, logits, 3)
    expected = torch.log_softmax(logits, -1)
    assert choice.logprob == float(expected[5])
    assert list(choice.top_logprobs) == expected.topk(3).indices.tolist()
    assert list(choice.top_logprobs.values()) == expected.topk(3).values.tolist()
