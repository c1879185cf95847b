"""Addresses at which a process can have memory: other addresses are refused before the CPU follows them."""

from __future__ import annotations

import ctypes
import mmap
import platform
from typing import Any

import numpy as np

from kvraw.errors import BoundsError

__all__ = ["FIRST", "TOP", "in_reach", "no_address", "require_address", "require_addresses"]


def _top() -> int:
    """The end of all addresses: on x86-64 half of what the page tables of this machine translate."""
    if platform.machine() != "x86_64":
        return 1 << 63
    # With four levels there is nothing from 2**47 on; with five only for those who name such an address.
    try:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        none, private_anonymous = 0, 0x22
        for hint in (1 << 48, 3 << 49):  # should somebody lie there
            found = libc.mmap(hint, mmap.PAGESIZE, none, private_anonymous, -1, 0)
            if found is None or found == ctypes.c_void_p(-1).value:
                break
            libc.munmap(found, mmap.PAGESIZE)
            if found >= 1 << 47:
                break
        else:
            return 1 << 47
    except (OSError, AttributeError):
        pass
    return 1 << 56


# Nothing lies in the first page, nor where the kernel lives.
FIRST = 1 << 12
TOP = _top()


def no_address(name: str, address: int, nbytes: int) -> BoundsError:
    """The error for an address that no process has."""
    what, bits = f"{address:#x}" if address else "0 (null)", TOP.bit_length() - 1
    return BoundsError(
        f"{name} is {what}, no address of {nbytes} bytes in this process: must be in [{FIRST:#x}, 2**{bits})"
    )


def in_reach(address: int, nbytes: int) -> bool:
    """True where a process can have memory there."""
    return FIRST <= address <= TOP - nbytes


def require_address(name: str, address: int, nbytes: int = 1) -> None:
    """Raise `BoundsError` where a range does not lie where a process can have memory."""
    if not in_reach(address, nbytes):
        raise no_address(name, address, nbytes)


def require_addresses(name: str, addresses: np.ndarray[Any, Any], nbytes: int | np.ndarray[Any, Any]) -> None:
    """The same for many ranges; `nbytes` is of each, or one for all. The error names the first bad one."""
    if not len(addresses):
        return
    low, high = int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses))
    most = nbytes if isinstance(nbytes, int) else int(np.maximum.reduce(nbytes))
    if low >= FIRST and high + most <= TOP:
        return
    sizes = [nbytes] * len(addresses) if isinstance(nbytes, int) else nbytes.tolist()
    for at, (address, size) in enumerate(zip(addresses.tolist(), sizes, strict=True)):
        require_address(f"{name}[{at}]", address, size)
