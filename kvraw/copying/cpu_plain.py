"""What the kernels' intrinsics do, in Python: for NUMBA_DISABLE_JIT, under which kernels run as they are written.

Some thousand times slower than compiled, and the same to the byte.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

__all__ = ["fence", "leading_zeros", "memmove", "narrow", "widen"]

_LOW_WORD = 0xFFFFFFFF


def memmove(dst: Any, src: Any, nbytes: Any) -> None:
    """Copy bytes between two addresses, which may overlap."""
    ctypes.memmove(int(dst), int(src), int(nbytes))


def fence() -> None:
    """Nothing: no store went past the caches."""


def leading_zeros(value: Any) -> Any:
    """Leading zeros of the low 32 bits."""
    return np.int64(32 - (int(value) & _LOW_WORD).bit_length())


def widen(value: Any) -> Any:
    """A float32, fp16 bits in uint16, or bf16 bits in int16, as float32."""
    if value.dtype == np.float32:
        return np.float32(value)
    if value.dtype == np.uint16:
        return np.float32(value.view(np.float16))
    return np.uint32((int(value) & 0xFFFF) << 16).view(np.float32)


def narrow(value: Any, like: Any) -> Any:
    """A float32, rounded to nearest even, as the type of `like`."""
    value = np.float32(value)
    if like.dtype == np.float32:
        return value
    if np.isnan(value):
        return like.dtype.type(0x7FFF)
    if like.dtype == np.uint16:
        return value.astype(np.float16).view(np.uint16)
    bits = int(value.view(np.uint32))
    return np.uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF).view(np.int16)
