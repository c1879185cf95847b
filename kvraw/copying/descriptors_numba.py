"""The copies of a plan, enumerated, joined and cut by one compiled function. Imports numba: on first use only.

What `copy_engine.describe`, `merge` and `split` do with numpy, in one pass and with the GIL kept: numpy gives it away
for each operation on more than some hundred values, and to have it back may take 5 ms in a process whose other threads
run Python.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from kvraw.runtime.jit import jit

__all__ = ["entry_point", "put", "up_to"]


def _up_to_source(values: Any, address: Any) -> Any:
    """How many of some ascending addresses are at most this one."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] <= address:
            low = middle + 1
        else:
            high = middle
    return low


up_to = jit(_up_to_source, nogil=False, error_model="numpy")


def _stands_source(values: Any, address: Any) -> Any:
    """Whether an address is among some ascending ones."""
    n = up_to(values, address)
    return n > 0 and values[n - 1] == address


_stands = jit(_stands_source, nogil=False, error_model="numpy")


def _put_source(dst: Any, src: Any, left: Any, cuts: Any, out: Any, n: Any) -> Any:
    """Write a copy to `out` from row `n` on, in parts that span no cut; the row behind it, -1: there is none."""
    while left != 0:
        if n == out.shape[1]:
            return -1
        size = left
        if len(cuts):
            at = up_to(cuts, src)
            if at < len(cuts) and cuts[at] < src + size:
                size = cuts[at] - src
            at = up_to(cuts, dst)
            if at < len(cuts) and cuts[at] < dst + size:
                size = cuts[at] - dst
        out[0, n], out[1, n], out[2, n] = dst, src, size
        n += 1
        src += size
        dst += size
        left -= size
    return n


put = jit(_put_source, nogil=False, error_model="numpy")


def _enumerate_source(
    sides: Any,
    dims: Any,
    src_bases: Any,
    dst_bases: Any,
    src_index: Any,
    dst_index: Any,
    apart: Any,
    cuts: Any,
    parameters: Any,
    groups: Any,
    out: Any,
) -> Any:
    """Copies written to `out` (destination, source and size rows); -1 where it is too short.

    A row of `sides` is outer and inner stride, page, table stride and whether there is an index; one of `dims`, the
    outermost first, its size, then strides and table strides of source and destination. `parameters` are first item,
    items, bytes of a run and copies that `out` has room for. `groups` has five rows, of at least `count` items: entries
    and offsets of both sides, and bytes. Addresses are int64 here; they wrap around as unsigned ones do.
    """
    first, count, run = parameters[0], parameters[1], parameters[2]
    src_tables = dst_tables = False
    steps = 1
    for d in range(len(dims)):
        steps *= dims[d, 0]
        src_tables = src_tables or dims[d, 3] != 0
        dst_tables = dst_tables or dims[d, 4] != 0
    # Items that follow each other on both sides are one: all dimensions then step from the first of them.
    made = 0
    last_src = last_dst = 0
    for item in range(first, first + count):
        index = src_index[item] if sides[0, 4] else item
        to = dst_index[item] if sides[1, 4] else item
        if index < 0 or to < 0:
            continue
        page = sides[0, 2]
        outer = index // page if page > 1 else index
        src_entry, src_at = outer * sides[0, 3], outer * sides[0, 0] + (index - outer * page) * sides[0, 1]
        page = sides[1, 2]
        outer = to // page if page > 1 else to
        dst_entry, dst_at = outer * sides[1, 3], outer * sides[1, 0] + (to - outer * page) * sides[1, 1]
        src, dst = src_bases[src_entry] + src_at, dst_bases[dst_entry] + dst_at
        if made:
            g = made - 1
            same = (not src_tables or groups[0, g] == src_entry) and (not dst_tables or groups[2, g] == dst_entry)
            behind = same and src == last_src + groups[4, g] and dst == last_dst + groups[4, g]
            ahead = same and src == last_src - run and dst == last_dst - run
            upper = (src, dst) if behind else (last_src, last_dst)
            if (behind or ahead) and not (_stands(apart, upper[0]) or _stands(apart, upper[1])):
                groups[4, g] += run
                if ahead:
                    groups[0, g], groups[1, g], groups[2, g], groups[3, g] = src_entry, src_at, dst_entry, dst_at
                    last_src, last_dst = src, dst
                continue
        groups[0, made], groups[1, made], groups[2, made], groups[3, made] = src_entry, src_at, dst_entry, dst_at
        groups[4, made] = run
        last_src, last_dst = src, dst
        made += 1
    n = 0
    for step in range(steps):
        rest = step
        src_entry = src_at = dst_entry = dst_at = 0
        for d in range(len(dims) - 1, -1, -1):
            size = dims[d, 0]
            k = rest % size
            rest //= size
            src_at += k * dims[d, 1]
            dst_at += k * dims[d, 2]
            src_entry += k * dims[d, 3]
            dst_entry += k * dims[d, 4]
        for g in range(made):
            src = src_bases[groups[0, g] + src_entry] + groups[1, g] + src_at
            dst = dst_bases[groups[2, g] + dst_entry] + groups[3, g] + dst_at
            left = groups[4, g]
            if n and src == out[1, n - 1] + out[2, n - 1] and dst == out[0, n - 1] + out[2, n - 1]:
                free = not (_stands(apart, src) or _stands(apart, dst))
                if free and not (_stands(cuts, src) or _stands(cuts, dst)):
                    # What is joined may have to be cut again: taken back, and cut as one.
                    n -= 1
                    left += out[2, n]
                    src, dst = out[1, n], out[0, n]
            n = put(dst, src, left, cuts, out, n)
            if n < 0:
                return -1
    return n


def entry_point() -> Any:
    """Compile the function, or load it from the disk's cache."""
    vector = types.Array(types.int64, 1, "C")
    table = types.Array(types.int64, 2, "C")
    compiled = jit(_enumerate_source, nogil=False, error_model="numpy")
    return compiled.compile((table, table, *[vector] * 7, table, table))
