"""Checks that every level makes of what it is given."""

from __future__ import annotations

import operator
import platform
from contextlib import suppress
from typing import Any, NoReturn, SupportsIndex, cast

import numpy as np

from kvraw.errors import BoundsError

__all__ = ["FIRST_ADDRESS", "TOP_ADDRESS", "Uncopied", "integer", "no_address", "require_addresses"]

# No process has memory in the first page, nor where the kernel lives; the driver's device addresses lie between as well.
FIRST_ADDRESS = 1 << 12
TOP_ADDRESS = 1 << (56 if platform.machine() in ("x86_64", "AMD64") else 63)


class Uncopied:
    """Base of what stands for memory of this process: a copy, or another process, would go on with its addresses."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} stands for memory of this process: it cannot be copied or pickled")


def integer(name: str, value: object) -> int:
    """A count or a size as a plain int: others may have a width that products overflow, or fractions.

    Raises
    ------
    TypeError
        It is no integer, or a bool.
    """
    if type(value) is int:
        return value
    if not isinstance(value, (bool, np.bool_)):
        with suppress(TypeError):
            return operator.index(cast(SupportsIndex, value))
    raise TypeError(f"{name} is {value!r}, must be an integer")


def require_addresses(name: str, addresses: np.ndarray[Any, Any], nbytes: int | np.ndarray[Any, Any]) -> None:
    """Check that ranges lie where a process can have memory; `nbytes` is of each, or one for all.

    Raises
    ------
    BoundsError
        One does not; names the argument, the position and the address.
    """
    if not len(addresses):
        return
    low, high = int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses))
    most = int(nbytes) if isinstance(nbytes, int) else int(np.maximum.reduce(nbytes))
    if low >= FIRST_ADDRESS and high + most <= TOP_ADDRESS:
        return
    sizes = [nbytes] * len(addresses) if isinstance(nbytes, int) else nbytes.tolist()
    for at, (address, size) in enumerate(zip(addresses.tolist(), sizes, strict=True)):
        if not FIRST_ADDRESS <= address <= TOP_ADDRESS - size:
            raise BoundsError(no_address(f"{name}[{at}]", address, size))


def no_address(name: str, address: int, nbytes: int) -> str:
    """What is to be said of an address that no process has."""
    what = "null" if not address else f"{address:#x}"
    return f"{name} is {what}, no address of {nbytes} bytes in this process: must be in [{FIRST_ADDRESS:#x}, 2**{TOP_ADDRESS.bit_length() - 1})"
