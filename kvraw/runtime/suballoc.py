"""Offsets within a range: handed out by best fit, given back in any order, neighbours coalesced."""

from __future__ import annotations

import bisect

__all__ = ["Arena"]


class Arena:
    """Bookkeeping of one range of bytes; it knows no memory. Not thread-safe.

    Attributes
    ----------
    free : int
        Bytes in holes.
    used : int
        Bytes handed out.
    """

    __slots__ = ("_by_size", "_ends", "_live", "_starts", "free", "used")

    def __init__(self) -> None:
        self.free = self.used = 0
        self._starts: dict[int, int] = {}  # hole's offset -> size
        self._ends: dict[int, int] = {}  # hole's end -> offset
        self._by_size: list[tuple[int, int]] = []  # (size, offset), sorted
        self._live: dict[int, int] = {}  # offset -> size

    def __len__(self) -> int:
        return len(self._live)

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest hole."""
        return self._by_size[-1][0] if self._by_size else 0

    def _drop(self, offset: int, size: int) -> None:
        del self._starts[offset], self._ends[offset + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, offset))]

    def _add(self, offset: int, size: int) -> None:
        self._starts[offset], self._ends[offset + size] = size, offset
        bisect.insort(self._by_size, (size, offset))

    def extend(self, offset: int, size: int) -> None:
        """Add bytes that were not part of the range before."""
        self.free += size
        after = self._starts.get(offset + size)
        if after is not None:
            self._drop(offset + size, after)
            size += after
        before = self._ends.get(offset)
        if before is not None:
            self._drop(before, offset - before)
            size, offset = size + offset - before, before
        self._add(offset, size)

    def take(self, size: int) -> int | None:
        """Offset of `size` bytes of the smallest hole that holds them, the lowest of several; None: no hole does."""
        at = bisect.bisect_left(self._by_size, (size, -1))
        if at == len(self._by_size):
            return None
        hole, offset = self._by_size[at]
        self._drop(offset, hole)
        if hole > size:
            self._add(offset + size, hole - size)
        self._live[offset] = size
        self.free -= size
        self.used += size
        return offset

    def holds(self, offset: int) -> bool:
        """Whether this offset is handed out."""
        return offset in self._live

    def give(self, offset: int) -> None:
        """Take bytes back.

        Raises
        ------
        KeyError
            They are not handed out.
        """
        size = self._live.pop(offset)
        self.used -= size
        self.extend(offset, size)

    def size_of(self, offset: int) -> int:
        """Bytes handed out at an offset."""
        return self._live[offset]
