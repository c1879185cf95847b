"""The memory that kernels may touch: registered ranges of real host memory, checked at each access."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Addresses = npt.NDArray[np.uint64]

_BASE = 4096  # where the view of the address space starts: no address below it is ever valid
_END = 1 << 47
_BEGIN = 1_764_547_200_000_000_000  # devices count from 1970
_TICK = 32
_SPACE: Array = np.ctypeslib.as_array((ctypes.c_ubyte * (_END - _BASE)).from_address(_BASE))


@dataclass(frozen=True, slots=True)
class Range:
    """One allocation or registration."""

    address: int
    nbytes: int
    name: str
    writable: bool

    @property
    def end(self) -> int:
        """The first address after it."""
        return self.address + self.nbytes


class AccessError(Exception):
    """An access that the memory refuses; `position` is its place among the addresses given."""

    def __init__(self, position: int, address: int, message: str) -> None:
        super().__init__(message)
        self.position = position
        self.address = address


class Memory:
    """Ranges of host memory that kernels may read and write."""

    def __init__(self) -> None:
        self._ranges: list[Range] = []
        self._starts = np.empty(0, np.uint64)
        self._ends = np.empty(0, np.uint64)
        self._writable = np.empty(0, np.bool_)
        self._kept: dict[int, Array] = {}
        self.nanoseconds = _BEGIN  # the clock that kernels read

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The registered ranges by address."""
        return tuple(self._ranges)

    def add(self, address: int, nbytes: int, name: str, writable: bool = True) -> Range:
        """Register a range; the caller keeps the memory alive. Ranges must not overlap."""
        new = Range(address, nbytes, name, writable)
        if nbytes <= 0 or address < _BASE or new.end > _END:
            raise ValueError(f"{name}: no range of {nbytes} bytes at {address:#x}")
        for known in self._ranges:
            if known.address < new.end and new.address < known.end:
                raise ValueError(f"{name} overlaps {known.name} at {max(known.address, new.address):#x}")
        self._ranges.append(new)
        self._update()
        return new

    def add_array(self, array: Array, name: str, writable: bool = True) -> Range:
        """Register a C-contiguous array and keep it alive."""
        if not array.flags.c_contiguous or (writable and not array.flags.writeable):
            raise ValueError(f"{name}: the array must be C-contiguous and writeable where writable is asked for")
        added = self.add(array.ctypes.data, array.nbytes, name, writable)
        self._kept[added.address] = array
        return added

    def remove(self, address: int) -> None:
        """Forget the range that starts at an address."""
        kept = [r for r in self._ranges if r.address != address]
        if len(kept) == len(self._ranges):
            raise ValueError(f"no range starts at {address:#x}")
        self._ranges = kept
        self._kept.pop(address, None)
        self._update()

    def read_clock(self) -> int:
        """The time, which each reading moves on."""
        self.nanoseconds += _TICK
        return self.nanoseconds

    def find(self, address: int, nbytes: int = 1) -> Range | None:
        """Return the range that holds all of the bytes, if one does."""
        for known in self._ranges:
            if known.address <= address and address + nbytes <= known.end:
                return known
        return None

    def _update(self) -> None:
        self._ranges.sort(key=lambda r: r.address)
        self._starts = np.array([r.address for r in self._ranges], np.uint64)
        self._ends = np.array([r.end for r in self._ranges], np.uint64)
        self._writable = np.array([r.writable for r in self._ranges], np.bool_)

    def check(self, addresses: Addresses, nbytes: int, write: bool) -> None:
        """Check accesses of `nbytes` each against alignment and ranges.

        Raises
        ------
        AccessError
            Names the first bad one.
        """
        check_alignment(addresses, nbytes)
        low, high = int(addresses.min()), int(addresses.max())
        place = int(np.searchsorted(self._starts, np.uint64(low), "right")) - 1
        if place >= 0 and high + nbytes <= self._ends[place] and (self._writable[place] or not write):
            return  # all within one range
        places = np.searchsorted(self._starts, addresses, "right") - 1
        good = np.zeros(addresses.shape, np.bool_)
        if len(self._ranges):
            good = (places >= 0) & (addresses < self._ends[places])
            good &= self._ends[places] - addresses >= np.uint64(nbytes)  # unsigned: only where it is below the end
            if write:
                good &= self._writable[places]
        if not good.all():
            position = int(np.argmin(good))
            address = int(addresses[position])
            raise AccessError(position, address, self._explain(address, nbytes, write))

    def _explain(self, address: int, nbytes: int, write: bool) -> str:
        what = f"{'write' if write else 'read'} of {nbytes} bytes at {address:#x}"
        if self.find(address, nbytes) is not None:
            known = self.find(address)
            return f"{what}: {known.name if known else ''} is read-only"
        nearest = min(self._ranges, key=lambda r: max(r.address - address, address - r.end), default=None)
        if nearest is None:
            return f"{what}: no memory is registered"
        where = f"{nearest.name} [{nearest.address:#x}, {nearest.end:#x})"
        return f"{what} is out of bounds; the nearest range is {where}"


def check_alignment(addresses: Addresses, nbytes: int) -> None:
    """Check that addresses are multiples of the access size.

    Raises
    ------
    AccessError
        Names the first that is not.
    """
    low_bits = np.uint64(nbytes - 1)
    if np.bitwise_or.reduce(addresses) & low_bits:
        position = int(np.argmax((addresses & low_bits) != 0))
        address = int(addresses[position])
        raise AccessError(position, address, f"access of {nbytes} bytes at {address:#x} is misaligned")


@cache
def _view(dtype: np.dtype[Any], count: int) -> Array:
    size = dtype.itemsize * count
    space = _SPACE[: (_SPACE.size // size) * size].view(dtype)
    found: Array = space.reshape(-1, count) if count > 1 else space
    return found


def _places(addresses: Addresses, nbytes: int) -> npt.NDArray[np.int64]:
    distance: Addresses = np.subtract(addresses, np.uint64(_BASE))
    found: npt.NDArray[np.int64] = np.right_shift(distance, np.uint64(nbytes.bit_length() - 1)).view(np.int64)
    return found


def gather(addresses: Addresses, dtype: np.dtype[Any], count: int) -> Array:
    """Read `count` elements at each address, already checked; shape (lanes,) or (lanes, count)."""
    found: Array = _view(dtype, count).take(_places(addresses, dtype.itemsize * count), axis=0)
    return found


def scatter(addresses: Addresses, values: Array, count: int) -> None:
    """Write what `gather` would read, the addresses already checked."""
    _view(values.dtype, count)[_places(addresses, values.dtype.itemsize * count)] = values
