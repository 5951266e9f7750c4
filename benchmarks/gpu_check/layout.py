"""Part b: the attention of one decode step over a head-adaptive layout, against the two padded layouts of the paper.

Ours reads pages of what each head keeps. HA-Max pads every head to the densest one of the model. HA-Sparse keeps all
tokens and hides those dropped under a mask. Each is one CUDA graph of a call per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_check.plan import LayoutPlan
from benchmarks.gpu_check.reporting import Part
from benchmarks.gpu_check.timing import free_memory, median_ms
from hardkv_kernels import plan_decode, ragged_decode

OURS, MAX, SPARSE = "ours", "HA-Max", "HA-Sparse"
WANTED_SHARE, WANTED_MAX, WANTED_SPARSE = 0.8, 3.0, 6.0
_BASELINE_ERROR = 0.1
"""A baseline that is further off than rounding to 16 bits takes it does not count, however fast."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Pool:
    """All layers' pages, in any order, with what a call of `ragged_decode` needs besides."""

    keys: Tensor
    values: Tensor
    bias: Tensor
    tables: Tensor
    lanes: Tensor
    starts: Tensor
    owner: Tensor
    counts: Tensor

    def call(self, plan: LayoutPlan, layer: int, query: Tensor, logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend one layer's `query [B, H, G, D]`."""
        owners = plan.sequences * plan.heads
        answer: tuple[Tensor, Tensor, Tensor] = ragged_decode(
            query,
            self.keys,
            self.values,
            self.bias,
            self.tables[layer],
            self.lanes,
            self.starts[layer],
            self.owner,
            layer * owners,
            0,
            self.keys.shape[0],
            plan.head_dim**-0.5,
            None,
            None,
            logits,
            False,
        )
        return answer[0], answer[1]


class Length:
    """The measurements at one length."""

    def __init__(
        self, part: Part, plan: LayoutPlan, device: torch.device, length: int, bandwidth: float, seconds: float
    ) -> None:
        self.part, self.plan, self.device, self.length = part, plan, device, length
        self.bandwidth, self.seconds = bandwidth, seconds
        self.times: dict[str, float] = {}
        """The fastest form of each layout that gave the right result."""

    def time(
        self, layout: str, form: str, body: Callable[[], object], read: int, error: float | None, counts: bool = True
    ) -> None:
        """Time a form that reads `read` bytes; `counts`: whether it may be its layout's fastest."""
        milliseconds, runs = median_ms(body, self.device, self.plan.replays, self.seconds)
        rate = read / milliseconds / 1e6
        self.part.row(
            length=self.length,
            layout=layout,
            form=form,
            ms=milliseconds,
            gb_per_s=rate,
            share_of_copy=rate / self.bandwidth,
            runs=runs,
            error=error,
        )
        if counts:
            self.times[layout] = min(self.times.get(layout, float("inf")), milliseconds)

    def check(self, what: str, error: float) -> None:
        """A result that is wrong fails the check, however fast it came."""
        allowed = 4 * max(torch.finfo(self.plan.dtype).eps, 2.0**-20) + 8 * 2.0**-20
        if not error <= allowed:
            self.part.fail(f"length {self.length}, {what}: wrong by up to {error:.3g}, tolerance {allowed:.3g}")

    def run(self) -> None:
        """Every layout; one that fails leaves the others be."""
        for what, action in ((OURS, ours), (MAX, padded), (SPARSE, masked)):
            self.part.attempt(f"length {self.length}, {what}", partial(action, self))
            free_memory(self.device)

    def targets(self) -> None:
        """Compare with the fastest form of each baseline."""
        if OURS not in self.times:
            return
        mine = self.times[OURS]
        rate = kept_bytes(self.plan, self.length) / mine / 1e6
        self.part.target(f"ours, share of copy bandwidth at {self.length}", rate / self.bandwidth, WANTED_SHARE)
        for layout, wanted in ((MAX, WANTED_MAX), (SPARSE, WANTED_SPARSE)):
            if layout in self.times:
                times = self.times[layout] / mine
                self.part.target(f"ours, times as fast as {layout} at {self.length}", times, wanted)


def run(part: Part, plan: LayoutPlan, device: torch.device) -> None:
    """One row for each length and form; the longest comes first, since the targets are of it."""
    bandwidth = copy_gb_per_s(plan, device)
    free_memory(device)
    part.fact("copy_gb_per_s", bandwidth)
    part.fact("mean_density", float(plan.densities().mean()))
    lengths = sorted(plan.lengths, reverse=True)
    for done, length in enumerate(lengths):
        if done and part.left < 0:
            part.note(f"no time for length {length}")
            continue
        seconds = max(part.left, 1.0) / (len(lengths) - done) / 20
        measured = Length(part, plan, device, length, bandwidth, seconds)
        measured.run()
        if not done:
            measured.targets()


def kept_bytes(plan: LayoutPlan, length: int) -> int:
    """K and V of the slots that are kept."""
    return plan.sequences * int(plan.kept(length).sum()) * plan.slot_bytes()


def copy_gb_per_s(plan: LayoutPlan, device: torch.device) -> float:
    """Bytes read and written by a copy on the device, per second."""
    source = torch.zeros(plan.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    milliseconds, _ = median_ms(partial(target.copy_, source), device, plan.replays, 5.0)
    return 2 * plan.copy_bytes / milliseconds / 1e6


def random_(tensor: Tensor, rows: int = 1 << 16) -> Tensor:
    """Fill with normal numbers, a part at a time."""
    for first in range(0, tensor.shape[0], rows):
        tensor[first : first + rows].normal_()
    return tensor


def build_pool(plan: LayoutPlan, kept: Tensor, device: torch.device) -> Pool:
    """Pages of every layer, head and sequence, dealt out at random; what lies beyond the kept slots is hidden."""
    slots, sequences = plan.page_slots, plan.sequences
    pages = -(-kept // slots)
    total = sequences * int(pages.sum())
    order = torch.randperm(total, device=device).int()
    size = (plan.layers, sequences + 1, plan.heads)
    tables = torch.full((*size, int(pages.max())), total, dtype=torch.int32, device=device)
    counts = torch.zeros(size, dtype=torch.int32, device=device)
    bias = torch.zeros(total + 1, slots, device=device)
    bias[total] = float("-inf")
    taken = 0
    for layer in range(plan.layers):
        for head in range(plan.heads):
            each = int(pages[layer, head])
            mine = order[taken : taken + sequences * each].view(sequences, each)
            tables[layer, :sequences, head, :each] = mine
            counts[layer, :sequences, head] = each
            last = int(kept[layer, head]) - (each - 1) * slots
            bias[mine[:, -1].long(), last:] = float("-inf")
            taken += sequences * each
    shape = (total + 1, slots, plan.head_dim)
    keys, values = (random_(torch.empty(shape, dtype=plan.dtype, device=device)) for _ in range(2))
    lanes = torch.arange(sequences, device=device)
    starts = torch.zeros(plan.layers, sequences * plan.heads + 1, dtype=torch.int32, device=device)
    owner = torch.zeros(total + 1, dtype=torch.int64, device=device)
    plan_decode(tables, counts, lanes, starts, owner)
    return Pool(keys, values, bias, tables, lanes, starts, owner, counts)


def queries(plan: LayoutPlan, device: torch.device) -> Tensor:
    """`[L, B, H, G, D]`, large enough that attention over thousands of slots is not all but flat."""
    size = (plan.layers, plan.sequences, plan.heads, plan.group, plan.head_dim)
    return (3.0 * torch.randn(size, device=device)).to(plan.dtype)


def ours(at: Length) -> None:
    """Pages of what is kept, without and with the logits that an online scorer asks for."""
    plan = at.plan
    pool = build_pool(plan, plan.kept(at.length), at.device)
    query = queries(plan, at.device)
    read = kept_bytes(plan, at.length)
    outs: list[Tensor] = []

    def step(logits: Tensor | None = None) -> None:
        outs[:] = [pool.call(plan, layer, query[layer], logits)[0] for layer in range(plan.layers)]

    step()
    error = max(
        pool_error(plan, pool, layer, row, head, query, outs[layer])
        for layer in {0, plan.layers // 2, plan.layers - 1}
        for row, head in ((0, 0), (plan.sequences - 1, plan.heads - 1))
    )
    at.time(OURS, "ragged_decode", step, read, error)
    at.check(OURS, error)
    logits = torch.zeros(pool.keys.shape[0], plan.group, plan.page_slots, device=at.device)
    at.time(OURS, "ragged_decode, logits written", partial(step, logits), read, None, counts=False)


def pool_error(plan: LayoutPlan, pool: Pool, layer: int, row: int, head: int, query: Tensor, out: Tensor) -> float:
    """Largest difference to the same in float64."""
    pages = pool.tables[layer, row, head, : int(pool.counts[layer, row, head])].long()
    bias = pool.bias[pages].double().flatten()
    keys, values = (tensor[pages].double().flatten(0, 1) for tensor in (pool.keys, pool.values))
    logits = query[layer, row, head].double() @ keys.T * plan.head_dim**-0.5 + bias
    return float((out[row, head].double() - torch.softmax(logits, -1) @ values).abs().max())


def padded(at: Length) -> None:
    """HA-Max: every head as long as the densest, by our kernel over equal pages and by dense attention."""
    plan = at.plan
    longest = -(-int(plan.kept(at.length).max()) // plan.page_slots) * plan.page_slots
    buffers = plan.buffers(longest)
    keys, values = dense_buffers(plan, buffers, longest, at.device)
    query = queries(plan, at.device)
    read = plan.layers * plan.layer_bytes(longest)
    pool = equal_pool(plan, keys, values, longest)

    def step() -> None:
        for layer in range(plan.layers):
            pool.call(plan, layer % buffers, query[layer])

    expected = by_products(query[0].float(), keys[0].float(), values[0].float(), None)
    error = float((pool.call(plan, 0, query[0])[0].float() - expected).abs().max())
    at.check("our kernel over equal heads", error)
    at.time(MAX, "ragged_decode, equal pages", step, read, error)
    dense(at, MAX, keys, values, None, query, read)


def masked(at: Length) -> None:
    """HA-Sparse: every token is read, a bias of -inf hides what was dropped."""
    plan = at.plan
    buffers = plan.buffers(at.length)
    keys, values = dense_buffers(plan, buffers, at.length, at.device)
    share = plan.densities()[torch.arange(buffers) % plan.layers].to(at.device, torch.float32)[:, None, :, None, None]
    size = (buffers, plan.sequences, plan.heads, 1, at.length)
    mask = torch.zeros(size, dtype=plan.dtype, device=at.device)
    for index in range(buffers):
        mask[index].masked_fill_(torch.rand(size[1:], device=at.device) >= share[index], float("-inf"))
    mask[..., 0] = 0.0
    dense(at, SPARSE, keys, values, mask, queries(plan, at.device), plan.layers * plan.layer_bytes(at.length))


def dense_buffers(plan: LayoutPlan, buffers: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random K and V `[buffers, B, H, N, D]`."""
    size = (buffers, plan.sequences, plan.heads, tokens, plan.head_dim)
    keys, values = (torch.empty(size, dtype=plan.dtype, device=device) for _ in range(2))
    for tensor in (keys, values):
        random_(tensor.view(-1, tokens * plan.head_dim), 64)
    return keys, values


def equal_pool(plan: LayoutPlan, keys: Tensor, values: Tensor, tokens: int) -> Pool:
    """The buffers as pages, which lie in order."""
    buffers, slots, device = keys.shape[0], plan.page_slots, keys.device
    each = tokens // slots
    total = buffers * plan.sequences * plan.heads * each
    tables = torch.arange(total, dtype=torch.int32, device=device).view(buffers, plan.sequences, plan.heads, each)
    counts = torch.full(tables.shape[:3], each, dtype=torch.int32, device=device)
    lanes = torch.arange(plan.sequences, device=device)
    starts = torch.zeros(buffers, plan.sequences * plan.heads + 1, dtype=torch.int32, device=device)
    # The plan takes the last page for nobody's, so it is told of one more, which no call reads.
    owner = torch.zeros(total + 1, dtype=torch.int64, device=device)
    plan_decode(tables, counts, lanes, starts, owner)
    pages = (total, slots, plan.head_dim)
    bias = torch.zeros(pages[:2], device=device)
    return Pool(keys.view(pages), values.view(pages), bias, tables, lanes, starts, owner, counts)


def dense(at: Length, layout: str, keys: Tensor, values: Tensor, mask: Tensor | None, query: Tensor, read: int) -> None:
    """Every form of dense attention that torch has here; the fastest that is right counts."""

    def attended(attend: Attend, layer: int) -> Tensor:
        buffer = layer % keys.shape[0]
        return attend(query[layer], keys[buffer], values[buffer], None if mask is None else mask[buffer])

    def step(attend: Attend) -> None:
        for layer in range(at.plan.layers):
            attended(attend, layer)

    hidden = None if mask is None else mask[0].float()
    expected = by_products(query[0].float(), keys[0].float(), values[0].float(), hidden)
    ran = 0
    for name, attend in forms().items():
        try:
            error = float((attended(attend, 0).float() - expected).abs().max())
            right = error <= _BASELINE_ERROR
            at.time(layout, name, partial(step, attend), read, error, counts=right)
            ran += right
        except (RuntimeError, NotImplementedError, ValueError) as problem:
            at.part.note(f"{layout} by {name} does not run: {str(problem).strip().splitlines()[0][:120]}")
    if not ran:
        at.part.fail(f"length {at.length}: no dense form of {layout} ran and was right")


def forms() -> dict[str, Attend]:
    """Dense attention of `query [B, H, G, D]` over `keys, values [B, H, N, D]` and a mask `[B, H, 1, N]`."""
    found: dict[str, Attend] = {"products": by_products}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        name = backend.name.removesuffix("_ATTENTION").lower()
        found[f"sdpa {name}, group as rows"] = _as_rows(backend)
        found[f"sdpa {name}, enable_gqa"] = _with_gqa(backend)
    found["sdpa, torch's choice"] = _as_rows(None)
    return found


def by_products(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    logits = query @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
    return torch.softmax(logits if mask is None else logits + mask, -1) @ values


def _as_rows(backend: SDPBackend | None) -> Attend:
    """The query group as so many rows of one head: no head is repeated."""

    def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask = mask.expand(-1, -1, query.shape[2], -1)
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    return attend


def _with_gqa(backend: SDPBackend) -> Attend:
    def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, group, head_dim = query.shape
        rows = query.reshape(batch, heads * group, 1, head_dim)
        options: dict[str, Any] = {"enable_gqa": True}
        if mask is not None:
            options["attn_mask"] = mask.repeat_interleave(group, 1)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(rows, keys, values, **options).view(query.shape)

    return attend
