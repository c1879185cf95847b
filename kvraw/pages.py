"""The taken pages of a range: one array says which; the list of free ones follows from it."""

from __future__ import annotations

import itertools

import numpy as np

from kvraw.arrays import I64

__all__ = ["Pages"]


class Pages:
    """Pages to take and to give back; whoever calls holds a lock.

    An interrupt, and a fork, leave them as they were or as they are to be.

    Attributes
    ----------
    taken : numpy.ndarray of int64
        The number of the call that took each page; 0 where it is free.
    """

    def __init__(self, count: int) -> None:
        self.taken: I64 = np.zeros(count, np.int64)
        self._numbers = itertools.count(1)
        self._free, self._torn = list(range(count))[::-1], False

    def _mend(self) -> None:
        if self._torn:
            self._free = np.flatnonzero(self.taken == 0)[::-1].tolist()
            self._torn = False

    def number(self) -> int:
        """A number for a call of `take`."""
        return next(self._numbers)

    @property
    def available(self) -> int:
        """Pages that are free."""
        self._mend()
        return len(self._free)

    def take(self, count: int, number: int) -> I64 | None:
        """Pages that were free; None where they are too few."""
        self._mend()
        if count > len(self._free):
            return None
        left = len(self._free) - count
        pages = np.array(self._free[left:][::-1], np.int64)
        self._torn = True
        self.taken[pages] = number
        del self._free[left:]
        self._torn = False
        return pages

    def revoke(self, number: int) -> None:
        """Give back what a call took, of which nobody knows: an exception came in between."""
        self._torn = True
        self.taken[self.taken == number] = 0

    def first_unfit(self, pages: I64) -> int | None:
        """A page that cannot be given back: it is free, or stands twice."""
        again = self.taken[pages] == 0
        if again.any():
            return int(pages[np.argmax(again)])
        ordered = np.sort(pages)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        return int(twice[0]) if len(twice) else None

    def give(self, pages: I64) -> None:
        """Give pages back, which `first_unfit` found fit."""
        self._mend()
        self._torn = True
        self.taken[pages] = 0
        self._free += pages[::-1].tolist()
        self._torn = False
