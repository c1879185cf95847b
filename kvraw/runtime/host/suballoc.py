"""Offsets within a range: handed out by best fit, given back in any order, neighbours coalesced.

What is true is the range and what of it is handed out; each changes in one step, which no interrupt, finalizer or fork
divides. The holes follow from them, and are found anew where an operation did not come to its end.
"""

from __future__ import annotations

import bisect

__all__ = ["Arena", "Size"]


class Size(int):
    """Bytes of what is handed out together; told from all others by its identity."""


class Arena:
    """Bookkeeping of one range of bytes; it knows no memory. Not thread-safe.

    A signal handler or a finalizer may use it in the midst of an operation of its own thread.
    """

    __slots__ = ("_by_size", "_ends", "_free", "_live", "_ranges", "_rebuilds", "_stale", "_starts", "_total")

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # (offset, size) of all that belongs to the range
        self._live: dict[int, int] = {}  # offset -> size
        # These follow from those, unless `_stale`:
        self._stale = False
        self._rebuilds = 0
        self._free = self._total = 0
        self._starts: dict[int, int] = {}  # hole's offset -> size
        self._ends: dict[int, int] = {}  # hole's end -> offset
        self._by_size: list[tuple[int, int]] = []  # (size, offset), sorted

    def __len__(self) -> int:
        return len(self._live)

    @property
    def free(self) -> int:
        """Bytes in holes."""
        if self._stale:
            self._rebuild()
        return self._free

    @property
    def used(self) -> int:
        """Bytes handed out."""
        if self._stale:
            self._rebuild()
        return self._total - self._free

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest hole."""
        if self._stale:
            self._rebuild()
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def end(self) -> int:
        """Where the range ends that was added last; 0 where there is none."""
        return sum(self._ranges[-1]) if self._ranges else 0

    # the holes

    def _rebuild(self) -> None:
        self._rebuilds += 1
        merged: list[tuple[int, int]] = []
        for offset, size in sorted(self._ranges):
            if merged and sum(merged[-1]) == offset:
                offset, size = merged[-1][0], merged[-1][1] + size
                merged.pop()
            merged.append((offset, size))
        live = sorted(self._live.items())
        holes: dict[int, int] = {}
        at = 0
        for begin, size in merged:
            end = begin + size
            while at < len(live) and live[at][0] < end:
                offset, taken = live[at]
                if offset > begin:
                    holes[begin] = offset - begin
                begin, at = offset + taken, at + 1
            if end > begin:
                holes[begin] = end - begin
        self._starts = holes
        self._ends = {offset + size: offset for offset, size in holes.items()}
        self._by_size = sorted((size, offset) for offset, size in holes.items())
        self._free, self._total = sum(holes.values()), sum(size for _, size in merged)
        self._stale = False

    def _begin(self) -> int:
        """Before the holes are changed; for `_end`."""
        if self._stale:
            self._rebuild()
        self._stale = True
        return self._rebuilds

    def _end(self, begun: int) -> None:
        """The holes are right, unless somebody came in between."""
        self._stale = self._rebuilds != begun

    def _drop(self, offset: int, size: int) -> None:
        del self._starts[offset], self._ends[offset + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, offset))]

    def _add(self, offset: int, size: int) -> None:
        self._starts[offset], self._ends[offset + size] = size, offset
        bisect.insort(self._by_size, (size, offset))

    def _join(self, offset: int, size: int) -> None:
        """Make a hole, one with those around it."""
        self._free += size
        after = self._starts.get(offset + size)
        if after is not None:
            self._drop(offset + size, after)
            size += after
        before = self._ends.get(offset)
        if before is not None:
            self._drop(before, offset - before)
            size, offset = size + offset - before, before
        self._add(offset, size)

    def _fill(self, size: int) -> int | None:
        """Take a part of the smallest hole that holds it, the lowest of several."""
        at = bisect.bisect_left(self._by_size, (size, -1))
        if at == len(self._by_size):
            return None
        hole, offset = self._by_size[at]
        self._drop(offset, hole)
        if hole > size:
            self._add(offset + size, hole - size)
        self._free -= size
        return offset

    # what is true

    def extend(self, offset: int, size: int) -> None:
        """Add bytes that were not part of the range before."""
        begun = self._begin()
        self._ranges.append((offset, size))
        try:
            self._total += size
            self._join(offset, size)
        except (KeyError, IndexError):
            if self._rebuilds == begun:
                raise
        self._end(begun)

    def grant(self, count: int, size: Size) -> list[int] | None:
        """Offsets of `count` times `size` bytes, all or none (None)."""
        while True:
            begun = self._begin()
            found: list[int] = []
            try:
                while len(found) < count:
                    offset = self._fill(size)
                    if offset is None:
                        break
                    found.append(offset)
                if len(found) < count:
                    for offset in found:
                        self._join(offset, size)
            except (KeyError, IndexError):
                if self._rebuilds == begun:
                    raise
            granted = dict.fromkeys(found, size)
            if self._rebuilds != begun:  # somebody took or gave in the midst of it
                self._stale = True
                continue
            if len(found) == count:
                self._live.update(granted)
            self._end(begun)
            return found if len(found) == count else None

    def revoke(self, size: Size) -> None:
        """Take back what is still handed out of a grant, of which nobody knows: an exception came in between."""
        for offset in [at for at, found in list(self._live.items()) if found is size]:
            self.release(offset, size)

    def release(self, offset: int, grant: int) -> None:
        """Take bytes back where they are still handed out by that grant."""
        begun = self._begin()
        size = self._live.pop(offset) if self._live.get(offset) is grant else 0  # one line: nobody comes in between
        try:
            if size:
                self._join(offset, size)
        except (KeyError, IndexError):
            if self._rebuilds == begun:
                raise
        self._end(begun)

    def grant_of(self, offset: int) -> int | None:
        """The grant that an offset was handed out with; None: it is not handed out."""
        return self._live.get(offset)
