"""Fit the linear networks of scorer `kvzap` for a model, by ridge regression on a few texts.

    python examples/fit_kvzap.py --out kvzap.safetensors text1.txt text2.txt

Then `scorer: {name: kvzap, weights: kvzap.safetensors}`. The target is the logarithm of what `attention_power` would
score with every later query of the text: the fourth-power mean of attention times the value's distance from the mean.
It also shows how a scorer that sees tokens as they enter can be used to look at a model.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hardkv import EnteringTokens, EntryScorer, HardKVRuntime
from hardkv.config import load_config
from hardkv.model_adapter import LoadedModel, load_model

LEAST_LATER_QUERIES = 128


class Recorder(EntryScorer):
    """Records hidden states and targets of every layer of a prompt; scores nothing."""

    name = "recorder"
    needs_hidden_states = True

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def enter(self, tokens: EnteringTokens) -> Tensor:
        count = tokens.keys.shape[2]
        if count > LEAST_LATER_QUERIES:
            judged = count - LEAST_LATER_QUERIES
            hidden = tokens.hidden_states[0, :judged].float()
            self.samples.setdefault(tokens.layer, []).append((hidden, target(tokens)[:, :judged].T))
        return torch.zeros(tokens.keys.shape[:3])


def target(tokens: EnteringTokens) -> Tensor:
    """Logarithm of each token's worth to the queries after it, `[H, N]`."""
    keys, values = tokens.keys[0].float(), tokens.values[0].float()  # [H, N, D]
    position = torch.arange(keys.shape[1])
    later = position[:, None] > position
    worth = torch.zeros(keys.shape[:2])
    for head in range(tokens.queries.shape[2]):
        logits = tokens.queries[0, :, head].float() @ keys.transpose(-1, -2) * keys.shape[-1] ** -0.5  # [H, N, N]
        causal = logits.masked_fill(position[:, None] < position, float("-inf"))
        powers = torch.softmax(causal, -1).pow(4) * later
        worth += powers.sum(-2) / later.sum(0).clamp_min(1)
    distance = torch.linalg.vector_norm(values - values.mean(-2, keepdim=True), dim=-1)
    return (worth.pow(0.25) * distance).clamp_min(1e-8).log()


def record(loaded: LoadedModel, prompts: list[list[int]], dtype: str) -> dict[int, list[tuple[Tensor, Tensor]]]:
    ready = load_config({"model": {"dtype": dtype}, "cache": {"prefill_chunk_tokens": 8192}})
    recorder = Recorder()
    runtime = HardKVRuntime(ready.config, replace(ready.components, scorer=recorder), loaded)
    for prompt in prompts:
        runtime.generate(prompt, max_new_tokens=1, ignore_eos=True)
    return recorder.samples


def fit(samples: list[tuple[Tensor, Tensor]], ridge: float) -> tuple[Tensor, Tensor]:
    """Weights `[H, M]` and bias `[H]` that map hidden states to targets with least squares."""
    hidden = torch.cat([states for states, _ in samples]).double()
    wanted = torch.cat([values for _, values in samples]).double()
    centre, level = hidden.mean(0), wanted.mean(0)
    spread = hidden - centre
    gram = spread.T @ spread
    gram += ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weight = torch.linalg.solve(gram, spread.T @ (wanted - level)).T
    return weight.float(), (level - weight @ centre).float()


def explained(samples: list[tuple[Tensor, Tensor]], weight: Tensor, bias: Tensor) -> float:
    """Share of the targets' variance that the networks explain."""
    wanted = torch.cat([values for _, values in samples])
    found = torch.cat([states for states, _ in samples]) @ weight.T + bias
    return 1.0 - float((wanted - found).square().sum() / (wanted - wanted.mean(0)).square().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, help="text files; the last one is held out to judge the fit")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each text")
    parser.add_argument("--ridge", type=float, default=0.1, help="penalty, relative to the mean variance of a feature")
    parser.add_argument("--out", type=Path, default=Path("kvzap.safetensors"))
    options = parser.parse_args()
    if len(options.texts) < 2:
        sys.exit("give at least two texts: one is held out")
    loaded = load_model(options.model, options.dtype, "cpu")
    prompts = [
        loaded.tokenizer(path.read_text(encoding="utf-8"))["input_ids"][: options.tokens] for path in options.texts
    ]
    fitted, held_out = record(loaded, prompts[:-1], options.dtype), record(loaded, prompts[-1:], options.dtype)
    tensors: dict[str, Tensor] = {}
    shares = []
    for layer, samples in fitted.items():
        weight, bias = fit(samples, options.ridge)
        tensors[f"layers.{layer}.weight"], tensors[f"layers.{layer}.bias"] = weight, bias
        shares.append(explained(held_out[layer], weight, bias))
    save_file(tensors, options.out)
    print(f"{options.out}: {len(shares)} layers; variance explained on {options.texts[-1].name}: ", end="")
    print(f"mean {sum(shares) / len(shares):.2f}, least {min(shares):.2f}, most {max(shares):.2f}")


if __name__ == "__main__":
    main()
