"""The contract of tiers: their life step by step, against a plain list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from hardkv.errors import CapacityError
from hardkv.interfaces import CacheTier
from hardkv.testing.cases import SCALING, TierCase
from hardkv.testing.contracts.base import Contract, Property, require, require_same
from hardkv.testing.held import Held, buffers, empty, joined
from hardkv.testing.strategies import token_batches
from hardkv.types import TierShape, TokenBatch
from hardkv_kernels import attend_slots


def live(contract: type[TierContract], case: TierCase) -> Iterator[tuple[CacheTier, list[Held], str]]:
    """Walk through the case's steps; after each, give the tier, a plain list per layer, and the step's name."""
    tier = contract.make(case.shape())
    tier.allocate(case.shape())
    lists = [empty(case) for _ in range(case.layers)]
    yield tier, lists, "allocate"
    for stage, step in enumerate(case.steps):
        layer = stage % case.layers
        if step == "admit":
            batch = case.batch(stage)
            try:
                tier.admit(layer, batch)
                lists[layer] = joined(lists[layer], batch)
            except CapacityError:
                pass  # `check_overflow` looks at what that leaves
        elif step == "admit none":
            tier.admit(layer, nothing(case.batch(stage)))
        else:
            tier.reset()
            tier.allocate(case.shape())
            lists = [empty(case) for _ in range(case.layers)]
        yield tier, lists, f"step {stage} ({step})"


def nothing(batch: TokenBatch) -> TokenBatch:
    """The same batch, of which no token is meant."""
    nobody = torch.zeros_like(batch.mask)
    nan = torch.full_like(batch.keys, float("nan"))
    return TokenBatch(nan, nan, batch.positions, nobody, batch.scaling, batch.query, nobody)


def filled(contract: type[TierContract], case: TierCase) -> CacheTier:
    """A tier that holds the case's first batch in layer 0."""
    tier = contract.make(case.shape())
    tier.allocate(case.shape())
    _fill(tier, case)
    return tier


def _fill(tier: CacheTier, case: TierCase) -> None:
    try:
        tier.admit(0, case.batch(0, width=min(3, case.slots)))
    except CapacityError:
        raise AssertionError(f"the tier has {case.slots} slots and refuses {min(3, case.slots)} tokens") from None


def answers(tier: CacheTier, case: TierCase) -> Tensor:
    """What the tier answers in every layer: output and log-sum-exp, in one tensor."""
    states = [tier.attend(layer, case.query(), SCALING, case.softcap) for layer in range(case.layers)]
    return torch.stack([torch.cat([out, lse[..., None]], -1) for out, lse in states])


def check_attend(component: CacheTier, case: TierCase, contract: type[TierContract]) -> None:
    """After every step, `attend` equals attention over what the tier holds, in output and log-sum-exp."""
    for tier, lists, when in live(contract, case):
        for layer in range(case.layers):
            held = contract.held(tier, layer, lists[layer])
            if held is None:
                continue
            out, lse = tier.attend(layer, case.query(), SCALING, case.softcap)
            require(
                out.dtype == lse.dtype == torch.float32, f"`attend` gave {out.dtype}, {lse.dtype}; expected float32"
            )
            expected, expected_lse = attend_slots(case.query(), *held, SCALING, case.softcap)
            wrong = f"after {when}, layer {layer}: `attend` gives another"
            require_same(lse, expected_lse, f"{wrong} log-sum-exp", contract.tolerance)
            require_same(out, expected, f"{wrong} output", contract.tolerance)


def check_empty_answers(component: CacheTier, case: TierCase, contract: type[TierContract]) -> None:
    """A tier that holds nothing answers zeros, and -inf as log-sum-exp."""
    tier = contract.make(case.shape())
    tier.allocate(case.shape())
    found = answers(tier, case)
    require((found[..., :-1] == 0.0).all(), "an empty tier gives an output that is not zero")
    require((found[..., -1] == float("-inf")).all(), "an empty tier gives a log-sum-exp that is not -inf")


def check_constant_addresses(component: CacheTier, case: TierCase, contract: type[TierContract]) -> None:
    """Buffers lie where `allocate` put them until `reset`: a captured graph reads those addresses."""
    before: list[tuple[int, int]] = []
    for tier, _, when in live(contract, case):
        places = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in buffers(tier))
        if "admit" in when:
            require(places == before, f"after {when}, buffers lie elsewhere: write into them with `copy_` or indices")
        before = places


def check_overflow(component: CacheTier, case: TierCase, contract: type[TierContract]) -> None:
    """What does not fit is refused with CapacityError, and nothing changes."""
    tier = filled(contract, case)
    for stage in range(1, 2 * case.slots + 2):
        before, size = answers(tier, case), tier.allocated_bytes
        try:
            tier.admit(0, case.batch(stage))
        except CapacityError:
            require(tier.allocated_bytes == size, "a refused `admit` changed `allocated_bytes`")
            require_same(answers(tier, case), before, "a refused `admit` changed what the tier answers", 0.0)
        except Exception as error:
            raise AssertionError(f"`admit` raised {type(error).__name__}; expected CapacityError: {error}") from error


def check_reset(component: CacheTier, case: TierCase, contract: type[TierContract]) -> None:
    """`reset` forgets and releases everything, may be called twice, and the tier can be allocated again."""
    tier = filled(contract, case)
    for times in (1, 2):
        tier.reset()
        require(tier.allocated_bytes == 0, f"after reset number {times} the tier holds {tier.allocated_bytes} bytes")
    tier.allocate(case.shape())
    require((answers(tier, case)[..., -1] == float("-inf")).all(), "after a reset the tier still answers")
    _fill(tier, case)
    require_same(answers(tier, case), answers(filled(contract, case), case), "after a reset tokens are held otherwise")


def check_fresh_is_independent(component: CacheTier, case: TierCase, contract: type[TierContract]) -> None:
    """`fresh` gives an empty tier with the same options that shares nothing with the first."""
    tier = filled(contract, case)
    other = tier.fresh()
    require(type(other) is type(tier) and other is not tier, f"`fresh` gave {other!r}; expected a new tier")
    require(other.config == tier.config, f"`fresh` has options {other.config!r}; expected {tier.config!r}")
    require(other.allocated_bytes == 0, f"`fresh` already holds {other.allocated_bytes} bytes")
    other.allocate(case.shape())
    require((answers(other, case)[..., -1] == float("-inf")).all(), "a fresh tier already holds tokens")
    before = answers(tier, case)
    other.admit(0, case.batch(7, width=min(3, case.slots)))
    require_same(answers(tier, case), before, "what the fresh tier admits is seen in the first", 0.0)


def check_allocated_bytes(component: CacheTier, case: TierCase, contract: type[TierContract]) -> None:
    """`allocated_bytes` is what the tier's tensors take."""
    for tier, _, when in live(contract, case):
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in buffers(tier)}
        found, expected = tier.allocated_bytes, sum(storages.values())
        require(found == expected, f"after {when}, `allocated_bytes` is {found}; the tensors take {expected} bytes")


def check_empty_mask(component: CacheTier, case: TierCase, contract: type[TierContract]) -> None:
    """Admitting no token changes nothing."""
    tier = filled(contract, case)
    before = answers(tier, case)
    tier.admit(0, nothing(case.batch(1)))
    require_same(answers(tier, case), before, "`admit` with a mask that names no token changed the answers")


def check_blind_outside_mask(component: CacheTier, case: TierCase, contract: type[TierContract]) -> None:
    """What a batch holds outside its mask changes nothing."""
    found = []
    for garbage in (float("nan"), 1e4):
        tier = contract.make(case.shape())
        tier.allocate(case.shape())
        tier.admit(0, case.batch(0, width=min(3, case.slots), garbage=garbage))
        found.append(answers(tier, case))
    require_same(found[0], found[1], "other garbage outside `tokens.mask` gives other answers", 0.0)
    require(not found[0].isnan().any(), "NaN outside `tokens.mask` reaches the answers")


def check_fold(component: CacheTier, case: TierCase, contract: type[TierContract]) -> None:
    """`fold` gives finite values `[H, N, D]` for survivors, whatever lies elsewhere, and changes no input."""
    tier = contract.make(case.shape())
    tier.allocate(case.shape())
    batch, same = case.folding(), case.folding()
    found = tier.fold(0, batch)
    require(
        found.shape == batch.values.shape, f"`fold` gave {tuple(found.shape)}; expected {tuple(batch.values.shape)}"
    )
    require_same(batch.values, same.values, "`fold` changed `tokens.values`; give new ones", 0.0)
    stays = same.survivors
    assert stays is not None
    require(torch.isfinite(found[stays]).all(), "`fold` gave values that are not finite for tokens that stay")
    other = tier.fold(0, case.folding(garbage=1e4))
    require_same(other[stays], found[stays], "`fold` reads tokens that neither stay nor are dropped", 0.0)


class TierContract(Contract):
    """What every tier promises; as it stands, for one that holds each admitted token until `reset`, or none."""

    interface = CacheTier
    tolerance: ClassVar[float] = 1e-3
    """How far answers may lie from the exact ones, relative; more for a tier that rounds what it holds."""
    owns_buffers: ClassVar[bool] = True
    """False for a tier whose slots lie in buffers that others own, such as the pool's pages."""
    properties = (
        Property(check_attend, token_batches),
        Property(check_empty_answers, token_batches),
        Property(check_constant_addresses, token_batches),
        Property(check_overflow, token_batches),
        Property(check_reset, token_batches),
        Property(check_fresh_is_independent, token_batches),
        Property(check_allocated_bytes, token_batches, lambda contract: contract.owns_buffers),  # type: ignore[attr-defined]
        Property(check_empty_mask, token_batches),
        Property(check_blind_outside_mask, token_batches),
        Property(check_fold, token_batches, lambda contract: contract.component.folds),
    )

    @classmethod
    def make(cls, shape: TierShape) -> CacheTier:
        """A new tier to test, before `allocate`; override it for one that needs more than its options."""
        tier: CacheTier = cls.component.fresh()
        return tier

    @classmethod
    def held(cls, tier: CacheTier, layer: int, admitted: Held) -> Held | None:
        """What the tier holds: `keys, values [H, N, D]` and `bias [H, N]`, -inf where nothing is.

        `admitted`: all tokens since `allocate`. Override it for a tier that holds something else; None: it can't tell.
        """
        keys, values, bias = admitted
        return admitted if tier.holds_tokens else (keys[:, :0], values[:, :0], bias[:, :0])
