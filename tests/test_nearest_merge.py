"""Condenser `nearest_merge`: what is dropped lives on in the values of the survivors most like it."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hardkv import HardKVRuntime, TokenBatch
from hardkv.tiers.nearest_merge import NearestMerge
from tests.tiny_models import loaded

SEEDS = st.integers(0, 2**31 - 1)


def draw(seed: int, heads: int = 2, slots: int = 40, dim: int = 5, clusters: int = 4) -> TokenBatch:
    """Keys in clusters, so that some are alike; NaN where a slot is neither dropped nor stays."""
    rng = torch.Generator().manual_seed(seed)
    centres = torch.randn(clusters, dim, generator=rng)
    keys = centres[torch.randint(clusters, (heads, slots), generator=rng)]
    keys = keys + 0.3 * torch.randn(heads, slots, dim, generator=rng)
    kind = torch.randint(3, (heads, slots), generator=rng)  # 0 dropped, 1 stays, 2 neither
    nobody = (kind == 2)[..., None]
    return TokenBatch(
        keys=keys.masked_fill(nobody, float("nan")),
        values=torch.randn(heads, slots, dim, generator=rng).masked_fill(nobody, float("nan")),
        positions=torch.arange(slots).expand(heads, slots),
        mask=kind == 0,
        survivors=kind == 1,
    )


def literal(tokens: TokenBatch, least: float) -> Tensor:
    """The formula by loops, float64."""
    assert tokens.survivors is not None
    values = tokens.values.double().clone()
    heads, slots, _ = values.shape
    for h in range(heads):
        survivors = [j for j in range(slots) if tokens.survivors[h, j]]
        joined: dict[int, list[tuple[float, Tensor]]] = {}
        for i in range(slots):
            if not tokens.mask[h, i] or not survivors:
                continue
            left = tokens.keys[h, i].double()

            def likeness(j: int, h: int = h, left: Tensor = left) -> float:
                right = tokens.keys[h, j].double()
                return float(left @ right / (left.norm() * right.norm()))

            best = max(survivors, key=lambda j: (likeness(j), j))
            if likeness(best) >= least:
                joined.setdefault(best, []).append((math.exp(likeness(best)), tokens.values[h, i].double()))
        for j, arrivals in joined.items():
            total = math.e + sum(weight for weight, _ in arrivals)
            values[h, j] = (math.e * values[h, j] + sum(weight * value for weight, value in arrivals)) / total
    return values


@given(SEEDS, st.sampled_from([-1.0, 0.0, 0.6, 0.95]), st.sampled_from([1, 7, 40, 600]))
def test_it_is_the_formula(seed: int, least: float, slots: int) -> None:
    tokens = draw(seed, slots=slots if slots < 600 else 60)
    folded = NearestMerge(NearestMerge.Config(min_similarity=least)).fold(0, tokens)
    assert tokens.survivors is not None
    assert folded.shape == tokens.values.shape
    expected = literal(tokens, least)
    torch.testing.assert_close(folded[tokens.survivors].double(), expected[tokens.survivors], rtol=1e-4, atol=1e-5)


def test_tiles_make_no_difference(monkeypatch: Any) -> None:
    tokens = draw(5, slots=50)
    whole = NearestMerge().fold(0, tokens)
    monkeypatch.setattr("hardkv.tiers.nearest_merge._TILE", 7)
    torch.testing.assert_close(NearestMerge().fold(0, tokens), whole, equal_nan=True)


def test_without_a_survivor_nothing_is_lost_or_broken() -> None:
    tokens = draw(1, slots=6)
    assert tokens.survivors is not None
    tokens.survivors.zero_()
    assert bool(torch.isfinite(NearestMerge().fold(0, tokens)[tokens.mask]).all())


def config(condenser: dict[str, Any], regularizer: str = "rewrite") -> dict[str, Any]:
    return {
        "model": {"dtype": "float32"},
        "cache": {"interval": 8, "local_window": 8, "query_rows": 16, "page_slots": 8},
        "scorer": {"name": "streaming"},
        "budget": {"name": "top_k", "mean_tokens": 24},
        "regularizer": {"name": regularizer},
        "condenser": condenser,
    }


def test_survivors_hold_what_was_folded_into_them() -> None:
    """After a prompt: keys as they were, values by the formula, tokens the same as without folding."""
    model, prompt = loaded(), list(range(60))
    held = []
    for condenser in ({"name": "evict"}, {"name": "nearest_merge", "min_similarity": -1.0}):
        runtime = HardKVRuntime.from_config(config(condenser), loaded=model)
        states: list[tuple[Tensor, ...]] = []
        for event in runtime._run(runtime._requests([prompt], {"max_new_tokens": 3})[0], None):
            if event.choice is not None and not states:
                (cascade,) = runtime._cache.cascades.values()
                resident = cascade.resident()
                keys, values = cascade.gather(resident, slice(0, 1))
                states.append((keys[0].clone(), values[0].clone(), resident.positions[0].clone()))
        held.append(states[0])
    (keys, values, positions), (merged_keys, merged_values, merged_positions) = held
    assert torch.equal(positions, merged_positions)
    assert torch.equal(keys, merged_keys)
    # layer 0 alone is the same in both runs: its inputs are
    whole: list[Tensor] = []
    from hardkv.model_adapter.attention import SERVER_ARGUMENT, serving

    class Watch:
        def attend(self, call: Any, sliding_window: int | None) -> Tensor:
            if call.layer == 0:
                whole.extend([call.keys[0].clone(), call.values[0].clone()])
            return torch.zeros_like(call.query).transpose(1, 2)

    with serving(model.model), torch.no_grad():
        model.model(
            input_ids=torch.tensor([prompt]),
            position_ids=torch.arange(60)[None],
            use_cache=False,
            **{SERVER_ARGUMENT: Watch()},
        )
    survivors = torch.zeros(2, 60, dtype=torch.bool).scatter_(-1, positions, True)
    tokens = TokenBatch(whole[0], whole[1], torch.arange(60).expand(2, 60), mask=~survivors, survivors=survivors)
    expected = literal(tokens, -1.0).float()
    gathered = expected.gather(1, positions[..., None].expand(-1, -1, 16))
    torch.testing.assert_close(merged_values, gathered, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(values, merged_values, atol=1e-2)


def test_it_folds_round_after_round_and_frees_as_evict_does() -> None:
    model = loaded()
    for regularizer in ("rewrite", "sparse_load", "auto"):
        plain = HardKVRuntime.from_config(config({"name": "evict"}, regularizer), loaded=model)
        folding = HardKVRuntime.from_config(
            config({"name": "nearest_merge", "min_similarity": -1.0}, regularizer), loaded=model
        )
        prompts = [list(range(60)), list(range(30, 80))]
        one = plain.generate(prompts, max_new_tokens=40, ignore_eos=True)
        other = folding.generate(prompts, max_new_tokens=40, ignore_eos=True)
        assert [row.finish_reason for row in other] == ["length", "length"]
        assert [row.stats.tokens_kept for row in one] == [row.stats.tokens_kept for row in other]
        assert folding.stats().compressions == plain.stats().compressions >= 8
        assert folding.stats().kv_bytes_reserved == plain.stats().kv_bytes_reserved
        assert [row.token_ids for row in one] != [row.token_ids for row in other]
