"""A dispatch mode that refuses whatever makes the host wait for the device."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoSync(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Refuses every operation that would make the host wait for the device, but for `tolist`, which no mode sees."""

    forbidden = ("_local_scalar_dense", "item", "nonzero", "masked_select", "lift_fresh", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        assert name not in self.forbidden, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            assert not masks, "indexing by a mask waits for the device"
        return func(*args, **(kwargs or {}))
