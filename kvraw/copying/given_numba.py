"""What callers give as vectors, looked through by compiled functions with the GIL kept. Imports numba: on first use."""

from __future__ import annotations

from typing import Any

from numba.core import types

from kvraw.copying.descriptors_numba import put, up_to
from kvraw.runtime.jit import jit

__all__ = ["cover", "extremes", "join", "page_starts"]

NO_PAGE, OUTSIDE = 0, 1  # of `page_starts`, which returns -1 or twice the page plus one of these


def _page_starts_source(values: Any, page: Any, aligned: Any, limit: Any, out: Any) -> Any:
    """First index of each page, or with `aligned` the page's number, written to `out`; what is wrong with which."""
    outside = -1
    for k in range(len(out)):
        first = values[k * page]
        if aligned:
            out[k] = first // page
            if first % page != 0:
                return 2 * k + NO_PAGE
        else:
            out[k] = first
        for j in range(1, page):
            if values[k * page + j] != first + j:
                return 2 * k + NO_PAGE
        if outside < 0 and (first < 0 or first >= limit):
            outside = 2 * k + OUTSIDE
    return outside


def _cover_source(addresses: Any, sizes: Any, begin: Any, starts: Any, stops: Any, met: Any) -> Any:
    """The first range from `begin` on that lies in none of some ascending ones; met ones are marked. -1: all do.

    A range of no bytes lies anywhere. `sizes` holds one for all, or one each. Addresses are unsigned.
    """
    one, last = len(sizes) == 1, -1
    for k in range(begin, len(addresses)):
        address, size = addresses[k], sizes[0 if one else k]
        if size == 0:
            continue
        if last < 0 or address < starts[last] or address >= stops[last]:
            low = up_to(starts, address)
            if low == 0 or address >= stops[low - 1]:
                return k
            last = low - 1
            met[last] = 1
        if size > stops[last] - address:
            return k
    return -1


def _join_source(dst: Any, src: Any, sizes: Any, cuts: Any, out: Any) -> Any:
    """Copies with neighbours joined, as far as no cut is between them, and cut; -1 where `out` is too short.

    What ascends is joined, and what descends; entries of no bytes are left out.
    """
    n, k, count = 0, 0, len(sizes)
    while k < count:
        to, at, size = dst[k], src[k], sizes[k]
        k += 1
        if size == 0:
            continue
        while k < count and (sizes[k] == 0 or (dst[k] == to + size and src[k] == at + size)):
            size += sizes[k]
            k += 1
        if k < count and dst[k] + sizes[k] == to and src[k] + sizes[k] == at:
            while k < count and (sizes[k] == 0 or (dst[k] + sizes[k] == to and src[k] + sizes[k] == at)):
                if sizes[k] != 0:
                    to, at = dst[k], src[k]
                    size += sizes[k]
                k += 1
        n = put(to, at, size, cuts, out, n)
        if n < 0:
            return -1
    return n


def _extremes_source(values: Any, out: Any) -> Any:
    """The least and the largest of some values, written to `out`."""
    least = largest = values[0]
    for k in range(1, len(values)):
        least, largest = min(least, values[k]), max(largest, values[k])
    out[0], out[1] = least, largest
    return 0


def _compile(source: Any, *kinds: Any) -> Any:
    return jit(source, nogil=False).compile(kinds)


_INTS, _WORDS = types.Array(types.int64, 1, "C"), types.Array(types.uint64, 1, "C")


def page_starts() -> Any:
    """Compile `_page_starts_source`, or load it from the disk's cache."""
    return _compile(_page_starts_source, _INTS, types.int64, types.boolean, types.int64, _INTS)


def cover() -> Any:
    """The same for `_cover_source`."""
    return _compile(_cover_source, _WORDS, _WORDS, types.int64, _WORDS, _WORDS, types.Array(types.uint8, 1, "C"))


def join() -> Any:
    """The same for `_join_source`."""
    return _compile(_join_source, _WORDS, _WORDS, _WORDS, _WORDS, types.Array(types.uint64, 2, "C"))


def extremes() -> Any:
    """The same for `_extremes_source`."""
    return _compile(_extremes_source, _WORDS, _WORDS)
