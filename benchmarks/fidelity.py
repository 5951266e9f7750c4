"""How far a compressed cache moves the model's predictions from those of the full cache, at equal mean budget.

Every method runs in the same runtime on the same texts: the prompt is prefilled and compressed, then the next tokens
are fed (teacher forcing) and the predictions compared with those of the same runtime with every token kept. With
`--rounds 1` the prompt is compressed once and not again; with more, a compression precedes every block of tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from hardkv import HardKVRuntime, __version__
from hardkv.model_adapter import LoadedModel, load_model

TEXTS = Path(__file__).parent / "texts"


def methods(mean_tokens: int) -> dict[str, dict[str, Any]]:
    """Configuration overrides of every method, by name; `default` is what hardkv ships."""
    uniform = {"name": "top_k", "mean_tokens": mean_tokens}
    threshold = {"name": "threshold", "mean_tokens": mean_tokens}
    return {
        "default": {"budget": threshold},
        "snapkv_topk": {"scorer": {"name": "snapkv", "rows": 32, "kernel": 7}, "budget": uniform},
        "window_max_threshold": {"scorer": {"name": "window_max"}, "budget": threshold},
        "window_max_topk": {"scorer": {"name": "window_max"}, "budget": uniform},
        "h2o_topk": {"scorer": {"name": "h2o"}, "budget": uniform},
        "streaming_topk": {"scorer": {"name": "streaming"}, "budget": uniform},
    }


def run(loaded: LoadedModel, config: dict[str, Any], prompts: list[list[int]], fed: list[list[int]]) -> Any:
    """Log-probabilities after each fed token, and the runtime's statistics."""
    runtime = HardKVRuntime.from_config(config, loaded=loaded)
    rows = runtime.teacher_force(prompts, fed)
    return [row[1:] for row in rows], runtime.stats()


def compare(reference: list[torch.Tensor], rows: list[torch.Tensor]) -> dict[str, float]:
    """Mean KL(full || compressed) in nats per token, and how often the likeliest token is the same."""
    kl = [(full.exp() * (full - row)).sum(-1).mean() for full, row in zip(reference, rows, strict=True)]
    same = [(full.argmax(-1) == row.argmax(-1)).float().mean() for full, row in zip(reference, rows, strict=True)]
    return {"kl": float(torch.stack(kl).mean()), "top1_agreement": float(torch.stack(same).mean())}


def main() -> None:
    """Parse, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--mean-tokens", type=int, default=192, help="mean tokens kept per head")
    parser.add_argument("--prompt-tokens", type=int, default=None, help="default 2048 for one round, 1024 for more")
    parser.add_argument("--fed-tokens", type=int, default=256, help="tokens fed after the prompt, for one round")
    parser.add_argument("--rounds", type=int, default=1, help="compressions, each followed by --interval tokens if > 1")
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--methods", nargs="*", help="names to run besides default and snapkv_topk (default: all)")
    parser.add_argument("--texts", nargs="*", type=Path, default=sorted(TEXTS.glob("*.txt")))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    repeated = options.rounds > 1
    prompt_tokens = options.prompt_tokens or (1024 if repeated else 2048)
    fed_tokens = options.interval * options.rounds if repeated else options.fed_tokens
    cache = {"interval": options.interval if repeated else fed_tokens + 1}
    loaded = load_model(options.model, options.dtype, "cpu")
    prompts, fed = [], []
    for path in options.texts:
        ids = loaded.tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
        if len(ids) < prompt_tokens + fed_tokens:
            sys.exit(f"{path} has {len(ids)} tokens; {prompt_tokens + fed_tokens} are needed")
        prompts.append(ids[:prompt_tokens])
        fed.append(ids[prompt_tokens : prompt_tokens + fed_tokens])
    base = {"model": {"id": options.model, "dtype": options.dtype}, "cache": cache}
    reference, _ = run(loaded, {**base, "compression": False}, prompts, fed)

    chosen = methods(options.mean_tokens)
    if options.methods is not None:
        chosen = {name: chosen[name] for name in dict.fromkeys(["default", "snapkv_topk", *options.methods])}
    results: dict[str, dict[str, Any]] = {}
    print(f"{'method':<24}{'KL':>8}{'top-1':>8}{'mean tokens':>13}{'compressions':>14}{'seconds':>9}")
    for name, overrides in chosen.items():
        start = time.perf_counter()
        rows, stats = run(loaded, {**base, **overrides}, prompts, fed)
        result = {
            **compare(reference, rows),
            "mean_tokens": stats.mean_tokens_after_compression,
            "compressions": stats.compressions,
        }
        results[name] = result
        print(
            f"{name:<24}{result['kl']:>8.4f}{result['top1_agreement']:>8.3f}{result['mean_tokens']:>13.1f}"
            f"{result['compressions']:>14}{time.perf_counter() - start:>9.1f}",
            flush=True,
        )
    ratio = results["default"]["kl"] / results["snapkv_topk"]["kl"]
    print(f"KL of default / KL of uniform SnapKV top-k: {ratio:.3f}")
    if options.json:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "methods": results,
            "ratio_kl_default_vs_snapkv_topk": ratio,
            "texts": [path.name for path in options.texts],
            "prompt_tokens": prompt_tokens,
            "fed_tokens": fed_tokens,
            "rounds": options.rounds,
            "mean_tokens": options.mean_tokens,
            "versions": {
                "hardkv": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
            "dtype": options.dtype,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
