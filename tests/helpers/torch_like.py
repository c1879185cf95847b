"""Tensors as the adapters see them, in memory of the installed driver's device, of its pinned kind, or of the host."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvraw
from kvraw.adapters import tensors
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import PinnedBuffer


class Tensor:
    """A strided view of memory with the methods of a torch tensor that the adapters call."""

    def __init__(self, base: Memory, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> None:
        self.base, self.shape, self._strides, self.dtype = base, shape, strides, f"torch.{dtype}"
        self._offset, self._size = offset, np.dtype(dtype).itemsize
        self.is_cuda = base.kind == "device"
        self.device = SimpleNamespace(type="cuda" if self.is_cuda else "cpu", index=base.world.device)
        self._version = 0

    def data_ptr(self) -> int:
        return self.base.address + self._offset

    def get_device(self) -> int:
        return self.base.world.device if self.is_cuda else -1

    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def element_size(self) -> int:
        return self._size

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def storage_offset(self) -> int:
        return self._offset // self._size

    def untyped_storage(self) -> SimpleNamespace:
        return SimpleNamespace(nbytes=lambda: self.base.nbytes)

    def is_contiguous(self) -> bool:
        step = 1
        for n, s in zip(reversed(self.shape), reversed(self._strides), strict=True):
            if n != 1 and s != step:
                return False
            step *= n
        return True

    def __getitem__(self, at: int) -> Tensor:
        offset = self._offset + at * self._strides[0] * self._size
        return Tensor(self.base, offset, self.shape[1:], self._strides[1:], self.dtype.removeprefix("torch."))

    def select(self, axis: int, at: int) -> Tensor:
        """Without one axis: a view with gaps."""
        offset = self._offset + at * self._strides[axis] * self._size
        shape, strides = list(self.shape), list(self._strides)
        del shape[axis], strides[axis]
        return Tensor(self.base, offset, tuple(shape), tuple(strides), self.dtype.removeprefix("torch."))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        assert not self.is_cuda
        return (
            self.base.host()
            .view(self.dtype.removeprefix("torch."))[self.storage_offset() :][: self.numel()]
            .reshape(self.shape)
        )


class Memory:
    """One allocation: on the device, pinned, or pageable."""

    def __init__(self, world: TorchLike, kind: str, nbytes: int) -> None:
        self.world, self.kind, self.nbytes = world, kind, nbytes
        if kind == "device":
            self._owner: Any = kvraw.DeviceBuffer(nbytes, world.device)
            self.address = self._owner.address
        elif kind == "pinned":
            self._owner = PinnedBuffer(nbytes, world.device)
            self.address = self._owner.address
        else:
            self._owner = np.zeros(max(nbytes, 1), np.uint8)
            self.address = int(self._owner.ctypes.data)

    @property
    def device_address(self) -> int:
        """Where the device sees it: what a table must hold."""
        return int(self._owner.device_address) if self.kind == "pinned" else self.address

    def host(self) -> np.ndarray:
        assert self.kind != "device"
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address)).view(np.uint8)


class TorchLike:
    """Makes tensors; `device` None: on the host alone."""

    def __init__(self, device: int | None) -> None:
        self.device = device if device is not None else 0
        self.stream = kvraw.Stream(device) if device is not None else None
        self.kinds = ("device", "pinned") if device is not None else ("host", "host")

    def empty(self, kind: str, shape: tuple[int, ...], dtype: str = "uint8") -> Tensor:
        strides = tuple(int(np.prod(shape[k + 1 :], dtype=np.int64)) for k in range(len(shape)))
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return Tensor(Memory(self, kind, max(nbytes, 8)), 0, shape, strides, dtype)

    def put(self, kind: str, array: np.ndarray) -> Tensor:
        """A tensor of an array's values."""
        out = self.empty(kind, array.shape, str(array.dtype))
        self._copy(out.base, np.ascontiguousarray(array), to=True)
        return out

    def take(self, tensor: Tensor) -> np.ndarray:
        """A whole allocation as it is now, behind all that the stream was given."""
        array = np.zeros(tensor.shape, tensor.dtype.removeprefix("torch."))
        self.synchronize()
        self._copy(tensor.base, array, to=False)
        return array

    def table(self, kind: str, layers: list[Tensor]) -> Tensor:
        """A table of addresses as the device sees them (on the host: as the host does)."""
        host = kind != "device" and self.stream is None
        values = [(t.base.address if host else t.base.device_address) + t._offset for t in layers]
        return self.put(kind, np.array(values, np.uint64))

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def _copy(self, memory: Memory, array: np.ndarray, *, to: bool) -> None:
        if memory.kind != "device":
            mine, other = memory.host()[: array.nbytes], array.reshape(-1).view(np.uint8)
            mine[:], other[:] = (other, other) if to else (mine, mine)
            return
        assert self.stream is not None
        ends = (memory.address, int(array.ctypes.data))
        with DeviceScope(self.device):
            driver().memcpy_async(*(ends if to else ends[::-1]), array.nbytes, self.stream.handle)
        self.stream.synchronize()

    def install(self, monkeypatch: Any) -> TorchLike:
        """Make its stream the current one."""
        if self.stream is not None:
            handle = self.stream.handle
            monkeypatch.setattr(tensors, "_raw_stream", lambda device: handle)
        return self
