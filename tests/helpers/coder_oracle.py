"""The entropy coder bit by bit in Python's integers; quantization and key re-rotation in plain numpy.

Shares no code with kvraw.
"""

from __future__ import annotations

import numpy as np

WHOLE = 1 << 32
HALF, QUARTER = WHOLE // 2, WHOLE // 4


def cdf(symbols: np.ndarray, alphabet: int) -> np.ndarray:
    """[layers, channels, alphabet + 1] from [layers, tokens, channels]."""
    layers, tokens, channels = symbols.shape
    out = np.zeros((layers, channels, alphabet + 1), np.uint16)
    for layer in range(layers):
        for channel in range(channels):
            column = symbols[layer, :, channel].tolist()
            for b in range(alphabet + 1):
                below = sum(s < b for s in column)
                out[layer, channel, b] = ((65535 - alphabet) * below // tokens if tokens else 0) + b
    return out


def _ends(row: list[int], symbol: int) -> tuple[int, int]:
    last = len(row) - 2
    return row[symbol], 65536 if symbol == last else row[symbol + 1]


def encode_channel(row: list[int], symbols: list[int]) -> bytes:
    """One stream, by the book: halve, straddle, one bit at a time."""
    bits: list[int] = []
    low, size, waiting = 0, WHOLE, 0

    def emit(bit: int) -> None:
        nonlocal waiting
        bits.append(bit)
        bits.extend([1 - bit] * waiting)
        waiting = 0

    for symbol in symbols:
        a, b = _ends(row, symbol)
        low, end = low + size * a // 65536, low + size * b // 65536
        size = end - low
        while True:
            if low + size <= HALF:
                emit(0)
            elif low >= HALF:
                emit(1)
                low -= HALF
            elif low >= QUARTER and low + size <= 3 * QUARTER:
                waiting += 1
                low -= QUARTER
            else:
                break
            low, size = low * 2, size * 2
    waiting += 1
    emit(int(low >= QUARTER))
    bits += [0] * (-len(bits) % 8)
    return bytes(int("".join(map(str, bits[k : k + 8])), 2) for k in range(0, len(bits), 8))


def decode_channel(row: list[int], data: bytes, tokens: int) -> list[int]:
    """The symbols of one stream, by dividing for the position in the distribution."""
    bits = [byte >> (7 - k) & 1 for byte in data for k in range(8)]
    at = 0

    def take() -> int:
        nonlocal at
        at += 1
        return bits[at - 1] if at <= len(bits) else 0

    code = 0
    for _ in range(32):
        code = code * 2 + take()
    low, size, out = 0, WHOLE, []
    for _ in range(tokens):
        position = ((code - low + 1) * 65536 - 1) // size
        symbol = max(s for s in range(len(row) - 1) if row[s] <= position)
        out.append(symbol)
        a, b = _ends(row, symbol)
        low, end = low + size * a // 65536, low + size * b // 65536
        size = end - low
        while True:
            if low + size <= HALF:
                shift = 0
            elif low >= HALF:
                shift = HALF
            elif low >= QUARTER and low + size <= 3 * QUARTER:
                shift = QUARTER
            else:
                break
            low, size, code = (low - shift) * 2, size * 2, (code - shift) * 2 + take()
    return out


def encode(table: np.ndarray, symbols: np.ndarray) -> list[list[bytes]]:
    """The streams of [layers, tokens, channels]."""
    layers, _, channels = symbols.shape
    return [
        [encode_channel(table[k, c].tolist(), symbols[k, :, c].tolist()) for c in range(channels)]
        for k in range(layers)
    ]


def quantize(values: np.ndarray, bins: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Symbols and maxima of float32 [layers, tokens, channels]."""
    middle = np.float32([b // 2 - 1 for b in bins])[:, None, None]
    largest = np.abs(values).max(axis=2, keepdims=True) if values.shape[2] else np.zeros((*values.shape[:2], 1), "f4")
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = middle / largest
        scaled = np.rint(values * scale + middle)
    return np.where(np.isfinite(scale), scaled, middle).astype(np.uint8), largest[:, :, 0]


def dequantize(symbols: np.ndarray, maxima: np.ndarray, bins: list[int]) -> np.ndarray:
    middle = np.float32([b // 2 - 1 for b in bins])[:, None, None]
    return (symbols.astype(np.float32) - middle) / middle * maxima[:, :, None]


@np.errstate(all="ignore")
def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 rounded once, to nearest even, as the type's bits (float32: as values); NaNs as 0x7FFF."""
    if dtype == "float32":
        return values.astype(np.float32)
    if dtype == "float16":
        return np.where(np.isnan(values), np.uint16(0x7FFF), values.astype(np.float16).view(np.uint16))
    magnitude = np.abs(values)
    with np.errstate(all="ignore"):
        exponent = np.maximum(
            np.floor(np.log2(magnitude, where=magnitude > 0, out=np.full(values.shape, -200.0))), -126
        )
        exponent += 2.0 ** (exponent + 1) <= magnitude
        exponent = np.maximum(exponent - (2.0**exponent > magnitude), -126)
        unit = 2.0 ** (exponent - 7)
        rounded = np.rint(magnitude / unit) * unit  # exact but for the rint, which is to even
        found = np.copysign(np.where(np.isfinite(magnitude), rounded, magnitude), values).astype(np.float32)
    bits = (found.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits)


@np.errstate(all="ignore")
def from_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The type's bits as float64."""
    if dtype == "float32":
        return bits.astype(np.float64)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def rerotate(
    key: np.ndarray, old: np.ndarray, new: np.ndarray, cache: np.ndarray, neox: bool, dtype: str
) -> np.ndarray:
    """Keys [tokens, heads, size] and a cache [positions, rotary] as bits; each operation rounded on its own."""

    def op(values: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return from_bits(to_bits(values, dtype), dtype)

    out, half = key.copy(), cache.shape[1] // 2
    first, second = (slice(half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    x, y = from_bits(key[:, :, first], dtype), from_bits(key[:, :, second], dtype)
    table = from_bits(cache, dtype)
    oc, os, nc, ns = (table[p][:, None, s] for p in (old, new) for s in (slice(half), slice(half, 2 * half)))
    with np.errstate(all="ignore"):
        u, v = op(op(x * oc) + op(y * os)), op(op(y * oc) - op(x * os))
        out[:, :, first] = to_bits(op(u * nc) - op(v * ns), dtype)
        out[:, :, second] = to_bits(op(v * nc) + op(u * ns), dtype)
    return out
