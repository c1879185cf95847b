"""Where a call happens: its device."""

from __future__ import annotations

import contextlib
from typing import Any

from kvraw.adapters.tensors import current_stream, torch_cuda
from kvraw.runtime.context import current_device
from kvraw.runtime.driver import driver_or_none

__all__ = ["current_stream", "device_index", "tensor_device", "this_device"]

_indices: dict[Any, int | None] = {}  # of devices that were named by something other than a number


def this_device() -> int:
    """The current device: torch's where it is in use, else the current context's, else 0."""
    cuda = torch_cuda()
    if cuda is not None:
        return int(cuda.current_device())
    found = current_device() if driver_or_none() is not None else None
    return 0 if found is None else found


def device_index(device: Any) -> int | None:
    """Number of a CUDA device, or None for the host; takes a torch device, its text, or a number."""
    if type(device) is int:
        return device
    try:
        return _indices[device]
    except (KeyError, TypeError):
        pass
    if device is None:
        return this_device()
    kind, index = getattr(device, "type", None), getattr(device, "index", None)
    if kind is None:
        kind, _, text = str(device).partition(":")
        index = int(text) if text else None
    if kind not in ("cpu", "cuda"):
        raise TypeError(f"device is {device}, must be a CUDA device or the CPU")
    if kind == "cpu":
        found = None
    elif index is None:
        return this_device()
    else:
        found = int(index)
    with contextlib.suppress(TypeError):  # what has no hash is read anew each time
        _indices[device] = found
    return found


def tensor_device(tensor: Any) -> int | None:
    """Device that holds a tensor; None for the host."""
    return device_index(tensor.device)
