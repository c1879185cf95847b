"""Where a process can have memory: other addresses are refused before the CPU follows them."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np

from kvraw.errors import BoundsError

__all__ = ["FIRST", "TOP", "in_reach", "no_address", "require_address", "require_addresses"]

# Nothing lies in the first page, nor where the kernel lives.
FIRST = 1 << 12
TOP = 1 << (56 if platform.machine() in ("x86_64", "AMD64") else 63)


def no_address(name: str, address: int, nbytes: int) -> BoundsError:
    """The error for an address that no process has."""
    what, bits = f"{address:#x}" if address else "0 (null)", TOP.bit_length() - 1
    return BoundsError(
        f"{name} is {what}, no address of {nbytes} bytes in this process: must be in [{FIRST:#x}, 2**{bits})"
    )


def in_reach(address: int, nbytes: int) -> bool:
    """Whether a process can have memory there."""
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
