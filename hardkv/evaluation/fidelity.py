"""How far one set of predictions is from another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fidelity(reference: Sequence[Tensor], rows: Sequence[Tensor]) -> dict[str, float]:
    """Mean `kl` = KL(reference || rows) in nats per token, and `top1_agreement`: how often the likeliest is the same.

    Both hold log-probabilities `[T, vocabulary]`, one tensor per text; each text counts the same.
    """
    kl = [(full.exp() * (full - row)).sum(-1).mean() for full, row in zip(reference, rows, strict=True)]
    same = [(full.argmax(-1) == row.argmax(-1)).float().mean() for full, row in zip(reference, rows, strict=True)]
    return {"kl": float(torch.stack(kl).mean()), "top1_agreement": float(torch.stack(same).mean())}
