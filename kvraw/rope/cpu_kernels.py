"""Key re-rotation in numba, GIL released. Imported on first use only.

`key` and `cache` are flat; `counts` is heads, half the rotary dimension, and in elements the distances of layers,
tokens, heads, and rows of the cache; then 1 for interleaved pairs. A kernel takes rows `begin` to `end`: the tokens of
one layer, then of the next.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from kvraw.copying.cpu_floats import narrow, widen
from kvraw.runtime.jit import jit

__all__ = ["rerotate"]


def _combine_source(out: Any, a: Any, b: Any, c: Any, d: Any, like: Any) -> None:
    """``a * b + c * d``, all rounded to the keys' type. With more than five arrays the loop stays scalar."""
    for i in range(len(out)):
        first = widen(narrow(a[i] * b[i], like))
        second = widen(narrow(c[i] * d[i], like))
        out[i] = widen(narrow(first + second, like))


def _load_source(x: Any, y: Any, elements: Any, apart: Any, step: Any) -> None:
    if step == 1:
        for i in range(len(x)):
            x[i] = widen(elements[i])
        for i in range(len(y)):
            y[i] = widen(elements[apart + i])
    else:
        for i in range(len(x)):
            x[i] = widen(elements[2 * i])
            y[i] = widen(elements[2 * i + 1])


def _store_source(elements: Any, x: Any, y: Any, apart: Any, step: Any, like: Any) -> None:
    if step == 1:
        for i in range(len(x)):
            elements[i] = narrow(x[i], like)
        for i in range(len(y)):
            elements[apart + i] = narrow(y[i], like)
    else:
        for i in range(len(x)):
            elements[2 * i] = narrow(x[i], like)
            elements[2 * i + 1] = narrow(y[i], like)


_combine = numba.njit(nogil=True, inline="never")(_combine_source)
_load = numba.njit(nogil=True, inline="never")(_load_source)
_store = numba.njit(nogil=True, inline="never")(_store_source)


def _rerotate_source(key: Any, cache: Any, old: Any, new: Any, counts: Any, begin: Any, end: Any) -> None:
    heads, half = counts[0], counts[1]
    step = 2 if counts[6] else 1
    x, y = np.empty(half, np.float32), np.empty(half, np.float32)
    u, v = np.empty(half, np.float32), np.empty(half, np.float32)
    oc, os, minus_os = np.empty(half, np.float32), np.empty(half, np.float32), np.empty(half, np.float32)
    nc, ns, minus_ns = np.empty(half, np.float32), np.empty(half, np.float32), np.empty(half, np.float32)
    like = cache[0]
    for row in range(begin, end):
        layer, token = divmod(row, len(old))
        before, after = old[token] * counts[5], new[token] * counts[5]
        _load(oc, os, cache[before : before + 2 * half], half, 1)
        _load(nc, ns, cache[after : after + 2 * half], half, 1)
        # To subtract is to add the negative, in every case that rounding knows.
        for i in range(half):
            minus_os[i] = -os[i]
        for i in range(half):
            minus_ns[i] = -ns[i]
        for head in range(heads):
            at = layer * counts[2] + token * counts[3] + head * counts[4]
            elements = key[at : at + 2 * half]
            _load(x, y, elements, half, step)
            _combine(u, x, oc, y, os, like)
            _combine(v, y, oc, x, minus_os, like)
            _combine(x, u, nc, v, minus_ns, like)
            _combine(y, v, nc, u, ns, like)
            _store(elements, x, y, half, step, like)


rerotate = jit(_rerotate_source)
