"""The driver's functions as C callbacks that record their calls, and the real `CudaDriver` on top of them.

`Recorder.bindings` has the part of ``cuda.bindings`` that `CudaDriver` uses here; its functions and the callbacks make
the same entries, so what the compiled runner does is compared with what `CudaDriver`'s own methods do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvraw.runtime.driver import CudaDriver
from kvraw.runtime.driver_calls import Relaxed
from kvraw.runtime.driver_ctypes import EnqueueCalls

INT, LONG = ctypes.c_int, ctypes.c_uint64
UINT, BYTE = ctypes.c_uint, ctypes.c_ubyte


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


_SIDE = ("xInBytes", LONG), ("y", LONG), ("memoryType", UINT), ("host", LONG), ("device", LONG), ("array", LONG)


class _Copy2D(ctypes.Structure):
    _fields_ = [
        *((f"{side}_{name}", kind) for side in ("src", "dst") for name, kind in (*_SIDE, ("pitch", LONG))),
        ("width", LONG),
        ("height", LONG),
    ]


class _Attributes(ctypes.Structure):
    _fields_ = [(name, INT) for name in ("order", "src_type", "src_id", "dst_type", "dst_id", "flags")]


def _vector(address: int, count: int) -> list[int]:
    return list((LONG * count).from_address(address))


class Recorder:
    """Calls in order, each with its arguments; `fail(n, code)` makes the n-th from the start fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failures: dict[int, int] = {}
        self.failing_copy: int | None = None
        self.pending: set[int] = set()  # events that are not reached
        self.capturing: set[int] = set()
        self.problems: list[str] = []
        self.mode = 0  # of the thread
        self.device: int | None = 3  # of the current context
        self.numbers: dict[int, int] = {}  # of memory, by address
        self._keep: list[Any] = []
        self.addresses = {
            "cuLaunchKernel": self._c(self._launch, LONG, *[UINT] * 7, LONG, LONG, LONG),
            "cuMemcpyAsync": self._c(self._plain("cuMemcpyAsync"), LONG, LONG, LONG, LONG),
            "cuMemcpyBatchAsync": self._c(self._batch, LONG, LONG, LONG, LONG, LONG, LONG, LONG, LONG, LONG),
            "cuMemcpy2DAsync": self._c(self._copy_2d, LONG, LONG),
            "cuMemsetD8Async": self._c(self._plain("cuMemsetD8Async"), LONG, BYTE, LONG, LONG),
            "cuEventRecord": self._c(self._plain("cuEventRecord"), LONG, LONG),
            "cuStreamWaitEvent": self._c(self._plain("cuStreamWaitEvent"), LONG, LONG, UINT),
            "cuEventQuery": self._c(self._query, LONG),
            "cuStreamIsCapturing": self._c(self._is_capturing, LONG, LONG),
            "cuCtxGetDevice": self._c(self._get_device, LONG),
            "cuPointerGetAttribute": self._c(self._attribute, LONG, INT, LONG),
            "cuThreadExchangeStreamCaptureMode": self._c(self._exchange, LONG),
        }
        self.bindings = self._bindings()

    def fail(self, nth: int, code: int, copy: int | None = None) -> None:
        self.failures[nth], self.failing_copy = code, copy

    def driver(self) -> CudaDriver:
        """The real class over these functions."""
        d = CudaDriver.__new__(CudaDriver)
        d._cu = self.bindings
        d._batch = None  # made when it is first asked for
        EnqueueCalls.__init__(d, lambda name: d._address(name, 12000))
        d._exchange = Relaxed.exchange(self.addresses["cuThreadExchangeStreamCaptureMode"])
        return d

    def _c(self, function: Callable[..., int], *kinds: Any) -> int:
        made = ctypes.CFUNCTYPE(INT, *kinds)(function)
        self._keep.append(made)
        return int(ctypes.cast(made, ctypes.c_void_p).value or 0)

    def _made(self, name: str, *args: Any) -> int:
        self.calls.append((name, *args))
        return self.failures.get(len(self.calls) - 1, 0)

    def _plain(self, name: str) -> Callable[..., int]:
        return lambda *args: self._made(name, *args)

    def _launch(self, *args: int) -> int:
        kernel, bx, by, bz, tx, ty, tz, shared, stream, params, extra = args
        if (by, bz, ty, tz, extra) != (1, 1, 1, 1, 0):
            self.problems.append(f"launch {args}")
        return self._made("cuLaunchKernel", kernel, bx, tx, shared, stream, params)

    def _batch(self, *args: int) -> int:
        dst, src, sizes, count, attributes, starts, number, failed, stream = args
        a = _Attributes.from_address(attributes)
        shape = (a.order, a.src_type, a.src_id, a.dst_type, a.dst_id, a.flags, _vector(starts, 1), number)
        code = self._made("cuMemcpyBatchAsync", *(_vector(v, count) for v in (dst, src, sizes)), stream, shape)
        if code and self.failing_copy is not None:
            LONG.from_address(failed).value = self.failing_copy
        return code

    def _copy_2d(self, address: int, stream: int) -> int:
        c = _Copy2D.from_address(address)
        rest = ("src_xInBytes", "src_y", "src_host", "src_array", "dst_xInBytes", "dst_y", "dst_host", "dst_array")
        if any(getattr(c, name) for name in rest):
            self.problems.append("cuMemcpy2DAsync has words that should be zero")
        sides = (c.dst_device, c.dst_pitch, c.src_device, c.src_pitch)
        return self._two(c.src_memoryType, c.dst_memoryType, *sides, c.width, c.height, stream)

    def _two(self, *args: int) -> int:
        return self._made("cuMemcpy2DAsync", *args)

    def _query(self, event: int) -> int:
        if self.mode != 2:
            self.problems.append("an event was asked for in a mode that a capture forbids")
        return self._made("cuEventQuery", event) or (600 if event in self.pending else 0)

    def _attribute(self, answer: int, what: int, address: int) -> int:
        if what != 7:
            self.problems.append(f"attribute {what}")
        code = self._made("cuPointerGetAttribute", address)
        if not code and address in self.numbers:
            LONG.from_address(answer).value = self.numbers[address]
            return 0
        return code or 1

    def _is_capturing(self, stream: int, status: int) -> int:
        INT.from_address(status).value = int(stream in self.capturing)
        return self._made("cuStreamIsCapturing", stream)

    def _get_device(self, found: int) -> int:
        if self.device is not None:
            INT.from_address(found).value = self.device
        return self._made("cuCtxGetDevice") or (201 if self.device is None else 0)

    def _exchange(self, mode: int) -> int:
        word = INT.from_address(mode)
        word.value, self.mode = self.mode, word.value
        return 0

    def _bindings(self) -> Any:
        def two(c: Any, stream: int) -> tuple[int]:
            sides = (c.dstDevice, c.dstPitch, c.srcDevice, c.srcPitch)
            return (self._two(c.srcMemoryType, c.dstMemoryType, *sides, c.WidthInBytes, c.Height, stream),)

        def get_address(name: bytes, version: int, flags: int) -> tuple[int, int, int]:
            return 0, self.addresses.get(name.decode(), 0), 0

        def plain(name: str) -> Callable[..., tuple[int]]:
            return lambda *args: (self._made(name, *map(int, args)),)

        return SimpleNamespace(
            CUresult=Result,
            CUmemorytype=SimpleNamespace(CU_MEMORYTYPE_UNIFIED=4),
            CUDA_MEMCPY2D=SimpleNamespace,
            cuGetErrorString=lambda code: (0, f"what {int(code)} means".encode()),
            cuGetProcAddress=get_address,
            cuDriverGetVersion=lambda: (0, 12040),
            cuMemcpyAsync=plain("cuMemcpyAsync"),
            cuMemcpy2DAsync=two,
        )


def address_of(array: np.ndarray) -> int:
    return int(array.ctypes.data)
