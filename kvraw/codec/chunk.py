"""A KV chunk, compressed: quantized, coded, and back."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvraw.arrays import tensor_view
from kvraw.codec.arena import give_arena, offsets, take_arena
from kvraw.codec.args import MOST_LAYERS
from kvraw.codec.encoded import Encoded, require_sizes, seal, unseal
from kvraw.codec.limit import memory, new_array
from kvraw.codec.operands import common_device
from kvraw.codec.quantize import DTYPES, Chunk, bins_per_layer, run
from kvraw.codec.streams import (
    decode,
    decode_from_arena,
    dense,
    encode,
    encode_from_arena,
    scratch_sizes,
    slot_bytes,
)
from kvraw.copying.transfer import Transfer
from kvraw.errors import BoundsError, LayoutError
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.stream import stream_handle

__all__ = ["Compressed", "compress", "decompress"]

_HEAD = struct.Struct("<10sB5xQQQQ")  # element type, axes, the sizes of the axes (1 where there are fewer than four)
_ARRAYS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@dataclass(frozen=True, eq=False, slots=True)
class Compressed:
    """A KV chunk as coded symbols with the scale of every token.

    Attributes
    ----------
    encoded : Encoded
        The symbols; planes count as layers.
    maxima : numpy.ndarray of float32, [planes * layers, tokens]
        The largest magnitude of each token.
    bins : numpy.ndarray of uint16, [planes * layers]
        Bins of each layer.
    shape : tuple of int
        The chunk's axes.
    dtype : str
        The chunk's element type.

    Raises
    ------
    LayoutError, BoundsError
        The parts do not fit together.

    Examples
    --------
    >>> chunk = np.random.default_rng(3).standard_normal((2, 4, 64, 128)).astype(np.float16)
    >>> stored = kvraw.codec.compress(chunk).to_bytes()
    >>> kvraw.codec.Compressed.from_bytes(stored).decoded_nbytes == chunk.nbytes
    True
    """

    encoded: Encoded
    maxima: npt.NDArray[np.float32]
    bins: npt.NDArray[np.uint16]
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        layers, tokens, _ = self.encoded.shape
        bins_per_layer(self.bins.tolist(), layers)
        if len(self.shape) not in (3, 4) or (math.prod(self.shape[:-2]), *self.shape[-2:]) != self.encoded.shape:
            raise LayoutError(f"shape is {self.shape}, its symbols are {self.encoded.shape}")
        if layers > MOST_LAYERS:
            raise BoundsError(f"shape is {self.shape}: {layers} planes and layers, must be at most {MOST_LAYERS}")
        if self.maxima.shape != (layers, tokens) or self.dtype not in DTYPES:
            raise LayoutError(f"maxima has shape {self.maxima.shape} and dtype is {self.dtype!r}")

    @property
    def decoded_nbytes(self) -> int:
        """Bytes of the chunk that `decompress` makes."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]

    @property
    def nbytes(self) -> int:
        """Bytes of `to_bytes`."""
        return len(seal(b"KVRC", b"")) + _HEAD.size + self.bins.nbytes + self.maxima.nbytes + self.encoded.nbytes

    @property
    def ratio(self) -> float:
        """Bytes of the chunk over bytes compressed."""
        return self.decoded_nbytes / self.nbytes

    def to_bytes(self) -> bytes:
        """Write everything behind a header with version, shapes and checksum.

        Returns
        -------
        bytes
            For `from_bytes`.
        """
        sizes = (*(1 for _ in range(4 - len(self.shape))), *self.shape)
        head = _HEAD.pack(self.dtype.encode(), len(self.shape), *sizes)
        scales = self.bins.astype("<u2").tobytes() + self.maxima.astype("<f4").tobytes()
        return seal(b"KVRC", head + scales + self.encoded.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Compressed:
        """Read what `to_bytes` wrote; takes about the memory of `data`. What it decodes to: `decoded_nbytes`.

        Returns
        -------
        Compressed
            A copy: `data` need not be kept.

        Raises
        ------
        LayoutError, BoundsError
            It is something else, of another version, truncated, altered or inconsistent; says which.
        """
        view = unseal(b"KVRC", data)
        if len(view) < _HEAD.size:
            raise LayoutError(f"data has {len(view)} bytes behind its header, must have at least {_HEAD.size}")
        dtype, axes, *sizes = _HEAD.unpack_from(view)
        require_sizes(*sizes)
        layers, tokens = sizes[0] * sizes[1], sizes[2]
        at = _HEAD.size
        end = at + layers * (2 + 4 * tokens)
        if len(view) < end:
            raise LayoutError(f"data has {len(view)} bytes behind its header, its shapes need at least {end}")
        bins = np.frombuffer(view, "<u2", layers, at).astype(np.uint16)
        maxima = np.frombuffer(view, "<f4", layers * tokens, at + 2 * layers).astype(np.float32)
        shape = tuple(sizes[4 - axes :]) if axes in (3, 4) else ()
        encoded = Encoded.from_bytes(view[end:])
        return cls(encoded, maxima.reshape(layers, tokens), bins, shape, dtype.rstrip(b"\0").decode("ascii", "replace"))


def compress(chunk: Any, bins: int | Sequence[int] = 32, *, dtype: str | None = None, stream: Any = None) -> Compressed:
    """Compress a KV chunk; returns when it is done. Lossy: see `quantize_into` for what becomes of a value.

    Parameters
    ----------
    chunk : tensor of float32, float16 or bfloat16
        [planes, layers, tokens, channels], or without planes, in host memory or on a GPU.
    bins : int or sequence of int
        For all planes and layers, or one for each, plane by plane; 4 to 256.
    dtype : str, optional
        The chunk's element type, where its protocol does not tell.
    stream : object
        On a GPU, the stream that the chunk is ready on.

    Returns
    -------
    Compressed
        In host memory.

    Raises
    ------
    BoundsError, LayoutError, TypeError, PlacementError
        See `quantize_into`.

    Examples
    --------
    >>> chunk = np.random.default_rng(3).standard_normal((2, 4, 64, 128)).astype(np.float16)
    >>> compressed = kvraw.codec.compress(chunk, bins=16)
    >>> compressed.nbytes < chunk.nbytes, compressed.dtype
    (True, 'float16')
    """
    taken = Chunk.take(chunk, dtype)
    shape: tuple[int, int, int] = taken.view.shape  # type: ignore[assignment]
    layers, tokens, channels = shape
    per_layer = bins_per_layer(bins, layers)
    alphabet = 2 * (int(per_layer.max(initial=4)) // 2 - 1) + 1
    device = common_device({"chunk": taken.view})
    original = tensor_view(chunk).shape
    if device is None:
        symbols, maxima = np.empty(shape, np.uint8), np.empty((layers, tokens), np.float32)
        run(False, taken, per_layer, symbols, maxima, None)
        return Compressed(encode(symbols, alphabet), maxima, per_layer, original, taken.dtype)
    handle = stream_handle(stream, device)
    arena = take_arena(device)
    sizes = scratch_sizes(layers * channels, alphabet + 1, slot_bytes(tokens, alphabet, True))
    with DeviceScope(device):
        scratch, at_symbols, at_maxima = arena.on_device(offsets(sizes)[-1], math.prod(shape), 4 * layers * tokens)
        codes = dense(at_symbols, shape, 1, device, arena)
        scales = dense(at_maxima, (layers, tokens), 4, device, arena)
        quantized = run(False, taken, per_layer, codes, scales, handle)
        encoded, found = encode_from_arena(
            arena, codes, alphabet, None, handle, scratch, (at_maxima, 4 * layers * tokens)
        )
        quantized.wait()
    give_arena(arena)
    return Compressed(encoded, found.view(np.float32).reshape(layers, tokens), per_layer, original, taken.dtype)


def decompress(
    compressed: Compressed,
    out: Any = None,
    *,
    dtype: str | None = None,
    limit: int | None = None,
    stream: Any = None,
) -> Any:
    """Decompress a KV chunk.

    Parameters
    ----------
    compressed : Compressed
        What `compress` made.
    out : tensor, optional
        Of the chunk's shape, in any of the element types, in host memory or on a GPU; default: a new array in host
        memory, bfloat16 as its bits in uint16.
    dtype : str, optional
        The element type of `out`, where its protocol does not tell.
    limit : int, optional
        Most bytes of a new array. Default: 256 MiB, or 1024 bytes for each of `compressed.nbytes` where that is more;
        `compressed.decoded_nbytes` is what it takes.
    stream : object
        On a GPU, the stream to enqueue it on.

    Returns
    -------
    numpy.ndarray or Transfer
        The new array, or, with `out`, an operation to wait for.

    Raises
    ------
    LayoutError, TypeError, PlacementError
        `out` does not fit; says why.
    BoundsError
        A new array would take more than `limit`.

    Examples
    --------
    >>> chunk = np.random.default_rng(3).standard_normal((2, 4, 64, 128)).astype(np.float16)
    >>> restored = kvraw.codec.decompress(kvraw.codec.compress(chunk))
    >>> restored.shape, bool(np.abs(restored - chunk).max() < 0.2)
    ((2, 4, 64, 128), True)
    """
    made = out
    if out is None:
        made = new_array("compressed", compressed.shape, _ARRAYS[compressed.dtype], compressed.nbytes, limit)
    taken = Chunk.take(made, dtype or (compressed.dtype if out is None else None), "out", written=True)
    if taken.view.shape != compressed.encoded.shape:
        raise LayoutError(f"out has shape {tensor_view(made).shape}, must be {compressed.shape}")
    device = common_device({"out": taken.view})
    bins, maxima = compressed.bins, compressed.maxima
    if device is None:
        symbols = memory("compressed", compressed.encoded.shape, np.uint8)
        decode(compressed.encoded, symbols)
        run(True, taken, bins, symbols, maxima, None)
        return made if out is None else Transfer()
    handle = stream_handle(stream, device)
    if math.prod(compressed.shape) == 0:
        return Transfer()
    arena = take_arena(device)
    with DeviceScope(device):
        decoded, codes, (at_maxima,) = decode_from_arena(arena, compressed.encoded, None, handle, [maxima])
        scales = dense(at_maxima, maxima.shape, 4, device, arena)
        return decoded & run(True, taken, bins, codes, scales, handle, lambda: give_arena(arena))
