"""How far a compressed cache moves the model's predictions from those of the full cache, at equal mean budget.

Every method runs in the same runtime on the same texts: the prompt is prefilled and compressed, then the next tokens
are fed (teacher forcing) and the predictions compared with those of the same runtime with every token kept. With
`--rounds 1` the prompt is compressed once and not again; with more, a compression precedes every block of tokens.
`hardkv compare` does the same for every method there is; this script keeps to a few, whose numbers the README shows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hardkv.config import HardKVConfig
from hardkv.errors import InputError
from hardkv.evaluation import (
    Bench,
    Method,
    bundled_texts,
    measure,
    measure_reference,
    provenance,
    read_workload,
    schedule,
)
from hardkv.model_adapter import load_model
from hardkv.registry import SLOTS, load_registry


def methods(mean_tokens: int) -> dict[str, Method]:
    """Every method by name; `default` is what hardkv ships."""
    shipped = {slot: getattr(HardKVConfig(), slot).model_dump() for slot in SLOTS.values()}
    uniform = {"name": "top_k", "mean_tokens": mean_tokens}
    threshold = {"name": "threshold", "mean_tokens": mean_tokens}
    changes: dict[str, dict[str, Any]] = {
        "default": {"budget": threshold},
        "snapkv_topk": {"scorer": {"name": "snapkv", "rows": 32, "kernel": 7}, "budget": uniform},
        "window_max_threshold": {"scorer": {"name": "window_max"}, "budget": threshold},
        "window_max_topk": {"scorer": {"name": "window_max"}, "budget": uniform},
        "h2o_topk": {"scorer": {"name": "h2o"}, "budget": uniform},
        "streaming_topk": {"scorer": {"name": "streaming"}, "budget": uniform},
    }
    return {name: Method(name, {**shipped, **change}) for name, change in changes.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--mean-tokens", type=int, default=192, help="mean tokens kept per head")
    parser.add_argument("--prompt-tokens", type=int, default=None, help="default 2048 for one round, 1024 for more")
    parser.add_argument("--fed-tokens", type=int, default=None, help="tokens fed after the prompt, for one round: 256")
    parser.add_argument("--rounds", type=int, default=1, help="compressions, each followed by --interval tokens if > 1")
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--methods", nargs="*", help="names to run besides default and snapkv_topk (default: all)")
    parser.add_argument("--texts", nargs="*", type=Path, default=bundled_texts())
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def run(bench: Bench, chosen: dict[str, Method]) -> dict[str, dict[str, Any]]:
    """Measure and print every method; one that fails ends the script."""
    reference = measure_reference(bench)
    results: dict[str, dict[str, Any]] = {}
    print(f"{'method':<24}{'KL':>8}{'top-1':>8}{'mean tokens':>13}{'compressions':>14}{'seconds':>9}")
    for name, method in chosen.items():
        row = measure(bench, reference, method)
        if row.kl is None:
            sys.exit(f"{name}: {row.note}")
        keys = ("kl", "top1_agreement", "mean_tokens", "compressions")
        results[name] = {key: getattr(row, key) for key in keys}
        print(
            f"{name:<24}{row.kl:>8.4f}{row.top1_agreement:>8.3f}{row.mean_tokens or float('nan'):>13.1f}"
            f"{row.compressions:>14}{row.seconds:>9.1f}",
            flush=True,
        )
    return results


def main() -> None:
    """Parse, measure, print a table, write JSON."""
    options = parse()
    config = HardKVConfig.model_validate({"model": {"id": options.model, "dtype": options.dtype}})
    loaded = load_model(options.model, options.dtype, "cpu")
    try:
        times = schedule(options.prompt_tokens, options.fed_tokens, options.rounds, options.interval)
        workload = read_workload(loaded.tokenizer, options.texts, times)
    except InputError as error:
        sys.exit(str(error))
    chosen = methods(options.mean_tokens)
    if options.methods is not None:
        chosen = {name: chosen[name] for name in dict.fromkeys(["default", "snapkv_topk", *options.methods])}
    results = run(Bench(loaded, config, load_registry(), workload, options.mean_tokens), chosen)
    ratio = results["default"]["kl"] / results["snapkv_topk"]["kl"]
    print(f"KL of default / KL of uniform SnapKV top-k: {ratio:.3f}")
    if options.json:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "methods": results,
            "ratio_kl_default_vs_snapkv_topk": ratio,
            "texts": list(workload.names),
            "prompt_tokens": times.prompt_tokens,
            "fed_tokens": times.fed_tokens,
            "rounds": options.rounds,
            "mean_tokens": options.mean_tokens,
            **provenance(loaded.model.device),
            "dtype": options.dtype,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
