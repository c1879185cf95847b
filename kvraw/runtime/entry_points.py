"""Functions of the driver that every transfer calls, by address: through ctypes they cost half of what bindings do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

__all__ = ["ASKED", "Asked", "BatchAttributes", "EntryPoints"]

_handle, _uint, _size = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
_ORDER_STREAM = 1  # CUmemcpySrcAccessOrder
_BATCH_VERSION = 12080  # asks for the form with the failing index, of every driver that has the call
_VERSION = 12000


class BatchAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``: sources are read in stream order."""

    _fields_ = [(name, ctypes.c_int) for name in ("order", "src_type", "src_id", "dst_type", "dst_id", "flags")]

    @classmethod
    def in_order(cls) -> BatchAttributes:
        """Attributes of copies whose sources are read in the stream's order."""
        return cls(order=_ORDER_STREAM)


# What is asked about an address (``CU_POINTER_ATTRIBUTE_*``), in the order of the fields of `Asked`.
ASKED = ("MEMORY_TYPE", "IS_MANAGED", "DEVICE_ORDINAL", "DEVICE_POINTER", "RANGE_START_ADDR", "RANGE_SIZE")


class Asked(ctypes.Structure):
    """Room for the driver's answers about an address."""

    _fields_ = [
        ("kind", ctypes.c_uint),
        ("managed", ctypes.c_uint),
        ("device", ctypes.c_int),
        ("mapped", ctypes.c_void_p),
        ("base", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
    ]

    def places(self) -> Any:
        """Where each answer goes."""
        start = ctypes.addressof(self)
        return (ctypes.c_void_p * len(ASKED))(*[start + at for at in _PLACES])


_PLACES = [getattr(Asked, name).offset for name, *_ in Asked._fields_]


class EntryPoints:
    """C functions; each returns a result code. The GIL is released in all but `context_device`, which cannot wait.

    Parameters
    ----------
    address_of : callable
        Address of a driver function by its name and the CUDA version whose form is wanted; 0 where there is none.
    """

    def __init__(self, address_of: Callable[[str, int], int]) -> None:
        def form(name: str, *arguments: Any, make: Any = ctypes.CFUNCTYPE) -> Any:
            return make(ctypes.c_int, *arguments)(address_of(name, _VERSION))

        self.launch = form("cuLaunchKernel", _handle, *[_uint] * 7, _handle, _handle, _handle)
        self.event_record = form("cuEventRecord", _handle, _handle)
        self.event_query = form("cuEventQuery", _handle)
        self.stream_wait_event = form("cuStreamWaitEvent", _handle, _handle, _uint)
        self.stream_capturing = form("cuStreamIsCapturing", _handle, _handle)
        self.memcpy_async = form("cuMemcpyAsync", _handle, _handle, _size, _handle)
        self.host_device_address = form("cuMemHostGetDevicePointer", _handle, _handle, _uint)
        self.pointer_attributes = form("cuPointerGetAttributes", _uint, _handle, _handle, _handle)
        self.context_device = form("cuCtxGetDevice", _handle, make=ctypes.PYFUNCTYPE)
        batch = address_of("cuMemcpyBatchAsync", _BATCH_VERSION)
        made = ctypes.CFUNCTYPE(
            ctypes.c_int, _handle, _handle, _handle, _size, _handle, _handle, _size, _handle, _handle
        )
        self.memcpy_batch_async: Any = made(batch) if batch else None
