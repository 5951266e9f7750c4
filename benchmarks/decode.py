"""Decode speed and physical KV bytes: compressed, the same runtime uncompressed, and transformers' default cache.

All three decode the same prompts with the same weights, one after the other in this process. A figure is the median
over blocks of one interval of steps; hardkv's blocks contain their compression passes. Prefill is not part of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from transformers import StoppingCriteria, StoppingCriteriaList

from hardkv import HardKVRuntime, __version__
from hardkv.evaluation import bundled_texts
from hardkv.model_adapter import LoadedModel, load_model

ROOT = Path(__file__).parent.parent
CONSOLE = Console(stderr=True)


def contexts(loaded: LoadedModel, batch: int, tokens: int) -> list[list[int]]:
    """Different contexts: windows over all shipped texts end to end, each starting elsewhere."""
    paths = [*bundled_texts(), ROOT / "examples" / "document.txt"]
    ids: list[int] = []
    for path in paths:
        ids += loaded.tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
    ring = ids * (1 + (tokens + len(ids)) // len(ids))
    return [ring[start : start + tokens] for start in (index * len(ids) // batch for index in range(batch))]


def block_tokens_per_second(step_seconds: list[float], batch: int, interval: int) -> float:
    """Median over whole blocks of `interval` steps; over single steps when there is no whole block."""
    blocks = [step_seconds[i : i + interval] for i in range(0, len(step_seconds) - interval + 1, interval)]
    if not blocks:
        return batch / statistics.median(step_seconds)
    return batch / statistics.median(sum(block) / len(block) for block in blocks)


def run_hardkv(
    loaded: LoadedModel, config: dict[str, Any], prompts: list[list[int]], new_tokens: int, label: str
) -> Any:
    """Statistics of one run of the runtime."""
    runtime = HardKVRuntime.from_config(config, loaded=loaded)
    with Progress(console=CONSOLE, transient=True) as bar:
        task = bar.add_task(f"{label}: prefill", total=len(prompts))
        done = 0

        def progress(chunk: int, chunks: int) -> None:
            nonlocal done
            bar.update(task, completed=done + chunk / chunks)
            done += chunk == chunks

        runtime.generate(prompts, max_new_tokens=new_tokens, ignore_eos=True, progress=progress)
    return runtime.stats()


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """Notes the time after every token; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def run_transformers(loaded: LoadedModel, prompts: list[list[int]], new_tokens: int) -> list[float]:
    """Seconds of every decode step of `model.generate` with its default cache."""
    ids = torch.tensor(prompts, device=loaded.model.device)
    clock = _Clock()
    loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]


def main() -> None:
    """Parse, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--context", type=int, default=7000, help="prompt tokens of each")
    parser.add_argument("--mean-tokens", type=int, default=1024)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=3, help="blocks of one interval of steps, for each runtime")
    parser.add_argument("--transformers-steps", type=int, default=12, help="0 skips transformers")
    parser.add_argument("--no-pack", action="store_true", help="plain weights for all three (see model.pack_weights)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    loaded = load_model(options.model, options.dtype, options.device, pack_weights=not options.no_pack)
    prompts = contexts(loaded, options.batch, options.context)
    steps = options.blocks * options.interval
    base: dict[str, Any] = {
        "model": {"id": options.model, "dtype": options.dtype, "device": options.device},
        "cache": {"interval": options.interval},
        "budget": {"name": "threshold", "mean_tokens": options.mean_tokens},
    }
    measure: Callable[[list[float]], float] = lambda seconds: block_tokens_per_second(  # noqa: E731 (one use, one line)
        seconds, options.batch, options.interval
    )
    compressed = run_hardkv(loaded, base, prompts, steps + 1, "hardkv")
    uncompressed = run_hardkv(loaded, {**base, "compression": False}, prompts, steps + 1, "uncompressed")
    tokens_per_s = {"hardkv": measure(compressed.step_seconds), "uncompressed": measure(uncompressed.step_seconds)}
    if options.transformers_steps:
        CONSOLE.print("transformers: prefill and a few steps ...")
        seconds = run_transformers(loaded, prompts, options.transformers_steps + 1)
        tokens_per_s["transformers"] = options.batch / statistics.median(seconds)

    stock = tokens_per_s.get("transformers")
    against_stock = None if stock is None else tokens_per_s["hardkv"] / stock
    report = {
        "command": " ".join(["python", *sys.argv]),
        "tokens_per_s": tokens_per_s,
        "ratio_vs_uncompressed": tokens_per_s["hardkv"] / tokens_per_s["uncompressed"],
        "ratio_vs_transformers": against_stock,
        "kv_bytes": {"hardkv": compressed.kv_bytes, "uncompressed": uncompressed.kv_bytes},
        "kv_bytes_peak": {"hardkv": compressed.kv_bytes_peak, "uncompressed": uncompressed.kv_bytes_peak},
        "kv_bytes_share": compressed.kv_bytes / uncompressed.kv_bytes,
        "seconds_compression": compressed.seconds["compression"],
        "seconds": {"hardkv": compressed.seconds, "uncompressed": uncompressed.seconds},
        "median_step_ms": {
            "hardkv": 1e3 * statistics.median(compressed.step_seconds),
            "uncompressed": 1e3 * statistics.median(uncompressed.step_seconds),
        },
        "mean_tokens": compressed.mean_tokens_after_compression,
        "batch": options.batch,
        "context_tokens": options.context,
        "interval": options.interval,
        "decode_steps": steps,
        "dtype": options.dtype,
        "packed_weights": not options.no_pack,
        "versions": {
            "hardkv": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
    }
    for name, speed in tokens_per_s.items():
        print(f"{name:<14}{speed:>8.1f} tokens/s", end="")
        print(f"{report['kv_bytes'][name] / 2**20:>10.1f} MiB of KV" if name in report["kv_bytes"] else "")
    beside = "" if against_stock is None else f", hardkv / transformers {against_stock:.2f} x"
    print(
        f"hardkv / uncompressed {report['ratio_vs_uncompressed']:.2f} x{beside}, "
        f"KV bytes {report['kv_bytes_share']:.3f} of uncompressed"
    )
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
