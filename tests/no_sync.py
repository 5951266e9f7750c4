"""A dispatch mode that refuses whatever makes the host wait for the device."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class NoSync(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Refuses every operation that would make the host wait for the device."""

    forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        assert name not in self.forbidden, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))
