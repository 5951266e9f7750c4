"""What every operator of the kernels is asked; needs torch alone."""

from __future__ import annotations

from typing import Any

import torch


def check_operator(operator: Any, arguments: tuple[Any, ...]) -> None:
    """Torch's own rules: schema (what is mutated), autograd registration, and the fake's shapes, dtypes and strides."""
    outcome = torch.library.opcheck(operator, arguments)
    assert set(outcome.values()) == {"SUCCESS"}
    assert len(outcome) == 4
