"""Decode with a compressed KV cache and with the same runtime uncompressed, on a real model, side by side.

The model answers a question about a document of some 6,000 tokens. Both runs decode the same number of tokens, past the
end of the answer, so that their speeds can be compared; the answer is shown up to its end. Fidelity is measured at
equal inputs: both caches are fed the same text, and their predictions compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

from hardkv import HardKVRuntime, __version__
from hardkv.model_adapter import load_model

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "examples" / "document.txt"
QUESTIONS = ROOT / "examples" / "questions.json"
FIDELITY_TEXT = ROOT / "hardkv" / "evaluation" / "texts" / "report.txt"
PROMPT = "Read the document and answer the question.\n\n{document}\n\nQuestion: {question}"
WAYS = {"compressed": True, "uncompressed": False}


@dataclass
class Measured:
    """What one of the two runs showed."""

    text: str
    tokens_per_s: float
    prefill_s: float
    decode_s: float
    compression_s: float
    kv_bytes: int
    kv_bytes_peak: int
    mean_tokens: float
    generated_tokens: int
    prompt_tokens: int


class Steps:
    """A bar on stderr; where there is no terminal, a line at each step's start."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.console = console
        self.task = self.bar.add_task("", total=None)

    def begin(self, what: str, total: int | None = None) -> None:
        self.bar.reset(self.task, description=what, total=total)
        if not self.console.is_terminal:
            self.console.print(what)

    def update(self, done: int, total: int) -> None:
        self.bar.update(self.task, completed=done, total=total)


def answer(runtime: HardKVRuntime, question: str, new_tokens: int, name: str, steps: Steps) -> Measured:
    """Ask the question, and decode `new_tokens` whatever the answer's length."""
    content = PROMPT.format(document=DOCUMENT.read_text(encoding="utf-8").strip(), question=question)
    steps.begin(f"{name}: reading the document")
    ids: list[int] = []
    chat = [{"role": "user", "content": content}]
    for piece in runtime.stream(chat, max_new_tokens=new_tokens, ignore_eos=True, progress=steps.update):
        if not ids:
            steps.begin(f"{name}: decoding", new_tokens)
        ids += [] if piece.token_id is None else [piece.token_id]
        steps.update(len(ids), new_tokens)
    stats = runtime.stats()
    end = runtime.tokenizer.eos_token_id
    until = ids.index(end) if end in ids else len(ids)
    kept = stats.tokens_kept
    return Measured(
        text=str(runtime.tokenizer.decode(ids[:until])).strip(),
        tokens_per_s=len(ids) / (stats.seconds["decode"] + stats.seconds["compression"]),
        prefill_s=stats.seconds["prefill"] + stats.seconds["prefill_compression"],
        decode_s=stats.seconds["decode"],
        compression_s=stats.seconds["compression"],
        kv_bytes=stats.kv_bytes,
        kv_bytes_peak=stats.kv_bytes_peak,
        mean_tokens=stats.mean_tokens_after_compression or sum(map(sum, kept)) / sum(map(len, kept)),
        generated_tokens=len(ids),
        prompt_tokens=stats.tokens_seen - len(ids) + 1,
    )


def fidelity(runtimes: dict[str, HardKVRuntime], prompt_tokens: int, fed_tokens: int, steps: Steps) -> dict[str, float]:
    """Mean KL(uncompressed || compressed) in nats per token, and how often the likeliest token is the same."""
    ids = runtimes["compressed"].tokenizer(FIDELITY_TEXT.read_text(encoding="utf-8"))["input_ids"]
    prompt, fed = ids[:prompt_tokens], ids[prompt_tokens : prompt_tokens + fed_tokens]
    rows = {}
    for name, runtime in runtimes.items():
        steps.begin(f"{name}: predicting {len(fed)} given tokens")
        # The first prediction comes from the prefill, which attends the whole prompt.
        rows[name] = runtime.teacher_force([prompt], [fed])[0][1:]
    full, compressed = rows["uncompressed"], rows["compressed"]
    return {
        "kl": float((full.exp() * (full - compressed)).sum(-1).mean()),
        "top1_agreement": float((full.argmax(-1) == compressed.argmax(-1)).float().mean()),
        "mean_tokens": runtimes["compressed"].stats().mean_tokens_after_compression or float(len(prompt)),
        "prompt_tokens": len(prompt),
        "fed_tokens": len(fed),
    }


def side_by_side(results: dict[str, Measured], equal: dict[str, float]) -> Table:
    """Give the table that the demo prints."""
    left, right = results["compressed"], results["uncompressed"]

    def mib(count: int) -> str:
        return f"{count / 2**20:.1f} MiB"

    table = Table("", *results, "ratio", show_lines=True)
    table.add_row("answer", left.text, right.text, "")
    rate = left.tokens_per_s / right.tokens_per_s
    table.add_row("decode, tokens/s", f"{left.tokens_per_s:.1f}", f"{right.tokens_per_s:.1f}", f"{rate:.2f} x")
    alone, other_alone = left.generated_tokens / left.decode_s, right.generated_tokens / right.decode_s
    table.add_row("without compression passes", f"{alone:.1f}", f"{other_alone:.1f}", f"{alone / other_alone:.2f} x")
    table.add_row("compression passes", f"{left.compression_s:.1f} s", f"{right.compression_s:.1f} s", "")
    table.add_row("prefill", f"{left.prefill_s:.1f} s", f"{right.prefill_s:.1f} s", "")
    for label, mine, other in (
        ("KV cache, physical", left.kv_bytes, right.kv_bytes),
        ("KV cache, peak", left.kv_bytes_peak, right.kv_bytes_peak),
    ):
        table.add_row(label, mib(mine), mib(other), f"1 / {other / mine:.1f}")
    kept = left.mean_tokens / right.mean_tokens
    table.add_row("tokens kept per head", f"{left.mean_tokens:.0f}", f"{right.mean_tokens:.0f}", f"{kept:.0%}")
    table.add_row("fidelity: KL", f"{equal['kl']:.4f} nats", "0", "")
    table.add_row("fidelity: same top token", f"{equal['top1_agreement']:.1%}", "100%", "")
    return table


def parse() -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="hub id, folder, GGUF file or smollm2 (default)")
    parser.add_argument("--dtype", default="bfloat16", help="precision of weights and cache (default bfloat16)")
    parser.add_argument("--mean-tokens", type=int, default=1024, help="mean tokens kept per head (default 1024)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens to decode in each run (default 128)")
    parser.add_argument("--question", type=int, default=0, help="which question of questions.json (default 0)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results to this file as well")
    return parser.parse_args()


def main() -> None:
    """Load the model once, run both ways, compare, print."""
    options = parse()
    # Its bar would mix with ours.
    transformers_logging.disable_progress_bar()
    asked = json.loads(QUESTIONS.read_text(encoding="utf-8"))[options.question]
    start = time.perf_counter()
    base = {
        "model": {"id": options.model, "dtype": options.dtype},
        "budget": {"name": "threshold", "mean_tokens": options.mean_tokens},
    }
    steps = Steps(Console(stderr=True))
    with steps.bar:
        steps.begin(f"loading {options.model}")
        loaded = load_model(options.model, options.dtype, "cpu", pack_weights=True)
        runtimes = {
            name: HardKVRuntime.from_config({**base, "compression": on}, loaded=loaded) for name, on in WAYS.items()
        }
        results = {
            name: answer(runtime, asked["question"], options.max_new_tokens, name, steps)
            for name, runtime in runtimes.items()
        }
        equal = fidelity(runtimes, 1500, 64, steps)
    seconds = time.perf_counter() - start
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(f"Question about a document of {results['compressed'].prompt_tokens:,} tokens: {asked['question']}")
    console.print(f"Expected in the answer: {asked['answer']}")
    console.print(side_by_side(results, equal))
    console.print(
        f"{options.model}, {options.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}; tokens/s over"
        f" {options.max_new_tokens} tokens, compression passes in the time; prefill with its selection. Fidelity over"
        f" {equal['fed_tokens']} tokens after {equal['prompt_tokens']:,} of {FIDELITY_TEXT.name}, kept:"
        f" {equal['mean_tokens']:.0f} per head. {seconds:.0f} s in all.",
        highlight=False,
    )
    if options.json:
        report: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "question": asked["question"],
            "expected": asked["answer"],
            **{name: vars(result) for name, result in results.items()},
            "fidelity": equal,
            "seconds": seconds,
            "versions": {"hardkv": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
