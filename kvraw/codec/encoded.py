"""Coded symbols as one object in host memory, and as bytes to be stored."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvraw.codec.operands import MOST_SYMBOLS, MOST_TOKENS
from kvraw.errors import BoundsError, LayoutError

__all__ = ["Encoded", "seal", "unseal"]

_VERSION = 1
_SEAL = struct.Struct("<4sHHQI")  # magic, version, reserved, bytes behind the seal, CRC-32 of the rest
_SHAPE = struct.Struct("<QQQQQ")  # layers, tokens, channels, alphabet, bytes of the streams


def seal(magic: bytes, payload: bytes) -> bytes:
    """A payload behind a header with a magic word, a version, its length and a checksum."""
    head = _SEAL.pack(magic, _VERSION, 0, len(payload), 0)
    return _SEAL.pack(magic, _VERSION, 0, len(payload), zlib.crc32(payload, zlib.crc32(head))) + payload


def unseal(magic: bytes, data: bytes | bytearray | memoryview) -> memoryview:
    """Check the header and the checksum; the payload.

    Raises
    ------
    LayoutError
        Another format or version, truncated, or altered; says which.
    """
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise TypeError(f"data is a {type(data).__name__}, must be dense bytes: {error}") from None
    if len(view) < _SEAL.size:
        raise LayoutError(f"data has {len(view)} bytes, must have at least {_SEAL.size}")
    found, version, reserved, size, checksum = _SEAL.unpack_from(view)
    if found != magic:
        raise LayoutError(f"data begins with {bytes(found)!r}, must begin with {magic!r}")
    if version != _VERSION:
        raise LayoutError(f"data has format version {version}, must have {_VERSION}")
    payload = view[_SEAL.size :]
    if len(payload) != size:
        raise LayoutError(f"data has {len(payload)} bytes behind its header, must have {size}")
    head = _SEAL.pack(found, version, reserved, size, 0)
    if zlib.crc32(payload, zlib.crc32(head)) != checksum:
        raise LayoutError(f"data has CRC-32 {zlib.crc32(payload, zlib.crc32(head)):#010x}, must have {checksum:#010x}")
    return payload


def require_sizes(*sizes: int) -> None:
    """Raise `BoundsError` where a header has a size that no array has: beside one of 0, nothing else would tell."""
    if max(sizes) >= 1 << 31:
        raise BoundsError(f"data has sizes {sizes} in its header, each must be below {1 << 31}")
    if math.prod(max(size, 1) for size in sizes) >= 1 << 60:
        raise BoundsError(f"data has sizes {sizes} in its header, whose product must be below {1 << 60}")


@dataclass(frozen=True, eq=False, slots=True)
class Encoded:
    """Streams back to back, with what is needed to decode them.

    Attributes
    ----------
    data : numpy.ndarray of uint8
        The streams, in the order of `ends`.
    ends : numpy.ndarray of int64, [layers, channels]
        Inclusive prefix sums of the streams' bytes.
    cdf : numpy.ndarray of uint16, [layers, channels, alphabet + 1]
        The distributions.
    tokens : int
        Symbols of each stream.

    Raises
    ------
    LayoutError, BoundsError
        The parts do not fit together.

    Examples
    --------
    >>> symbols = np.random.default_rng(1).integers(0, 16, (2, 256, 64), dtype=np.uint8)
    >>> stored = kvraw.codec.encode(symbols).to_bytes()
    >>> kvraw.codec.Encoded.from_bytes(stored).shape
    (2, 256, 64)
    """

    data: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]
    cdf: npt.NDArray[np.uint16]
    tokens: int

    def __post_init__(self) -> None:
        layers, channels, width = self.cdf.shape
        if self.ends.shape != (layers, channels):
            raise LayoutError(f"ends has shape {self.ends.shape}, must be ({layers}, {channels})")
        if not 2 <= width <= MOST_SYMBOLS + 1:
            raise LayoutError(f"cdf has {width} entries per channel, must have 2 to {MOST_SYMBOLS + 1}")
        if not 0 <= self.tokens < MOST_TOKENS:
            raise BoundsError(f"tokens is {self.tokens}, must be in [0, {MOST_TOKENS})")
        ends = self.ends.ravel()
        last = int(ends[-1]) if ends.size else 0
        if last != self.data.size or (np.diff(ends, prepend=0) < 0).any():
            raise BoundsError(f"ends must rise from 0 to {self.data.size}, the bytes of data; the last is {last}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, tokens and channels of the symbols."""
        return self.cdf.shape[0], self.tokens, self.cdf.shape[1]

    @property
    def alphabet(self) -> int:
        """Symbols that there are."""
        return int(self.cdf.shape[2]) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Bytes of each stream."""
        return np.diff(self.ends.ravel(), prepend=0).astype(np.int32).reshape(self.ends.shape)

    @property
    def decoded_nbytes(self) -> int:
        """Bytes of the symbols that `decode` makes."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of `to_bytes`."""
        return _SEAL.size + _SHAPE.size + self.data.nbytes + 4 * self.ends.size + self.cdf.nbytes

    def to_bytes(self) -> bytes:
        """Write everything behind a header with version, shapes and checksum.

        Returns
        -------
        bytes
            For `from_bytes`.
        """
        shape = _SHAPE.pack(*self.shape, self.alphabet, self.data.size)
        parts = (shape, self.cdf.astype("<u2").tobytes(), self.lengths.astype("<i4").tobytes(), self.data.tobytes())
        return seal(b"KVRE", b"".join(parts))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Encoded:
        """Read what `to_bytes` wrote; takes about the memory of `data`. What it decodes to: `decoded_nbytes`.

        Returns
        -------
        Encoded
            A copy: `data` need not be kept.

        Raises
        ------
        LayoutError, BoundsError
            It is something else, of another version, truncated, altered or inconsistent; says which.
        """
        view = unseal(b"KVRE", data)
        if len(view) < _SHAPE.size:
            raise LayoutError(f"data has {len(view)} bytes behind its header, must have at least {_SHAPE.size}")
        layers, tokens, channels, alphabet, size = _SHAPE.unpack_from(view)
        require_sizes(layers, tokens, channels, alphabet)
        streams = layers * channels
        want = _SHAPE.size + streams * (2 * (alphabet + 1) + 4) + size
        if len(view) != want:
            raise LayoutError(f"data has {len(view)} bytes behind its header, its shapes need {want}")
        at = _SHAPE.size
        cdf = np.frombuffer(view, "<u2", streams * (alphabet + 1), at).astype(np.uint16)
        at += cdf.nbytes
        lengths = np.frombuffer(view, "<i4", streams, at)
        at += lengths.nbytes
        ends = np.cumsum(lengths, dtype=np.int64)
        streams_data = np.frombuffer(view, np.uint8, size, at).copy()
        shaped = cdf.reshape(layers, channels, alphabet + 1)
        return cls(streams_data, ends.reshape(layers, channels), shaped, tokens)
