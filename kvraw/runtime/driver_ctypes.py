"""Driver functions that a transfer calls while it is enqueued: by their addresses, with the GIL kept.

Each of them returns within microseconds. A call that gives the GIL away, as those of cuda-python do, may wait the
interpreter's switch interval (5 ms) to have it back in a process whose other threads run Python, and a transfer makes
many of these calls. What may wait for the GPU (synchronisation, copies of pageable memory) is not here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NoReturn

__all__ = ["EnqueueCalls"]

_INT, _UINT, _SIZE, _PTR = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuCtxGetDevice": (_PTR,),
    "cuCtxPushCurrent": (_PTR,),
    "cuCtxPopCurrent": (_PTR,),
    "cuEventQuery": (_PTR,),
    "cuEventRecord": (_PTR, _PTR),
    "cuLaunchKernel": (_PTR, *[_UINT] * 7, _PTR, _PTR, _PTR),
    "cuMemcpyAsync": (_PTR, _PTR, _SIZE, _PTR),
    "cuMemsetD8Async": (_PTR, ctypes.c_ubyte, _SIZE, _PTR),
    "cuPointerGetAttribute": (_PTR, _INT, _PTR),
    "cuStreamGetCtx": (_PTR, _PTR),
    "cuStreamIsCapturing": (_PTR, _PTR),
    "cuStreamWaitEvent": (_PTR, _PTR, _UINT),
}

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_CAPTURE_NONE = 0  # CU_STREAM_CAPTURE_STATUS_NONE


class _Functions:
    """The functions, named as in the driver's API; each returns a ``CUresult`` as an int."""

    __slots__ = tuple(_SIGNATURES)

    def __init__(self, address_of: Callable[[str], int]) -> None:
        for name, arguments in _SIGNATURES.items():
            # A `PYFUNCTYPE` prototype keeps the GIL, a `CFUNCTYPE` one gives it away.
            setattr(self, name, ctypes.PYFUNCTYPE(_INT, *arguments)(address_of(name)))

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(name)  # for the type checker: `__slots__` answer all that there is


class EnqueueCalls:
    """The part of the driver that transfers call while they are enqueued.

    Parameters
    ----------
    address_of : callable
        Address of a driver function by its name, in the form of CUDA 12.0.
    """

    def __init__(self, address_of: Callable[[str], int]) -> None:
        self._calls = _Functions(address_of)

    def _fail(self, name: str, result: int) -> NoReturn:
        raise NotImplementedError

    def context_device(self) -> int:
        """Device of the current context; -1 where there is none."""
        device = ctypes.c_int()
        code = self._calls.cuCtxGetDevice(ctypes.addressof(device))
        if code:
            if code == _INVALID_CONTEXT:
                return -1
            self._fail("cuCtxGetDevice", code)
        return device.value

    def context_push(self, context: int) -> None:
        """Make a context current."""
        code = self._calls.cuCtxPushCurrent(context)
        if code:
            self._fail("cuCtxPushCurrent", code)

    def context_pop(self) -> None:
        """Undo `context_push`."""
        context = ctypes.c_void_p()
        code = self._calls.cuCtxPopCurrent(ctypes.addressof(context))
        if code:
            self._fail("cuCtxPopCurrent", code)

    def pointer_number(self, address: int) -> int:
        """The number that the driver gave the allocation or registration around an address; 0 for pageable memory."""
        number = ctypes.c_uint64()
        code = self._calls.cuPointerGetAttribute(ctypes.addressof(number), _BUFFER_ID, address)
        return 0 if code else number.value

    def stream_context(self, stream: int) -> int:
        """The context that a stream belongs to; the current one's for the default streams."""
        context = ctypes.c_void_p()
        code = self._calls.cuStreamGetCtx(stream, ctypes.addressof(context))
        if code:
            self._fail("cuStreamGetCtx", code)
        return context.value or 0

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Make a stream wait for an event."""
        code = self._calls.cuStreamWaitEvent(stream, event, 0)
        if code:
            self._fail("cuStreamWaitEvent", code)

    def stream_capturing(self, stream: int) -> bool:
        """True where a capture is in progress on a stream."""
        status = ctypes.c_int()
        code = self._calls.cuStreamIsCapturing(stream, ctypes.addressof(status))
        if code:
            self._fail("cuStreamIsCapturing", code)
        return status.value != _CAPTURE_NONE

    def event_record(self, event: int, stream: int) -> None:
        """Record an event on a stream."""
        code = self._calls.cuEventRecord(event, stream)
        if code:
            self._fail("cuEventRecord", code)

    def event_done(self, event: int) -> bool:
        """True where an event was reached; to be asked within `relaxed`."""
        code = self._calls.cuEventQuery(event)
        if code == _NOT_READY:
            return False
        if code:
            self._fail("cuEventQuery", code)
        return True

    def memcpy_pinned_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """One copy between device, pinned or host-registered memory: pageable memory would wait, with the GIL kept."""
        code = self._calls.cuMemcpyAsync(dst, src, nbytes, stream)
        if code:
            self._fail("cuMemcpyAsync", code)

    def memset_async(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        """Fill device memory with a byte."""
        code = self._calls.cuMemsetD8Async(dst, value, nbytes, stream)
        if code:
            self._fail("cuMemsetD8Async", code)

    def launch(self, kernel: int, ctas: int, threads: int, stream: int, params: int) -> None:
        """Launch a kernel; `params` is the address of an array of argument addresses, read during the call."""
        code = self._calls.cuLaunchKernel(kernel, ctas, 1, 1, threads, 1, 1, 0, stream, params, None)
        if code:
            self._fail("cuLaunchKernel", code)
