"""The codec's numba kernels, GIL released. Imported on first use only.

`counts` is tokens, channels, alphabet, bytes per slot, flags, and the symbols' strides (layer, token, channel). A
kernel takes streams `begin` to `end` and returns its first fault: kind, stream, value.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numba
import numpy as np
from numba.core import types

from kvraw.codec import args
from kvraw.copying import cpu_plain
from kvraw.runtime.jit import jit, primitive

__all__ = ["count", "decode", "encode", "pack"]

_PACKED, _CLAMP, _SIGNED = args.PACKED, args.CLAMP, args.SIGNED
_BAD_SYMBOL, _TOO_SMALL, _BAD_CDF, _BAD_LENGTH = args.BAD_SYMBOL, args.TOO_SMALL, args.BAD_CDF, args.BAD_LENGTH
_MASK = 0xFFFFFFFF
_TOP = 0x80000000


@primitive(cpu_plain.leading_zeros)
def _leading_zeros(typingctx: Any, value: Any) -> Any:
    """Leading zeros of the low 32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.trunc(arguments[0], ir.IntType(32))
        return builder.zext(builder.ctlz(word, ir.Constant(ir.IntType(1), 0)), ir.IntType(64))

    return types.int64(types.int64), codegen


_inline = numba.njit(nogil=True, inline="always")


@_inline
def _fault_of(cdf: Any, row: Any, alphabet: Any) -> Any:
    """The first entry that is not above the one before it; 0 where all rise."""
    for b in range(1, alphabet):
        if cdf[row + b] <= cdf[row + b - 1]:
            return b
    return 0


def _count_source(symbols: Any, cdf: Any, counts: Any, begin: Any, end: Any) -> Any:
    tokens, channels, alphabet, flags = counts[0], counts[1], counts[2], counts[4]
    at_layer, at_token, at_channel = counts[5], counts[6], counts[7]
    width = alphabet + 1
    block = 64  # channels counted together: a cache line of symbols per token
    tally = np.empty((block, alphabet), np.int64)
    fault = (0, 0, 0)
    stream = begin
    while stream < end:
        layer, channel = stream // channels, stream % channels
        some = min(block, min(end - stream, channels - channel))
        tally[:some, :] = 0
        base = layer * at_layer + channel * at_channel
        for t in range(tokens):
            for c in range(some):
                s = np.int64(symbols[base + t * at_token + c * at_channel])
                if s >= alphabet:
                    if not flags & _CLAMP and fault[0] == 0:
                        fault = (_BAD_SYMBOL, stream + c, s)
                    s = 0 if flags & _SIGNED and s > 127 else alphabet - 1
                tally[c, s] += 1
        for c in range(some):
            below = np.int64(0)
            row = (stream + c) * width
            for b in range(width):
                share = (0xFFFF - alphabet) * below // tokens if tokens else 0
                cdf[row + b] = share + b
                if b < alphabet:
                    below += tally[c, b]
        stream += some
    return fault


def _encode_source(symbols: Any, cdf: Any, data: Any, lengths: Any, counts: Any, begin: Any, end: Any) -> Any:
    tokens, channels, alphabet, room = counts[0], counts[1], counts[2], counts[3]
    at_layer, at_token, at_channel = counts[5], counts[6], counts[7]
    ends = np.empty((alphabet, 2), np.int64)
    fault = (0, 0, 0)
    for stream in range(begin, end):
        row = stream * (alphabet + 1)
        wrong = _fault_of(cdf, row, alphabet)
        if wrong:
            if fault[0] == 0:
                fault = (_BAD_CDF, stream, wrong)
            lengths[stream] = 0
            continue
        for b in range(alphabet):
            ends[b, 0] = cdf[row + b]
            ends[b, 1] = 0x10000 if b == alphabet - 1 else cdf[row + b + 1]
        source = stream // channels * at_layer + stream % channels * at_channel
        start = stream * room
        at, gathered, filled = np.int64(0), np.int64(0), np.int64(0)
        low, high, pending = np.int64(0), np.int64(_MASK), np.int64(0)
        bad = -1
        # One step behind the last symbol closes the stream: the bit below the top one, and its inverse.
        for t in range(tokens + 1):
            if t < tokens:
                s = np.int64(symbols[source])
                source += at_token
                if s >= alphabet:
                    bad, s = s, 0
                span = high - low + 1
                high = low + (span * ends[s, 1] >> 16) - 1
                low += span * ends[s, 0] >> 16
                same = _leading_zeros(low ^ high)
                settled = low >> (32 - same)
            else:
                settled, same = low >> 30 & 1, 1
                pending += 1
            if same:
                if same + pending <= 32:
                    gathered = gathered << (same + pending) | (settled + (((1 << pending) - 1) << (same - 1)))
                    filled += same + pending
                    if filled >= 32:
                        filled -= 32
                        word = gathered >> filled
                        gathered &= (1 << filled) - 1
                        if at + 4 <= room:
                            data[start + at] = word >> 24 & 0xFF
                            data[start + at + 1] = word >> 16 & 0xFF
                            data[start + at + 2] = word >> 8 & 0xFF
                            data[start + at + 3] = word & 0xFF
                        at += 4
                else:
                    bit = settled >> (same - 1)
                    for k in range(same + pending):
                        one = bit if k == 0 else 1 - bit if k <= pending else settled >> (same + pending - 1 - k) & 1
                        gathered = gathered << 1 | one
                        filled += 1
                        if filled == 32:
                            for j in range(4):
                                if at + 4 <= room:
                                    data[start + at + j] = gathered >> (24 - 8 * j) & 0xFF
                            at += 4
                            gathered, filled = np.int64(0), np.int64(0)
                pending = np.int64(0)
                low = low << same & _MASK
                high = high << same & _MASK | ((1 << same) - 1)
            straddles = _leading_zeros(~((low & ~high) << 1))
            low = low << straddles & 0x7FFFFFFF
            high = (high << straddles | ((1 << straddles) - 1)) & _MASK | _TOP
            pending += straddles
        while filled > 0:
            if at < room:
                data[start + at] = (gathered >> (filled - 8) if filled >= 8 else gathered << (8 - filled)) & 0xFF
            at += 1
            filled -= 8
        lengths[stream] = at
        if fault[0] == 0:
            if bad >= 0:
                fault = (_BAD_SYMBOL, stream, bad)
            elif at > room:
                fault = (_TOO_SMALL, stream, at)
    return fault


def _decode_source(symbols: Any, cdf: Any, data: Any, lengths: Any, counts: Any, begin: Any, end: Any) -> Any:
    tokens, channels, alphabet, room, flags = counts[0], counts[1], counts[2], counts[3], counts[4]
    at_layer, at_token, at_channel = counts[5], counts[6], counts[7]
    size = len(data)
    half = 1
    while half * 2 < alphabet:
        half *= 2
    ends = np.empty(2 * half + 1, np.int64)
    fault = (0, 0, 0)
    for stream in range(begin, end):
        row = stream * (alphabet + 1)
        target = stream // channels * at_layer + stream % channels * at_channel
        wrong = _fault_of(cdf, row, alphabet)
        if wrong:
            if fault[0] == 0:
                fault = (_BAD_CDF, stream, wrong)
            for t in range(tokens):
                symbols[target + t * at_token] = 0
            continue
        for b in range(len(ends)):
            ends[b] = cdf[row + b] if b < alphabet else 0x10000
        if flags & _PACKED:
            at = np.int64(lengths[stream - 1]) if stream else np.int64(0)
            stop = np.int64(lengths[stream])
            value, outside = stop, False
        else:
            at = stream * room
            stop = at + np.int64(lengths[stream])
            value, outside = stop - at, stop - at > room
        if outside or at < 0 or stop < at or stop > size:
            if fault[0] == 0:
                fault = (_BAD_LENGTH, stream, value)
            at = stop = np.int64(0)
        low, high = np.int64(0), np.int64(_MASK)
        window, held, distance = np.int64(0), np.int64(0), np.int64(0)  # `held` low bits of the window are not used yet
        shift = 32
        for t in range(tokens + 1):
            while held < shift:
                window <<= 8
                if at < stop:
                    window |= np.int64(data[at])
                at += 1
                held += 8
            held -= shift
            distance = (distance << shift | window >> held) & _MASK
            window &= (1 << held) - 1
            if t == tokens:
                break
            distance = min(distance, high - low)
            span, limit = high - low + 1, (distance + 1) << 16
            s, step = np.int64(0), half
            while step:
                s = s + step if span * ends[s + step] < limit else s
                step >>= 1
            symbols[target + t * at_token] = s
            lower = span * ends[s] >> 16
            high = low + (span * ends[s + 1] >> 16) - 1
            low += lower
            distance = (distance - lower) & _MASK
            same = _leading_zeros(low ^ high)
            low = low << same & _MASK
            high = high << same & _MASK | ((1 << same) - 1)
            straddles = _leading_zeros(~((low & ~high) << 1))
            low = low << straddles & 0x7FFFFFFF
            high = (high << straddles | ((1 << straddles) - 1)) & _MASK | _TOP
            shift = same + straddles
    return fault


def _pack_source(slots: Any, ends: Any, packed: Any, room: Any, begin: Any, end: Any) -> None:
    for stream in range(begin, end):
        start = ends[stream - 1] if stream else 0
        for k in range(ends[stream] - start):
            packed[start + k] = slots[stream * room + k]


count = jit(_count_source)
encode = jit(_encode_source)
decode = jit(_decode_source)
pack = jit(_pack_source)
