"""Driver functions that are called by ctypes: what cuda-python lacks, or does not do right."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["BatchCopy", "PointerAttributes", "PointerInfo", "Relaxed"]

_P = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_ORDER_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_NO_INDEX = 2**64 - 1
# Copies that a call hands over with the GIL kept: below 1 ms at the 400 to 500 ns that the driver takes for each, where
# to have the GIL again may take 5 ms.
_SHORT = 2048
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
# CU_POINTER_ATTRIBUTE_* of what `PointerAttributes` answers, in its order.
_MEMORY_TYPE, _IS_MANAGED, _DEVICE_ORDINAL, _DEVICE_POINTER, _RANGE_START, _RANGE_SIZE = 2, 8, 9, 3, 11, 12
_ASKED = (_MEMORY_TYPE, _IS_MANAGED, _DEVICE_ORDINAL, _DEVICE_POINTER, _RANGE_START, _RANGE_SIZE)


@dataclass(frozen=True, slots=True)
class PointerInfo:
    """The driver's account of an address: its kind, device, device-side address and enclosing allocation."""

    kind: str  # "device", "host" (pinned or host-registered) or "managed"
    device: int
    device_address: int
    base: int
    size: int


class _Attributes(ctypes.Structure):
    # CUmemcpyAttributes: order, two locations (type, id), flags; 24 bytes.
    _fields_ = [(name, ctypes.c_int) for name in ("order", "src_type", "src_id", "dst_type", "dst_id", "flags")]


class BatchCopy:
    """``cuMemcpyBatchAsync``, which older cuda-python does not have.

    Parameters
    ----------
    address : int
        Of the nine-argument form, with the failing index.
    """

    def __init__(self, address: int) -> None:
        signature = (ctypes.c_int, _P, _P, _P, _SIZE, _P, _P, _SIZE, _P, _P)
        self._long: Callable[..., int] = ctypes.CFUNCTYPE(*signature)(address)
        self._short: Callable[..., int] = ctypes.PYFUNCTYPE(*signature)(address)

    def __call__(self, dst: np.ndarray, src: np.ndarray, sizes: np.ndarray, stream: int) -> tuple[int, int | None]:
        """The driver's result, and the index of the copy that failed where it told."""
        attributes = _Attributes(order=_ORDER_STREAM)
        start, failed = _SIZE(0), _SIZE(_NO_INDEX)
        code = (self._short if len(sizes) <= _SHORT else self._long)(
            dst.ctypes.data,
            src.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(start),
            1,
            ctypes.addressof(failed),
            stream,
        )
        return code, failed.value if failed.value < len(sizes) else None


class _Answer:
    """Room for one answer."""

    __slots__ = ("pointers", "slots")

    def __init__(self) -> None:
        self.slots = (ctypes.c_uint64 * len(_ASKED))()
        begin = ctypes.addressof(self.slots)
        self.pointers = (_P * len(_ASKED))(*(begin + 8 * k for k in range(len(_ASKED))))


class PointerAttributes:
    """``cuPointerGetAttributes``: some versions of cuda-python answer 0 for every device (its issue 2928).

    Parameters
    ----------
    address : int
        Of the function.
    """

    def __init__(self, address: int) -> None:
        # Keeps the GIL: it answers at once.
        call: Callable[..., int] = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_uint, _P, _P, ctypes.c_uint64)(address)
        self._call = call
        self._asked = (ctypes.c_int * len(_ASKED))(*_ASKED)
        self._free: list[_Answer] = []
        self._zeros: list[ctypes.c_uint64 | int] = [0] * len(_ASKED)

    def __call__(self, pointer: int) -> tuple[int, int, bool, int, int, int, int]:
        """The driver's result, then memory type, whether managed, device, device address, base and size."""
        # One for each call that is under way, in any thread, or in a finalizer that this one is interrupted by.
        try:
            answer = self._free.pop()
        except IndexError:
            answer = _Answer()
        slots = answer.slots
        slots[:] = self._zeros  # the driver writes 1, 4 or 8 bytes of each
        code = self._call(len(_ASKED), self._asked, answer.pointers, pointer)
        kind, managed, device, there, base, size = slots
        self._free.append(answer)
        return code, kind & 0xFFFFFFFF, bool(managed & 0xFF), ctypes.c_int32(device).value, there, base, size


class Relaxed:
    """For a ``with`` block: what this thread does on no captured stream disturbs no capture, whoever's it is.

    Without it, a capture in the default mode forbids many calls to every thread of the process, and is lost where one
    is made. By ctypes, since cuda-python takes longer for the mode than the driver does.

    Parameters
    ----------
    exchange : callable
        ``cuThreadExchangeStreamCaptureMode``, made by `exchange`.
    """

    __slots__ = ("_exchange", "_mode")

    def __init__(self, exchange: Callable[[object], int]) -> None:
        self._exchange, self._mode = exchange, ctypes.c_int(_RELAXED)

    @staticmethod
    def exchange(address: int) -> Callable[[object], int]:
        """The call at an address."""
        return ctypes.PYFUNCTYPE(ctypes.c_int, _P)(address)

    def __enter__(self) -> None:
        self._exchange(ctypes.byref(self._mode))

    def __exit__(self, *_: object) -> None:
        self._exchange(ctypes.byref(self._mode))
