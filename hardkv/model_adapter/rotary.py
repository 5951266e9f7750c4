"""Finds how fast a layer's queries turn with their position, by looking at one token at two positions."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hardkv.policies.scorers.rotation import rotate_by

PROBED_POSITIONS = (0, 7)
_TOLERANCE = 0.03  # of the query's norm: bfloat16 rounds cosines, sines and products


def read_frequencies(model: PreTrainedModel, queries: Tensor) -> Tensor | None:
    """Radians per position of the rotary pairs (i, i + F), `[F]` float32; zeros where the layer does not rotate.

    `queries [H, 2, D]`: of one token, whose attention everywhere answered zero, at `PROBED_POSITIONS`. The model's own
    frequencies are tried on it; None where none of them explains what the layer does.
    """
    still, turned = queries[:, 0].float(), queries[:, 1].float()
    size = torch.linalg.vector_norm(still)
    if not bool(torch.isfinite(size)) or float(size) == 0.0:
        return None
    distance = torch.tensor(PROBED_POSITIONS[1] - PROBED_POSITIONS[0], device=still.device)
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq") and buffer.ndim == 1]
    candidates = [buffer.float() for buffer in buffers if 2 * len(buffer) <= still.shape[-1]]
    for frequencies in [*map(torch.zeros_like, candidates[:1]), *candidates]:
        gap = torch.linalg.vector_norm(rotate_by(still, distance, frequencies) - turned)
        if float(gap) <= _TOLERANCE * float(size):
            return frequencies.clone()
    return None
