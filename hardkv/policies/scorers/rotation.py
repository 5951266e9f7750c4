"""Rotary embedding by 2 x 2 blocks: turns vectors by angles, and by the mean of many rotations."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(vectors: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn pair (i, i + F) of `vectors [..., D]` by the block `[[c, -s], [s, c]]`, `cosine` and `sine [..., F]`.

    With `c, s` of one angle that is a rotation; with means of both over angles it is the mean of the rotations.
    Dims from 2 F on are passed unchanged.
    """
    pairs = cosine.shape[-1]
    first, second, rest = vectors[..., :pairs], vectors[..., pairs : 2 * pairs], vectors[..., 2 * pairs :]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), -1)


def rotate_by(vectors: Tensor, offsets: Tensor, frequencies: Tensor) -> Tensor:
    """Move `vectors [..., D]` on by `offsets [...]` positions, `frequencies [..., F]` in radians per position.

    A vector embedded at position p comes out as embedded at p + offset; an offset of -p takes the embedding off.
    """
    angles = offsets[..., None].float() * frequencies.float()
    return rotate(vectors, angles.cos(), angles.sin())


def mean_rotation(frequencies: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
    """Mean `(cosine, sine)`, both `[..., F]`, of the rotations by 1 to `horizon` positions."""
    steps = torch.arange(1, horizon + 1, device=frequencies.device)[:, None]
    angles = steps * frequencies.float()[..., None, :]  # [..., horizon, F]
    return angles.cos().mean(-2), angles.sin().mean(-2)
