"""How far one run's predictions are from another's, row by row, so that only one run's are held."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_KL, _SAME, _SURPRISE = range(3)


class Predictions:
    """Keeps a run's logits after each fed token, on the CPU in the model's precision `dtype`.

    Row 0 is left out here and in `Differences`: it comes from the prefill, which attends the whole prompt.
    """

    def __init__(self, fed: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        self.fed, self.dtype = fed, dtype
        self.logits: list[Tensor] = [torch.empty(0)] * len(fed)  # [T, vocabulary]
        self._surprise = [torch.zeros(len(tokens) - 1, dtype=torch.float64) for tokens in fed]

    def take(self, text: int, row: int, logits: Tensor) -> None:
        """Take the prediction `logits [vocabulary]` of `fed[text][row]`."""
        if row == 0:
            return
        if row == 1:
            rows = len(self.fed[text]) - 1
            self.logits[text] = torch.empty(rows, logits.shape[0], dtype=self.dtype)
        self.logits[text][row - 1] = logits
        self._surprise[text][row - 1] = -_log_softmax(logits)[self.fed[text][row]]

    @property
    def perplexity(self) -> float:
        """Of the fed tokens; each text counts the same."""
        return math.exp(float(torch.stack([text.mean() for text in self._surprise]).mean()))


class Differences:
    """Compares a run's predictions with `reference [T, vocabulary]` of each text, which `Predictions` has kept."""

    def __init__(self, reference: Sequence[Tensor], fed: Sequence[Sequence[int]]) -> None:
        self.reference, self.fed = reference, fed
        self.rows = [torch.zeros(len(tokens) - 1, 3, dtype=torch.float64) for tokens in fed]

    def take(self, text: int, row: int, logits: Tensor) -> None:
        """Take the prediction `logits [vocabulary]` of `fed[text][row]`."""
        if row == 0:
            return
        full, own = _log_softmax(self.reference[text][row - 1].to(logits.device)), _log_softmax(logits)
        numbers = self.rows[text][row - 1]
        numbers[_KL] = (full.exp() * (full - own)).sum()
        numbers[_SAME] = full.argmax() == own.argmax()
        numbers[_SURPRISE] = -own[self.fed[text][row]]

    def summary(self, names: Sequence[str], block: int) -> dict[str, Any]:
        """Mean `kl` = KL(reference || run) in nats per token, its standard error, by text, by `block` of tokens.

        Also `top1_agreement`, how often the likeliest is the same, and the run's `perplexity` of the fed tokens. Each
        text counts the same; the first block lacks no row, the last one the prediction after the last token.
        """
        means = torch.stack([rows.mean(0) for rows in self.rows])  # [texts, 3]
        kl = means[:, _KL]
        blocks = [torch.stack([part.mean() for part in torch.split(rows[:, _KL], block)]) for rows in self.rows]
        return {
            "kl": float(kl.mean()),
            "top1_agreement": float(means[:, _SAME].mean()),
            "kl_standard_error": float(kl.std()) / math.sqrt(len(kl)) if len(kl) > 1 else None,
            "kl_by_text": dict(zip(names, kl.tolist(), strict=True)),
            "kl_by_round": torch.stack(blocks).mean(0).tolist(),
            "perplexity": math.exp(float(means[:, _SURPRISE].mean())),
        }


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), -1)
