"""Quantization in numba, GIL released. Imported on first use only.

`values` and `symbols` are flat; `counts` is tokens, channels, and the values' strides in elements (layer, token). A
kernel takes rows `begin` to `end`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvraw.copying.cpu_floats import narrow, widen
from kvraw.runtime.jit import jit

__all__ = ["dequantize", "quantize"]


def _quantize_source(values: Any, symbols: Any, maxima: Any, middles: Any, counts: Any, begin: Any, end: Any) -> Any:
    tokens, channels = counts[0], counts[1]
    row = np.empty(channels, np.float32)
    bad = -1
    for at in range(begin, end):
        base = at // tokens * counts[2] + at % tokens * counts[3]
        largest = np.float32(0)
        for k in range(channels):
            value = widen(values[base + k])
            row[k] = value
            largest = max(largest, abs(value))
        finite = True
        for k in range(channels):
            finite &= np.isfinite(row[k])
        if not finite and bad < 0:
            bad = at
        maxima[at] = largest
        middle = np.float32(middles[at // tokens])
        scale = middle / largest if largest > 0 else np.float32(np.inf)
        start = at * channels
        if finite and np.isfinite(scale):
            for k in range(channels):
                symbols[start + k] = np.uint8(np.int32(np.rint(row[k] * scale + middle)))
        else:
            for k in range(channels):
                symbols[start + k] = np.uint8(middle)
    return bad


def _dequantize_source(values: Any, symbols: Any, maxima: Any, middles: Any, counts: Any, begin: Any, end: Any) -> Any:
    tokens, channels = counts[0], counts[1]
    for at in range(begin, end):
        base = at // tokens * counts[2] + at % tokens * counts[3]
        middle, largest = np.float32(middles[at // tokens]), maxima[at]
        start = at * channels
        for k in range(channels):
            share = (np.float32(symbols[start + k]) - middle) / middle
            values[base + k] = narrow(share * largest, values[base + k])
    return -1


quantize = jit(_quantize_source)
dequantize = jit(_dequantize_source)
