"""Memory of every kind to lay tensors into, and tensors without torch: what the adapters ask of one, and no more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvraw
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver

_KEPT: list[Memory] = []  # what nobody closes, until something is closed: nothing is pending then


class Memory:
    """Bytes in device memory, pinned memory or plain host memory, read and written whole."""

    def __init__(self, kind: str, data: np.ndarray, device: int | None) -> None:
        self.kind, self.device, self.nbytes = kind, device, data.nbytes
        self.where = device if kind == "device" else None
        if kind == "host":
            self._array = data.copy()
            self.address = int(self._array.ctypes.data)
            return
        assert device is not None
        self._pool = kvraw.HostPool(data.nbytes, device=device)
        self._array = self._pool.view(self._pool.address, data.nbytes)
        self._array[:] = data
        self.address = self._pool.address
        if kind == "device":
            self._buffer = kvraw.DeviceBuffer(data.nbytes, device)
            self.address = self._buffer.address
            self._copy(self.address, self._pool.address)

    def _copy(self, dst: int, src: int) -> None:
        assert self.device is not None
        with DeviceScope(self.device):
            driver().memcpy_async(dst, src, self.nbytes, 0)
            driver().stream_synchronize(0)

    def read(self) -> np.ndarray:
        if self.device is not None:
            with DeviceScope(self.device):
                driver().stream_synchronize(0)
        if self.kind == "device":
            self._copy(self._pool.address, self.address)
        return self._array.copy()

    def close(self) -> None:
        self.read()
        _KEPT.clear()
        if self.kind != "host":
            self._array = np.empty(0, np.uint8)
            self._pool.close()
        if self.kind == "device":
            self._buffer.close()


class Tensor:
    """A strided view of memory."""

    def __init__(
        self, memory: Memory, offset: int, shape: tuple[int, ...], item: int = 1, strides: tuple[int, ...] | None = None
    ) -> None:
        self.memory, self._offset, self.shape, self._item = memory, offset, shape, item
        self._strides = strides or tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
        self.dtype = {1: "torch.uint8", 2: "torch.bfloat16", 4: "torch.int32", 8: "torch.int64"}[item]
        self._version = 0

    @property
    def device(self) -> Any:
        where = self.memory.where
        return SimpleNamespace(type="cpu" if where is None else "cuda", index=where)

    def data_ptr(self) -> int:
        return self.memory.address + self._offset

    def stride(self, axis: int | None = None) -> Any:
        return self._strides if axis is None else self._strides[axis]

    def element_size(self) -> int:
        return self._item

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_contiguous(self) -> bool:
        return self._strides == tuple(math.prod(self.shape[k + 1 :]) for k in range(len(self.shape)))

    def __getitem__(self, at: Any) -> Tensor:
        assert at[0] == slice(None)  # tensor[:, k], which is all that is asked for
        offset = self._offset + at[1] * self._strides[1] * self._item
        keep = (0, *range(2, len(self.shape)))
        return Tensor(
            self.memory,
            offset,
            tuple(self.shape[k] for k in keep),
            self._item,
            tuple(self._strides[k] for k in keep),
        )

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> np.ndarray:
        at, size = self._offset, self.numel() * self._item
        return self.memory.read()[at : at + size].view({8: np.int64, 4: np.int32}[self._item])


def numbers(values: Any, kind: str, device: int | None) -> Tensor:
    """A 1-D int64 tensor."""
    array = np.array(values, np.int64)
    memory = Memory(kind, array.view(np.uint8) if array.size else np.zeros(8, np.uint8), device)
    _KEPT.append(memory)
    return Tensor(memory, 0, array.shape, 8)


class Laid:
    """Arrays side by side in one memory, with guard bytes around each; `arrays` is what the oracle works on.

    They hold `values` where those are given, else random bytes.
    """

    GUARD = 64

    def __init__(
        self,
        kind: str,
        shapes: list[tuple[int, ...]],
        device: int | None,
        seed: int,
        values: Sequence[np.ndarray] = (),
    ) -> None:
        self.offsets, at = [], self.GUARD
        for shape in shapes:
            self.offsets.append(at)
            at += -(-math.prod(shape) // 64) * 64 + self.GUARD
        self.expected = np.random.default_rng(seed).integers(0, 256, at, dtype=np.uint8)
        self.shapes = shapes
        self.arrays = [
            self.expected[o : o + math.prod(s)].reshape(s) for o, s in zip(self.offsets, shapes, strict=True)
        ]
        for array, given in zip(self.arrays, values, strict=False):
            array[:] = given.view(np.uint8).reshape(array.shape)
        self.memory = Memory(kind, self.expected, device)

    @property
    def addresses(self) -> list[int]:
        return [self.memory.address + o for o in self.offsets]

    def tensors(self, item: int = 1) -> list[Tensor]:
        return [
            Tensor(self.memory, o, (*s[:-1], s[-1] // item), item)
            for o, s in zip(self.offsets, self.shapes, strict=True)
        ]

    def check(self) -> None:
        np.testing.assert_array_equal(self.memory.read(), self.expected)

    def close(self) -> None:
        self.memory.close()
