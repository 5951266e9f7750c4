"""HardKVCache: the compressed cache for people who keep their Hugging Face generation loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardkv.cache import CascadeCache
from hardkv.config import HardKVConfig, load_config
from hardkv.costs import measure_costs
from hardkv.errors import CapacityError, HardKVError, InputError
from hardkv.model_adapter import BridgeCache, bridge, read_geometry
from hardkv.tiers.cascade import Cascade
from hardkv.types import AttentionCall

_ROOM_TOKENS = 4096
"""New tokens per row that memory is planned for when every token is kept; a compressed row needs no plan."""


class HardKVCache(BridgeCache):
    """Pass it as `past_key_values` to `model.generate`; one cache serves one call.

    ```python
    model.generate(**inputs, past_key_values=HardKVCache(model, "run.yaml"))
    ```

    `source` is a YAML file, a dict or a `HardKVConfig`; its `model` and `generation` sections are not used. The model
    is asked to route its attention here only in passes that carry such a cache. Left padding is read from the attention
    mask. Not supported: beam search, assisted decoding, and a second prompt on a used cache.

    Raises:
        ConfigError: a wrong configuration. UnsupportedModelError: a model that cannot be served.
    """

    def __init__(
        self, model: Any, source: str | Path | Mapping[str, Any] | HardKVConfig, *, max_tokens: int | None = None
    ) -> None:
        ready = load_config(source)
        geometry = read_geometry(model)
        super().__init__(len(geometry.windows))
        costs = measure_costs(geometry.device, geometry.dtype)
        parts = ready.components if ready.config.compression else None
        self._cache = CascadeCache(geometry, ready.config.cache, parts, costs)
        self._pool_bytes = ready.config.cache.pool_bytes
        self._max_tokens = max_tokens
        self._rows: list[Cascade] = []
        self._padding: list[int] = []
        self._seen = 0
        self._arriving = 0
        bridge(model)

    @property
    def seen_tokens(self) -> int:
        return self._seen

    @property
    def telling(self) -> Sequence[nn.Module]:
        return self._cache.telling

    @property
    def kv_bytes(self) -> int:
        """Physical bytes in use."""
        return self._cache.kv_bytes if self._rows else 0

    def kept_tokens(self) -> Tensor:
        """Tokens attention sees per row, full-attention layer and KV head, `[B, L, H]` int64."""
        return torch.stack([cascade.kept_tokens() for cascade in self._rows])

    def reset(self) -> None:
        """Free everything; the cache can then serve another call."""
        for cascade in self._rows:
            self._cache.close(cascade)
        self._cache.release()
        self._rows, self._padding, self._seen = [], [], 0

    @torch.no_grad()
    def begin_forward(self, token_ids: Tensor, attention_mask: Tensor | None) -> HardKVCache:
        batch, tokens = token_ids.shape
        if not self._rows:
            self._open(batch, tokens, attention_mask)
        elif batch != len(self._rows):
            raise InputError(
                f"this cache holds {len(self._rows)} rows, {batch} came; make a new HardKVCache for each call"
            )
        elif tokens != 1:
            raise InputError(
                f"this cache has seen {self._seen} tokens and takes one token per step from here on, {tokens} came; "
                "make a new HardKVCache for a new prompt"
            )
        else:
            for cascade in self._rows:
                if cascade.dense.full:
                    self._cache.compress(cascade)
            self._cache.step.bind(self._rows)
            self._cache.step.open()
        self._arriving = tokens
        return self

    @torch.no_grad()
    def attend(self, call: AttentionCall, sliding_window: int | None) -> Tensor:
        """Serve one layer's attention, out `[B, S, H*G, D]`."""
        if self._seen:
            return self._cache.attend(call)
        out = torch.zeros_like(call.query).transpose(1, 2).contiguous()
        for row, (cascade, skip) in enumerate(zip(self._rows, self._padding, strict=True)):
            cut = (slice(row, row + 1), slice(None), slice(skip, None))
            hidden = None if call.hidden_states is None else call.hidden_states[row : row + 1, skip:]
            one = replace(
                call, query=call.query[cut], keys=call.keys[cut], values=call.values[cut], hidden_states=hidden
            )
            out[row : row + 1, skip:] = self._cache.prefill_attend(cascade, one)
        return out

    @torch.no_grad()
    def end_forward(self) -> None:
        if not self._seen:
            for cascade in self._rows:
                self._cache.end_prefill(cascade)
        else:
            self._cache.step.close()
            self._cache.step.advance()
            for error in self._cache.step.failures.values():
                raise error
        self._seen += self._arriving

    def _open(self, batch: int, tokens: int, attention_mask: Tensor | None) -> None:
        padding = [0] * batch
        if attention_mask is not None:
            mask = attention_mask.bool()
            padding = (tokens - mask.sum(-1)).tolist()
            expected = torch.arange(tokens, device=mask.device) >= torch.tensor(padding, device=mask.device)[:, None]
            if not torch.equal(mask, expected):
                raise InputError("HardKVCache expects padding on the left: set tokenizer.padding_side = 'left'")
            if tokens in padding:
                raise InputError(f"row {padding.index(tokens)} of the batch is padding only")
        room = self._max_tokens or tokens + _ROOM_TOKENS
        shared = self._cache.admission.shared_bytes
        if shared is not None and self._cache.admission.share_out([room] * batch, shared) < batch:
            raise CapacityError(
                f"{batch} rows of {room} tokens do not fit in the {shared:,} bytes of the budget at once; raise "
                "budget.total or lower budget.least_tokens"
            )
        pages = batch * self._cache.admission.sequence_pages(room)
        if self._pool_bytes is not None and pages * self._cache.admission.page_bytes > self._pool_bytes:
            raise CapacityError(
                f"{batch} rows of {room} tokens need {pages * self._cache.admission.page_bytes:,} bytes of pages; "
                f"cache.pool_bytes is {self._pool_bytes:,}"
            )
        self._cache.prepare(pages, batch, self._cache.admission.head_pages(room))
        try:
            for _ in range(batch):
                self._rows.append(self._cache.open(room))
        except HardKVError:
            self.reset()
            raise
        self._padding = padding
        for cascade, skip in zip(self._rows, padding, strict=True):
            self._cache.begin_prefill(cascade, tokens - skip)
