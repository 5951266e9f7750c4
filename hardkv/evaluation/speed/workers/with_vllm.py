"""Decodes with vLLM's engine, stepped from here; it keeps every token, and has no forced tokens."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

from serving import Channel, Peer, Reply, StepClock, serve  # type: ignore[import-not-found]  # beside this file


class VLLMPeer(Peer):  # type: ignore[misc]  # not found by mypy, see above
    """One engine in this process, which steps only when it is told to."""

    def load(self, request: dict[str, Any]) -> Reply:
        settings = request["settings"]
        # Read when vllm is imported. With an engine in another process, steps would go on between two requests.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # as many threads as all the others: OMP_NUM_THREADS
        gib = -(-settings["tokens"] * settings["token_bytes"] // 2**30) + 1
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(gib)
        self.vllm = importlib.import_module("vllm")
        arguments = self.vllm.EngineArgs(
            model=request["folder"],
            dtype=request["dtype"],
            max_model_len=settings["longest"],
            max_num_seqs=settings["sequences"],
            enable_prefix_caching=False,
            async_scheduling=False,
        )
        self.engine = self.vllm.LLMEngine.from_engine_args(arguments)
        self.token_bytes, self.batch, self.names = settings["token_bytes"], 0, 0
        return {"versions": {"vllm": self.vllm.__version__}}

    def start(self, request: dict[str, Any]) -> Reply:
        rules = self.vllm.SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True)
        started = time.perf_counter()
        self.lengths: dict[str, int] = {}
        for ids in request["prompts"]:
            self.names += 1
            name = str(self.names)
            self.engine.add_request(name, {"prompt_token_ids": ids}, rules)
            self.lengths[name] = 0
        self.context, self.batch = len(request["prompts"][0]), len(request["prompts"])
        while not all(self.lengths.values()):
            self._step()
        return {"prefill_seconds": time.perf_counter() - started, "kv_bytes": self._kv_bytes(), **_NOTHING}

    def steps(self, request: dict[str, Any]) -> Reply:
        before, clock = sum(self.lengths.values()), StepClock()
        for _ in range(request["count"]):
            self._step()
            clock.mark()
        made = sum(self.lengths.values()) - before
        if made != request["count"] * self.batch:
            raise RuntimeError(f"{request['count']} steps of {self.batch} sequences gave {made} tokens")
        return {**clock.reply(), "kv_bytes": self._kv_bytes(), **_NOTHING}

    def stop(self, request: dict[str, Any]) -> Reply:
        self.engine.abort_request(list(self.lengths))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.lengths = {}
        return {}

    def force(self, request: dict[str, Any]) -> Reply:
        raise NotImplementedError("vllm keeps every token")

    def _step(self) -> None:
        for output in self.engine.step():
            self.lengths[output.request_id] = len(output.outputs[0].token_ids)

    def _kv_bytes(self) -> int:
        """Tokens held times their bytes: the engine reserves all its blocks at the start."""
        return int(sum(self.context + made for made in self.lengths.values()) * self.token_bytes)


_NOTHING: Reply = {"compression_seconds": 0.0, "passes": 0, "mean_tokens": None}

if __name__ == "__main__":
    serve(VLLMPeer(), Channel())
