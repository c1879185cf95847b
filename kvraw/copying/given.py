"""Vectors that a caller gives: indices of pages, and copies; looked through by compiled functions, else by numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvraw.arrays import I64, U64
from kvraw.copying.copy_engine import Descriptors, merge, split
from kvraw.errors import BoundsError
from kvraw.runtime.compiled import Compiled

__all__ = ["COMPILED", "extremes", "first_uncovered", "join", "page_starts"]


class _Functions(NamedTuple):
    page_starts: Callable[..., int]
    cover: Callable[..., int]
    join: Callable[..., int]
    extremes: Callable[..., int]


def _compile() -> _Functions:
    from kvraw.copying import given_numba as made

    return _Functions(made.page_starts(), made.cover(), made.join(), made.extremes())


COMPILED: Compiled[_Functions] = Compiled("vectors of callers are looked through", _compile)


def extremes(values: U64) -> tuple[int, int]:
    """The least and the largest of some values, at least one."""
    made = COMPILED.entry
    if made is None:
        COMPILED.start()
        return int(values.min()), int(values.max())
    found: U64 = np.empty(2, np.uint64)
    made.extremes(values, found)
    return int(found[0]), int(found[1])


def page_starts(name: str, values: I64, page: int, limit: int, *, aligned: bool) -> I64:
    """First index of each page of whole pages, which must be below `limit`; with `aligned` the page's number.

    Raises
    ------
    BoundsError
        Indices of a page do not ascend by 1, do not begin at a multiple of `page` where they are `aligned`, or lie
        outside.
    """
    out: I64 = np.empty(len(values) // page, np.int64)
    made = COMPILED.entry
    wrong = (_page_starts_slowly if made is None else made.page_starts)(values, page, aligned, limit, out)
    if wrong < 0:
        return out
    at, outside = wrong // 2 * page, wrong % 2
    if outside:
        what = "" if page == 1 else f", with the {page} tokens of a page"
        raise BoundsError(f"{name}[{at}] is {values[at]}{what}, must be in [0, {limit})")
    rule = f"start at a multiple of {page} and ascend by 1" if aligned else "ascend by 1"
    raise BoundsError(f"{name}[{at}:{at + page}] is {values[at : at + page]}, a page; must {rule}")


def _page_starts_slowly(values: I64, page: int, aligned: bool, limit: int, out: I64) -> int:
    COMPILED.start()
    pages, first = values.reshape(-1, page), values[::page]
    right = (pages[:, 1:] - pages[:, :-1] == 1).all(1)
    out[:] = first // page if aligned else first
    if aligned:
        right &= first % page == 0
    if not right.all():
        return 2 * int(np.argmin(right))
    inside = (first >= 0) & (first < limit)
    return -1 if inside.all() else 2 * int(np.argmin(inside)) + 1


def first_uncovered(addresses: U64, sizes: U64, begin: int, starts: U64, stops: U64, met: np.ndarray[Any, Any]) -> int:
    """The first range from `begin` on that lies in none of some ascending disjoint ones; -1: all do.

    Those that hold ranges are marked in `met`, of uint8. A range of no bytes lies anywhere; `sizes` holds one for all,
    or one each.
    """
    made = COMPILED.entry
    if made is not None:
        return int(made.cover(addresses, sizes, begin, starts, stops, met))
    COMPILED.start()
    if not len(starts):
        some = np.flatnonzero(np.broadcast_to(sizes, addresses.shape)[begin:])
        return begin + int(some[0]) if len(some) else -1
    place = np.searchsorted(starts, addresses[begin:], "right").astype(np.int64) - 1
    part = sizes if len(sizes) == 1 else sizes[begin:]
    stop = stops[np.maximum(place, 0)]
    inside = (place >= 0) & (addresses[begin:] < stop) & (part <= stop - addresses[begin:])
    counts = np.broadcast_to(part != 0, inside.shape)
    bad = np.flatnonzero(~inside & counts)
    at = int(bad[0]) if len(bad) else len(inside)
    met[place[:at][inside[:at] & counts[:at]]] = 1
    return begin + at if len(bad) else -1


def join(d: Descriptors, cuts: U64) -> Descriptors:
    """Copies with neighbours joined and none that spans one of some ascending addresses; those of no bytes left out."""
    made = COMPILED.entry
    if made is None:
        COMPILED.start()
        kept = d.sizes > 0
        if not kept.all():
            d = Descriptors(d.dst[kept], d.src[kept], d.sizes[kept])
        return split(merge(d), cuts)
    capacity = len(d) + 2 * len(cuts)
    while True:
        out: U64 = np.empty((3, capacity), np.uint64)
        n = made.join(d.dst, d.src, d.sizes, cuts, out)
        if n >= 0:
            return Descriptors(out[0, :n], out[1, :n], out[2, :n])
        capacity *= 2
