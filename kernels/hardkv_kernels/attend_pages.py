"""Attention of one new token per sequence over pages that lie together in memory: the plain form of `ragged_decode`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hardkv_kernels._numbers import FLUSHED, LOWEST, NEGLIGIBLE

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class PageRun:
    """Pages that lie together and whose they are; what a step needs of them that stays the same from step to step."""

    keys: Tensor  # [m, D, S]
    values: Tensor  # [m, S, D]
    bias: Tensor  # [m, 1, S] float32
    owners: int
    asks: Tensor  # [m] int64, the owner whose query a page reads; any one for a page of others
    adds: Tensor  # [m] int64, the row that its part is added to; `owners`, which is thrown away, for a page of others


def page_run(
    keys: Tensor, values: Tensor, bias: Tensor, page_owner: Tensor, first_owner: int, span: slice, owners: int
) -> PageRun:
    """The pages `span` of the pool `keys, values [n, S, D]`, `bias [n, S]`; `page_owner [n]` as in `ragged_decode`."""
    owner = page_owner[span] - first_owner
    ours = (owner >= 0) & (owner < owners)
    return PageRun(
        keys=keys[span].transpose(1, 2),
        values=values[span],
        bias=bias[span].unsqueeze(1),
        owners=owners,
        asks=owner.clamp(0, owners - 1),
        adds=torch.where(ours, owner, owners),
    )


def attend_pages(
    query: Tensor,
    run: PageRun,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    with_probabilities: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ragged_decode` of `query [R, H, G, D]` over a run of pages, called without an operator around it.

    On a CPU an operator of our own costs as much as several of the operations in it.
    """
    logits = page_logits(query, run, scaling, softcap)
    return attend_logits(query, run, logits, sink_logits, with_probabilities)


def page_logits(query: Tensor, run: PageRun, scaling: float, softcap: float | None) -> Tensor:
    """Scaled, capped and biased dot products `[m, G, S]`, float32."""
    asked = query.reshape(run.owners, *query.shape[2:]).index_select(0, run.asks)  # [m, G, D]
    products = torch.bmm(asked, run.keys)
    if softcap is None:
        return torch.add(run.bias, products, alpha=scaling)
    return torch.tanh(products.float() * (scaling / softcap)).mul_(softcap).add_(run.bias)


def attend_logits(
    query: Tensor, run: PageRun, weights: Tensor, sink_logits: Tensor | None, with_probabilities: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax of each owner's logits `weights [m, G, S]`, which are overwritten, times its values."""
    rows, heads, group, head_dim = query.shape
    owners, adds = run.owners, run.adds
    top = weights.new_full((owners + 1, group), LOWEST)
    top.scatter_reduce_(0, adds.unsqueeze(1).expand(-1, group), weights.amax(-1), "amax")
    sink = None if sink_logits is None else sink_logits.expand(rows, heads, group).reshape(owners, group)
    if sink is not None:
        top[:owners] = torch.maximum(top[:owners], sink)
    weights.sub_(top.index_select(0, adds).unsqueeze(2))
    # The exponential of -inf takes a CPU several times as long as that of a number.
    torch.threshold_(weights.clamp_min_(NEGLIGIBLE).exp_(), FLUSHED, 0.0)
    total = torch.zeros_like(top).index_add_(0, adds, weights.sum(-1))
    if sink is not None:
        total[:owners] += torch.exp(sink - top[:owners])
    lse = torch.log(total).add_(top).narrow(0, 0, owners).view(rows, heads, group)
    inverse = total.clamp_min_(_TINY).reciprocal_()
    partial = torch.bmm(weights.to(run.values.dtype), run.values)  # [m, G, D]
    out = weights.new_zeros(owners + 1, group, head_dim)
    out.index_add_(0, adds, partial.float()).mul_(inverse.unsqueeze(2))
    weights = weights.mul_(inverse.index_select(0, adds).unsqueeze(2)) if with_probabilities else weights.new_empty(0)
    return out.narrow(0, 0, owners).to(query.dtype).view(query.shape), lse, weights
