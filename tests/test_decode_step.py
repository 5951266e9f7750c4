"""A decode step against the tiers' own answers, composed by log-sum-exp."""

from __future__ import annotations

import pytest
import torch

from hardkv.block_tables import BlockTables
from hardkv.decode_step import DecodeStep
from hardkv.interfaces import CacheTier
from hardkv.memory import PagePool
from hardkv.policies.scorers.h2o import H2O
from hardkv.tiers.cascade import Cascade
from hardkv.tiers.evict import Evict
from hardkv.tiers.merge import Merge
from hardkv.tiers.sliding import SlidingRings
from hardkv.types import AttentionCall, TokenBatch
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
    made.allocate(3)
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


class Apart(Merge):
    """A tier that keeps its tokens to itself, as a third party's may."""

    lies_in_pages = False


def step_over(pool: PagePool, lanes: int) -> DecodeStep:
    sliding = SlidingRings({}, lanes, 4, HEADS, HEAD_DIM, torch.float32, CPU)
    return DecodeStep(pool, BlockTables(pool, lanes, 16), H2O(), None, sliding, GROUP, lanes, rows=4)


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("last", [Evict, Merge, Apart])
def test_a_step_attends_every_tier(last: type[CacheTier], regions: bool) -> None:
    pool = PagePool(200, 8, LAYERS, HEADS, HEAD_DIM, torch.float32, CPU, with_statistic=True, layer_regions=regions)
    batch = [cascade(pool, lane, last()) for lane in range(2)]
    step = step_over(pool, 3)
    step.bind(batch, rows=3)
    assert step.capturable == (last is not Apart)
    assert step.open().tolist() == [40, 40, 0]
    step.advance()
    masses = {}
    for layer in range(LAYERS):
        asked = call(layer, 3, layer)
        out = step.attend(layer, asked)
        for row, one in enumerate(batch):
            query = asked.query[row, :, 0].view(HEADS, GROUP, HEAD_DIM)
            answers = [tier.attend(layer, query, 0.25) for tier in (one.sparse, one.dense, one.last)]
            outs, lses = (torch.stack([answer[part] for answer in answers]) for part in (0, 1))
            expected, total = merge_states(outs.flatten(1, 2), lses.flatten(1))
            torch.testing.assert_close(out[row, 0], expected, atol=2e-6, rtol=1e-5)
            masses[layer, row] = torch.exp(torch.logaddexp(lses[0], lses[1]) - total.view(HEADS, GROUP)).mean(1)
    step.close()
    for (layer, row), mass in masses.items():
        tiers = (batch[row].sparse, batch[row].dense)
        seen = [pool.statistic.view(-1)[tier.slots()[layer]] * tier.present()[layer] for tier in tiers]
        torch.testing.assert_close(torch.cat(seen, -1).sum(-1), mass, atol=2e-6, rtol=1e-5)


def test_the_cache_s_part_of_a_step_never_waits_for_the_device() -> None:
    pool = PagePool(200, 8, LAYERS, HEADS, HEAD_DIM, torch.float32, CPU, with_statistic=True)
    batch = [cascade(pool, lane, Evict()) for lane in range(2)]
    step = step_over(pool, 2)
    step.bind(batch)
    with NoSync():  # type: ignore[no-untyped-call]
        step.open()
        for layer in range(LAYERS):
            step.attend(layer, call(layer, 2, layer))
        step.close()
    with pytest.raises(AssertionError, match="waits for the device"), NoSync():  # type: ignore[no-untyped-call]
        torch.ones(1).item()


@pytest.mark.parametrize("inference", [False, True])
def test_the_lint_sees_what_waits(inference: bool) -> None:
    waits = (
        lambda x: x.item(),
        lambda x: float(x.sum()),
        lambda x: bool(x.sum() > 0),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.__setitem__(x > 0, torch.zeros(1)),
        lambda x: torch.tensor([1.0]),
    )
    one = torch.ones(1)
    for wait in waits:
        with torch.inference_mode(inference), pytest.raises(AssertionError, match="waits"), NoSync():  # type: ignore[no-untyped-call]
            wait(one)
