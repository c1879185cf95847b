"""Damaged streams on the CPU: `python -m tests.fuzz.codec [--streams N] [--seed S]`.

Every buffer lies between pages that may not be touched, once against the one before it and once against the one behind:
an access outside, by as little as a byte, ends the process.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import time

import numpy as np

import kvraw
from kvraw import codec

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Fenced:
    """A copy of an array, up against a forbidden page: the one behind it, or the one before it."""

    def __init__(self, values: np.ndarray, at_end: bool) -> None:
        room = -(-max(values.nbytes, 1) // PAGE) * PAGE
        self._map = mmap.mmap(-1, room + 2 * PAGE)
        whole = np.frombuffer(self._map, np.uint8)
        offset = PAGE + (room - values.nbytes if at_end else 0)
        self.array = whole[offset : offset + values.nbytes].view(values.dtype).reshape(values.shape)
        self.array[...] = values
        base = int(whole.ctypes.data)
        for page in (base, base + PAGE + room):
            if _libc.mprotect(page, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")


def damage(rng: np.random.Generator, encoded: codec.Encoded) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Data, prefix sums and distributions, each perhaps altered."""
    data, ends, cdf = encoded.data.copy(), encoded.ends.copy(), encoded.cdf.copy()
    kind = rng.integers(0, 6)
    if kind <= 2 and data.size:
        at = rng.integers(0, data.size, rng.integers(1, data.size + 1))
        data[at] ^= (1 << rng.integers(0, 8, at.size)).astype(np.uint8)
    if kind == 1 and data.size:
        data = data[: rng.integers(0, data.size)]
        ends = np.minimum(ends, data.size)
    if kind == 3:
        data = rng.integers(0, 256, data.size).astype(np.uint8)
    if kind == 4:
        ends.ravel()[rng.integers(0, ends.size)] = rng.choice([-1, 0, data.size + 1, 2**31, 2**62, -(2**63)])
    if kind == 5:
        cdf.ravel()[rng.integers(0, cdf.size)] = rng.integers(0, 65536)
    return data, ends, cdf


def run(streams: int, seed: int) -> tuple[int, int]:
    """Decode and code damaged streams; returns how many, and how many calls were refused."""
    rng = np.random.default_rng(seed)
    done = refused = calls = 0
    while done < streams:
        alphabet = int(rng.choice([1, 2, 3, 16, 31, 32, 33, 64, 200, 256]))
        shape = (int(rng.integers(1, 4)), int(rng.integers(0, 60)), int(rng.integers(1, 120)))
        symbols = rng.integers(0, alphabet, shape).astype(np.uint8)
        if rng.random() < 0.5:
            symbols //= np.uint8(rng.integers(1, 20))
        encoded = codec.encode(symbols, alphabet)
        data, ends, cdf = damage(rng, encoded)
        at_end = bool(calls % 2)
        table = Fenced(cdf, at_end).array
        out = Fenced(np.full(shape, 0xCC, np.uint8), at_end).array
        width = np.int64 if ends.max(initial=0) > 2**31 - 1 or ends.min(initial=0) < -(2**31) else np.int32
        try:
            codec.decode_into(
                table, Fenced(data, at_end).array, Fenced(ends.astype(width), at_end).array, out, packed=True
            )
        except (kvraw.BoundsError, kvraw.LayoutError):
            refused += 1
        assert (out < alphabet).all()
        room = int(rng.integers(1, shape[1] + 8))
        slots = Fenced(np.zeros((shape[0], shape[2], room), np.uint8), at_end).array
        lengths = Fenced(np.zeros((shape[0], shape[2]), np.int32), at_end).array
        if rng.random() < 0.1 and symbols.size:
            symbols.ravel()[rng.integers(0, symbols.size)] = 255
        given = Fenced(symbols, at_end).array
        try:
            codec.encode_into(table, given, slots, lengths)
        except (kvraw.BoundsError, kvraw.LayoutError):
            refused += 1
        codec.write_cdf(given, Fenced(cdf, at_end).array, clamp=True)
        done += shape[0] * shape[2]
        calls += 1
    return done, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.perf_counter()
    done, refused = run(options.streams, options.seed)
    print(f"{done} streams, {refused} calls refused, no access outside a buffer, {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
