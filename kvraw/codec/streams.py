"""Symbols to an `Encoded` and back: all steps of the coder, in host memory or through a GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvraw.arrays import TensorView, dtype_name, host_bytes, tensor_view
from kvraw.checks import integer
from kvraw.codec import args, cpu, gpu
from kvraw.codec.arena import Arena, give_arena, offsets, take_arena
from kvraw.codec.encoded import Encoded
from kvraw.codec.limit import new_array
from kvraw.codec.operands import MOST_SYMBOLS, Job, common_device, take
from kvraw.copying.device_state import device_state
from kvraw.copying.transfer import Transfer
from kvraw.errors import BoundsError, LayoutError
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.stream import stream_handle

__all__ = ["decode", "decode_from_arena", "dense", "encode", "encode_from_arena", "scratch_sizes", "slot_bytes"]


def slot_bytes(tokens: int, alphabet: int, own: bool) -> int:
    """Most bytes of a stream, to the next 16: with the symbols' `own` distribution, or with any.

    A symbol of share w / 65536 costs log2(65536 / w) bits and, by rounding the interval, at most 2**-13 more; own
    shares are at least (65535 - alphabet) / tokens for each time that a symbol stands. The end takes two bits.
    """
    bits = tokens * ((math.log2(alphabet) + 0.006 if own else 16.0) + 2.0**-13) + 2
    return (math.ceil(bits / 8) + 16) // 16 * 16


def dense(address: int, shape: tuple[int, ...], itemsize: int, device: int | None, owner: object) -> TensorView:
    """A tensor of our own: elements in order and without gaps."""
    strides = tuple(itemsize * math.prod(shape[k + 1 :]) for k in range(len(shape)))
    return TensorView(address, shape, strides, itemsize, device, owner)


def _alphabet(symbols: Any, view: TensorView, cdf: Any) -> int:
    """The alphabet where none is given."""
    if cdf is not None:
        return tensor_view(cdf).shape[-1] - 1
    if common_device({"symbols": view}) is not None:
        raise TypeError("alphabet is not given; symbols on a GPU need it")
    kind = np.int8 if dtype_name(symbols) == "int8" else np.uint8
    found = np.ndarray(view.shape, kind, host_bytes(view).data, strides=view.strides)
    return max(int(found.max(initial=0)), 0) + 1


def encode(symbols: Any, alphabet: int | None = None, *, cdf: Any = None, stream: Any = None) -> Encoded:
    """Code symbols; returns when it is done.

    Parameters
    ----------
    symbols : tensor of uint8 or int8, [layers, tokens, channels]
        In host memory or on a GPU; any non-negative strides.
    alphabet : int, optional
        Symbols are below it; 1 to 256. Default: that of `cdf`, else one more than the largest symbol in host memory.
    cdf : tensor of int16 or uint16, optional
        [layers, channels, alphabet + 1], beside the symbols; default: each channel's own distribution.
    stream : object
        On a GPU, the stream that the symbols are ready on.

    Returns
    -------
    Encoded
        The streams and their distributions, in host memory.

    Raises
    ------
    BoundsError, LayoutError, TypeError, PlacementError
        A symbol is outside the alphabet, a distribution does not rise, or something does not fit; says which.

    Examples
    --------
    >>> symbols = np.random.default_rng(1).integers(0, 16, (2, 256, 64), dtype=np.uint8)
    >>> kvraw.codec.encode(symbols).alphabet
    16
    """
    view = take("symbols", symbols, 3, ("uint8", "int8"), 1, dense=False)
    if alphabet is None:
        alphabet = _alphabet(symbols, view, cdf)
    alphabet = integer("alphabet", alphabet)
    if not 1 <= alphabet <= MOST_SYMBOLS:
        raise BoundsError(f"alphabet is {alphabet}, must be in [1, {MOST_SYMBOLS}]")
    if cdf is not None and take("cdf", cdf, 3, ("int16", "uint16"), 2).shape[2] != alphabet + 1:
        raise LayoutError(f"cdf must have {alphabet + 1} entries per channel for an alphabet of {alphabet}")
    device = common_device({"symbols": view})
    flags = args.SIGNED if dtype_name(symbols) == "int8" else 0
    if device is None:
        return _encode_on_host(view, alphabet, cdf, flags)
    handle = stream_handle(stream, device)
    arena = take_arena(device)
    sizes = scratch_sizes(view.shape[0] * view.shape[2], alphabet + 1, slot_bytes(view.shape[1], alphabet, cdf is None))
    (scratch,) = arena.on_device(offsets(sizes)[-1])
    encoded, _ = encode_from_arena(arena, view, alphabet, cdf, handle, scratch, flags=flags)
    give_arena(arena)
    return encoded


def _encode_on_host(symbols: TensorView, alphabet: int, cdf: Any, flags: int) -> Encoded:
    layers, tokens, channels = symbols.shape
    own = cdf is None
    if own:
        cdf = np.empty((layers, channels, alphabet + 1), np.uint16)
        cpu.run_job("cdf", Job.make(symbols, cdf, flags=flags))
    slots = np.empty((layers, channels, slot_bytes(tokens, alphabet, own)), np.uint8)
    lengths = np.empty((layers, channels), np.int32)
    job = Job.make(symbols, cdf, slots, lengths, out="out", flags=flags)
    cpu.run_job("encode", job)
    table = host_bytes(job.cdf).view(np.uint16).reshape(job.cdf.shape).copy()
    ends = np.cumsum(lengths.ravel(), dtype=np.int64)
    packed = cpu.pack(slots.reshape(-1, slots.shape[2]), ends)
    return Encoded(packed, ends.reshape(lengths.shape), table, tokens)


def _wait(device: int, stream: int, refs: tuple[object, ...]) -> None:
    """Wait on the host for what a stream was given so far."""
    device_state(device).completions.begin(stream).commit(refs).wait()


def _copy(dst: int, src: int, nbytes: int, stream: int) -> None:
    if nbytes:
        driver().memcpy_async(dst, src, nbytes, stream)


def encode_from_arena(
    arena: Arena,
    symbols: TensorView,
    alphabet: int,
    cdf: Any,
    stream: int,
    scratch: int,
    extra: tuple[int, int] = (0, 0),
    flags: int = 0,
) -> tuple[Encoded, npt.NDArray[np.uint8]]:
    """Code symbols on a GPU, with `scratch`, the address of as much memory as `scratch_sizes` says.

    `flags` may say that they are signed. Brings `extra`, an address and a number of bytes, to the host as well.
    """
    layers, tokens, channels = symbols.shape
    streams, width, device = layers * channels, alphabet + 1, arena.device
    row = slot_bytes(tokens, alphabet, cdf is None)
    with DeviceScope(device):
        at_cdf, slots, at_lengths, at_ends, packed = (
            scratch + at for at in offsets(scratch_sizes(streams, width, row))[:-1]
        )
        if cdf is None:
            table = dense(at_cdf, (layers, channels, width), 2, device, arena)
            counted = gpu.run_job("cdf", Job(symbols, table, None, None, flags, device), stream)
        else:
            table, counted = take("cdf", cdf, 3, ("int16", "uint16"), 2), Transfer()
        out = dense(slots, (layers, channels, row), 1, device, arena)
        into = dense(at_lengths, (layers, channels), 4, device, arena)
        job = Job.make(symbols, table, out, into, out="out", flags=flags)
        coded = gpu.run_job("encode", job, stream)
        (lengths,) = arena.pinned(4 * streams)
        _copy(int(lengths.ctypes.data), at_lengths, lengths.nbytes, stream)
        _wait(device, stream, (arena, symbols))
        counted.wait()
        coded.wait()
        ends = np.cumsum(lengths.view(np.int32), dtype=np.int64)
        total = int(ends[-1]) if streams else 0
        host_ends, host_cdf, host_data, host_extra = arena.pinned(8 * streams, 2 * streams * width, total, extra[1])
        host_ends.view(np.int64)[:] = ends
        _copy(at_ends, int(host_ends.ctypes.data), host_ends.nbytes, stream)
        moved = gpu.run_pack(job, at_ends, packed, streams * row, stream, (arena,))
        for to, source in ((host_cdf, table.address), (host_data, packed), (host_extra, extra[0])):
            _copy(int(to.ctypes.data), source, to.nbytes, stream)
        _wait(device, stream, (arena, symbols))
        moved.wait()
        shaped = host_cdf.view(np.uint16).reshape(layers, channels, width).copy()
        encoded = Encoded(host_data.copy(), ends.reshape(layers, channels), shaped, tokens)
        return encoded, host_extra.copy()


def scratch_sizes(streams: int, width: int, row: int) -> tuple[int, ...]:
    """Bytes of distributions, slots, lengths, prefix sums, and of the streams back to back."""
    return 2 * streams * width, streams * row, 4 * streams, 8 * streams, streams * row


def decode(encoded: Encoded, out: Any = None, *, limit: int | None = None, stream: Any = None) -> Any:
    """Decode symbols.

    Parameters
    ----------
    encoded : Encoded
        What `encode` made.
    out : tensor of uint8 or int8, [layers, tokens, channels], optional
        Receives the symbols, in host memory or on a GPU; default: a new array in host memory.
    limit : int, optional
        Most bytes of a new array. Default: 256 MiB, or 1024 bytes for each of `encoded.nbytes` where that is more;
        `encoded.decoded_nbytes` is what it takes.
    stream : object
        On a GPU, the stream to enqueue it on.

    Returns
    -------
    numpy.ndarray or Transfer
        The new array, or, with `out`, an operation to wait for.

    Raises
    ------
    BoundsError, LayoutError, TypeError, PlacementError
        `out` does not fit, a new array would take more than `limit`, or a distribution does not rise; says which.

    Examples
    --------
    >>> symbols = np.random.default_rng(1).integers(0, 16, (2, 256, 64), dtype=np.uint8)
    >>> bool((kvraw.codec.decode(kvraw.codec.encode(symbols)) == symbols).all())
    True
    """
    made = new_array("encoded", encoded.shape, np.uint8, encoded.nbytes, limit) if out is None else out
    view = take("out", made, 3, ("uint8", "int8"), 1, dense=False, written=True)
    if view.shape != encoded.shape:
        raise LayoutError(f"out has shape {view.shape}, must be {encoded.shape}")
    device = common_device({"out": view})
    if device is None:
        cpu.run_job("decode", Job.make(view, encoded.cdf, encoded.data, encoded.ends, flags=args.PACKED))
        return made if out is None else Transfer()
    if encoded.ends.size == 0:
        return Transfer()
    handle, arena = stream_handle(stream, device), take_arena(device)
    return decode_from_arena(arena, encoded, view, handle, [], lambda: give_arena(arena))[0]


def decode_from_arena(
    arena: Arena, encoded: Encoded, out: TensorView | None, stream: int, more: list[Any], on_done: Any = None
) -> tuple[Transfer, TensorView, list[int]]:
    """Decode on a GPU; without `out`, into the arena. `more` arrays are sent to the device along with the streams."""
    layers, _, channels = encoded.shape
    arrays = [encoded.data, encoded.ends, encoded.cdf, *more]
    sizes = [a.nbytes for a in arrays]
    device = arena.device
    with DeviceScope(device):
        data, ends, cdf, *rest = arena.on_device(*sizes, 0 if out is not None else math.prod(encoded.shape))
        for array, held, to in zip(arrays, arena.pinned(*sizes), (data, ends, cdf, *rest[:-1]), strict=True):
            held[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            _copy(to, int(held.ctypes.data), held.nbytes, stream)
        target = dense(rest[-1], encoded.shape, 1, device, arena) if out is None else out
        job = Job(
            target,
            dense(cdf, encoded.cdf.shape, 2, device, arena),
            dense(data, (encoded.data.size,), 1, device, arena),
            dense(ends, (layers, channels), 8, device, arena),
            args.PACKED | args.WIDE,
            device,
        )
        return gpu.run_job("decode", job, stream, (arena,), on_done), target, rest[:-1]
