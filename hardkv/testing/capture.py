"""Whether a function could run inside a captured graph: no host sync, no shape that depends on data, no host copy."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

_KEEP_ON_DEVICE = "keep the number on the device: compare, select and add as tensors"
_MASK = "keep the shape: `torch.where` or `masked_fill` instead of picking elements by a mask"
_LITERAL = "make it on the device: `torch.full`, `torch.arange(..., device=x.device)` or `new_zeros`, or use a number"
_COPY = "stay on the input's device: give `device=x.device` to what you create, and drop `.cpu()` and `.to(...)`"

_CURES = {
    "_local_scalar_dense": _KEEP_ON_DEVICE,
    "item": _KEEP_ON_DEVICE,
    "is_nonzero": _KEEP_ON_DEVICE,
    "equal": _KEEP_ON_DEVICE,
    "nonzero": _MASK,
    "masked_select": _MASK,
    "unique_dim": _MASK,
    "_unique2": _MASK,
    "lift_fresh": _LITERAL,
}
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
_OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def assert_capture_safe(function: Callable[..., Any], *tensors: Tensor, elsewhere: bool = True) -> None:
    """Run `function(*tensors)` on tensors that hold no data, and refuse what waits for the device or leaves it.

    `elsewhere=False`: for a function that needs a real device, as it makes a `torch.Generator` or reads tensors of its
    own; copies between devices are then not seen.

    Raises:
        AssertionError: naming the operator, the line that called it and the cure.
    """
    # A CPU tensor shows what is made of Python data; a tensor elsewhere shows copies to and from the host.
    for device in ("cpu", "meta") if elsewhere else ("cpu",):
        with FakeTensorMode(allow_non_fake_inputs=device == "cpu") as fake:
            inputs = [_without_data(tensor, fake, device) for tensor in tensors]
            try:
                with _CaptureMode():  # type: ignore[no-untyped-call]  # torch does not annotate it
                    function(*inputs)
            except _NotCaptureSafeError as error:
                raise AssertionError(str(error)) from None
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                found = f"raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                raise AssertionError(
                    f"not capture-safe: {_place(frames)} {found}. Its tensors hold no data here, as while a graph is "
                    f"captured: {_KEEP_ON_DEVICE}; {_COPY}"
                ) from error


class _NotCaptureSafeError(Exception):
    pass


class _CaptureMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Refuses operators that wait for the device, that copy between devices, or whose shape depends on data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        cure = _CURES.get(name)
        if name in _INDEXING and any(index.dtype in (torch.bool, torch.uint8) for index in _indices(args)):
            name, cure = f"{name} by a mask", _MASK
        if name in ("_to_copy", "copy_") and _leaves_device(name, args, kwargs):
            name, cure = f"{name} between devices", _COPY
        if cure is not None:
            raise _NotCaptureSafeError(f"not capture-safe: {_place(traceback.extract_stack())} calls {name}; {cure}")
        return func(*args, **kwargs)


def _indices(args: Any) -> Iterable[Tensor]:
    return (index for index in args[1] if isinstance(index, Tensor))


def _leaves_device(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name == "copy_":
        return isinstance(args[1], Tensor) and bool(args[0].device.type != args[1].device.type)
    target = kwargs.get("device")
    return target is not None and bool(torch.device(target).type != args[0].device.type)


def _without_data(tensor: Tensor, mode: FakeTensorMode, device: str) -> Tensor:
    if device == "cpu":
        return mode.from_tensor(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _place(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line that is neither torch's nor ours."""
    own = [frame for frame in frames if not frame.filename.startswith((*_OUTSIDE, "<"))]
    frame = own[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} `{frame.line}`"
