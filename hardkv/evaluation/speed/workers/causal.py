"""What peers on plain transformers share: one forward pass for the prompts, then one for each step, greedy."""

from __future__ import annotations

import importlib.util
import time
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any

import torch
from serving import Peer, Reply, StepClock, distances  # type: ignore[import-not-found]  # beside this file
from transformers import AutoModelForCausalLM, DynamicCache


class CausalPeer(Peer):  # type: ignore[misc]  # not found by mypy, see above
    """A model of transformers with a cache of somebody's.

    Called directly, not through `generate`, whose own work between two steps would count against the peer.
    """

    packages: tuple[str, ...] = ("torch", "transformers")
    model: Any
    cache: Any = None
    chosen: Any = None
    """Next token of every sequence `[B]`."""

    @abstractmethod
    def new_cache(self, tokens: int) -> Any:
        """A cache for sequences of up to `tokens`."""

    def prepare(self, settings: dict[str, Any], prompt_tokens: int) -> None:
        """Get ready for prompts of so many tokens."""

    def compressing(self) -> AbstractContextManager[Any]:
        """What the prompts and the steps run in."""
        return nullcontext()

    def compressed(self) -> Reply:
        """`compression_seconds` and `passes` since the last call, and `mean_tokens` that they left."""
        return {"compression_seconds": 0.0, "passes": 0, "mean_tokens": None}

    def held(self) -> list[Any]:
        """Tensors that are kept for the cache besides K and V."""
        return []

    def load(self, request: dict[str, Any]) -> Reply:
        torch.set_num_threads(request["threads"])
        self.settings, self.device = request["settings"], torch.device(request["device"])
        dtype = getattr(torch, request["dtype"])
        model: Any = AutoModelForCausalLM.from_pretrained(request["folder"], dtype=dtype)
        self.model = model.to(self.device).eval()
        if request["packer"] is not None:
            _module(request["packer"]).pack_linears(self.model)
        return {"versions": {name: version(name) for name in self.packages}}

    @torch.inference_mode()
    def start(self, request: dict[str, Any]) -> Reply:
        prompts = torch.tensor(request["prompts"], device=self.device)
        self.context = prompts.shape[1]
        self.prepare(self.settings, self.context)
        self.cache = self.new_cache(self.context + request["new_tokens"])
        self.active = self.compressing()
        self.active.__enter__()
        self.seen = 0
        started = time.perf_counter()
        self._feed(prompts)
        seconds = time.perf_counter() - started
        return {"prefill_seconds": seconds, "kv_bytes": self._kv_bytes(), **self.compressed()}

    @torch.inference_mode()
    def steps(self, request: dict[str, Any]) -> Reply:
        clock = StepClock()
        for _ in range(request["count"]):
            self._feed(self.chosen[:, None])
            clock.mark()
        return {**clock.reply(), "kv_bytes": self._kv_bytes(), **self.compressed()}

    def stop(self, request: dict[str, Any]) -> Reply:
        if self.cache is not None:
            self.active.__exit__(None, None, None)
        self.cache = self.chosen = None
        return {}

    @torch.inference_mode()
    def force(self, request: dict[str, Any]) -> Reply:
        full, rows = [], []
        for prompt, fed in zip(request["prompts"], request["continuations"], strict=True):
            ids = torch.tensor([prompt + fed[:-1]], device=self.device)
            logits = self.model(ids, past_key_values=DynamicCache(), logits_to_keep=len(fed) - 1).logits[0]
            full.append(torch.log_softmax(logits.float(), -1).cpu())
            self.start({"prompts": [prompt], "new_tokens": len(fed)})
            mine = []
            for token in fed[:-1]:
                logits = self._feed(torch.tensor([[token]], device=self.device))
                mine.append(torch.log_softmax(logits[0].float(), -1).cpu())
            rows.append(torch.stack(mine))
            mean = self.compressed()["mean_tokens"]
            self.stop({})
        return {**distances(full, rows), "mean_tokens": mean}

    def _feed(self, tokens: Any) -> Any:
        """Run the model over `tokens [B, S]`, the next ones of every sequence; gives the last logits `[B, V]`."""
        positions = torch.arange(self.seen, self.seen + tokens.shape[1], device=self.device)[None]
        output = self.model(
            tokens, past_key_values=self.cache, position_ids=positions, use_cache=True, logits_to_keep=1
        )
        self.seen += tokens.shape[1]
        logits = output.logits[:, -1]
        self.chosen = logits.argmax(-1)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return logits

    def _kv_bytes(self) -> int:
        layers = [tensor for layer in self.cache.layers for tensor in (layer.keys, layer.values)]
        return sum(int(tensor.untyped_storage().nbytes()) for tensor in [*layers, *self.held()])


def _module(path: str) -> Any:
    """A module by its file, which alone is read."""
    spec = importlib.util.spec_from_file_location("packer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
