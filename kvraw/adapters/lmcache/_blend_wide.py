"""Keys whose type is not that of their cosines (FP8 beside floats): widened, turned in the wider type, narrowed again.

Torch does both conversions, on the stream that is current; the keys carry no scale, with which a rotation commutes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from kvraw.adapters.deferred_errors import Sink
from kvraw.arrays import TensorView
from kvraw.copying.device_state import DeviceState
from kvraw.copying.launch import Launch
from kvraw.rope.rotate import rerotate_keys
from kvraw.runtime.completion import Operation

__all__ = ["WideTurn"]


class _Bytes:
    """Memory of a device as torch takes it in."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def _tensor(key: TensorView, dtype: str) -> Any:
    """Keys as a torch tensor over their memory."""
    import torch

    nbytes = sum((n - 1) * step for n, step in zip(key.shape, key.strides, strict=True)) + key.itemsize
    if key.device is None:
        flat = torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(key.address)))
    else:
        flat = torch.as_tensor(_Bytes(key.address, nbytes), device=torch.device("cuda", key.device))
    return flat.view(getattr(torch, dtype)).as_strided(key.shape, [step // key.itemsize for step in key.strides])


class WideTurn:
    """A rotation of one slot's keys, ready: to be enqueued, or called.

    Parameters
    ----------
    key, cache : TensorView
        The elements that turn, [layers, tokens, heads, rotary dimension], and the table.
    types : tuple of str
        Those of the keys and of the table.
    old, new : int
        The positions of the first token.
    neox : bool
        As for `kvraw.rope.rotate.rerotate_keys`.
    launch_for : callable
        The launch for keys like these that are dense and of the table's type.
    """

    __slots__ = ("_cache", "_key", "_launch_for", "_neox", "_new", "_old", "_types")

    def __init__(
        self,
        key: TensorView,
        cache: TensorView,
        types: tuple[str, str],
        old: int,
        new: int,
        neox: bool,
        launch_for: Callable[[TensorView], Launch],
    ) -> None:
        self._key, self._cache, self._types = key, cache, types
        self._old, self._new, self._neox, self._launch_for = old, new, neox, launch_for

    def _widened(self) -> tuple[Any, Any, TensorView]:
        import torch

        keys = _tensor(self._key, self._types[0])
        wide = keys.to(getattr(torch, self._types[1])).contiguous()
        size = int(wide.element_size())
        strides = tuple(int(s) * size for s in wide.stride())
        return keys, wide, TensorView(int(wide.data_ptr()), self._key.shape, strides, size, self._key.device, wide)

    def __call__(self) -> None:
        """Turn keys in host memory."""
        keys, wide, view = self._widened()
        tokens = self._key.shape[1]
        positions = range(self._old, self._old + tokens), range(self._new, self._new + tokens)
        rerotate_keys(view, *positions, self._cache, neox=self._neox, dtype=self._types[1])
        keys.copy_(wide)

    def enqueue(self, state: DeviceState, operation: Operation, capturing: bool, on_error: Sink) -> None:
        """Enqueue it on the operation's stream, which is torch's current one; the device's context is current."""
        keys, wide, view = self._widened()
        self._launch_for(view).start(operation.stream, (), capturing, values=(view.address, self._old, self._new))
        keys.copy_(wide)
