"""A decode step against the tiers' own answers, composed by log-sum-exp."""

from __future__ import annotations

import pytest
import torch

from hardkv.graph import DecodeStep
from hardkv.interfaces import CacheTier
from hardkv.memory import PagePool
from hardkv.policies.scorers.h2o import H2O
from hardkv.tiers.cascade import Cascade
from hardkv.tiers.evict import Evict
from hardkv.tiers.merge import Merge
from hardkv.types import AttentionCall, TierShape, TokenBatch
from hardkv_kernels import merge_states
from tests.no_sync import NoSync

LAYERS, HEADS, GROUP, HEAD_DIM = 2, 2, 3, 16
CPU = torch.device("cpu")


def tokens(heads: int, count: int, seed: int, share: float = 1.0) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, heads, count, HEAD_DIM, generator=generator)
    mask = torch.rand(heads, count, generator=generator) < share
    query = torch.randn(heads, HEAD_DIM, generator=generator)
    return TokenBatch(keys, values, torch.arange(count).expand(heads, count), mask, 0.25, query)


def cascade(pool: PagePool, lane: int, last: CacheTier) -> Cascade:
    """A sequence with ragged sparse heads, some dense tokens and, if the last tier holds any, merged ones."""
    made = Cascade(pool, lane, sinks=1, local_window=4, interval=8, last=last)
    made.dense.allocate(TierShape(LAYERS, HEADS, HEAD_DIM, 12, torch.float32, CPU))
    if last.holds_tokens:
        last.allocate(TierShape(LAYERS, HEADS, HEAD_DIM, 3, torch.float32, CPU))
    for layer in range(LAYERS):
        made.sparse.admit(layer, tokens(HEADS, 20 + 9 * lane, 10 * lane + layer, 0.6))
        made.dense.admit(layer, tokens(HEADS, 5, 50 + 10 * lane + layer))
        last.admit(layer, tokens(HEADS, 11, 90 + 10 * lane + layer, 0.8))
    made.seen_tokens = 40
    return made


def call(layer: int, batch: int, seed: int) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, HEADS * GROUP, 1, HEAD_DIM, generator=generator)
    keys, values = torch.randn(2, batch, HEADS, 1, HEAD_DIM, generator=generator)
    return AttentionCall(layer, query, keys, values, 0.25)


@pytest.mark.parametrize("last", [Evict, Merge])
def test_a_step_attends_every_tier(last: type[CacheTier]) -> None:
    pool = PagePool(200, 8, LAYERS, HEADS, HEAD_DIM, torch.float32, CPU, with_statistic=True)
    batch = [cascade(pool, lane, last()) for lane in range(2)]
    step = DecodeStep(pool, H2O(), None)
    step.begin(batch)
    for layer in range(LAYERS):
        asked = call(layer, 2, layer)
        out = step.attend(layer, asked)
        for row, one in enumerate(batch):
            query = asked.query[row, :, 0].view(HEADS, GROUP, HEAD_DIM)
            answers = [tier.attend(layer, query, 0.25) for tier in (one.sparse, one.dense, one.last)]
            expected, total = merge_states([answer[0] for answer in answers], [answer[1] for answer in answers])
            torch.testing.assert_close(out[row, 0].view(HEADS, GROUP, HEAD_DIM), expected, atol=2e-6, rtol=1e-5)
            seen = [
                pool.statistic.view(-1)[tier.slots()[layer]] * tier.present()[layer] for tier in (one.sparse, one.dense)
            ]
            mass = torch.exp(torch.logaddexp(answers[0][1], answers[1][1]) - total).mean(1)
            torch.testing.assert_close(torch.cat(seen, -1).sum(-1), mass, atol=2e-6, rtol=1e-5)


def test_the_attention_of_a_step_never_waits_for_the_device() -> None:
    pool = PagePool(200, 8, LAYERS, HEADS, HEAD_DIM, torch.float32, CPU, with_statistic=True)
    batch = [cascade(pool, lane, Evict()) for lane in range(2)]
    step = DecodeStep(pool, H2O(), None)
    step.begin(batch)
    with NoSync():  # type: ignore[no-untyped-call]
        for layer in range(LAYERS):
            step.attend(layer, call(layer, 2, layer))
    with pytest.raises(AssertionError, match="waits for the device"), NoSync():  # type: ignore[no-untyped-call]
        torch.ones(1).item()
