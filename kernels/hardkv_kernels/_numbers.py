"""Numbers that keep float32 exponentials finite and fast."""

from __future__ import annotations

import math

import torch

LOWEST = torch.finfo(torch.float32).min
"""Stands in for -inf where minus -inf would follow."""
NEGLIGIBLE = -60.0
"""Logits this far below the top add nothing to a float32 sum; their exponentials would end as slow denormals."""
FLUSHED = math.exp(NEGLIGIBLE) * 1.001
"""Just above the exponential of `NEGLIGIBLE`, however that is rounded."""
