"""KV values to symbols and back: per token a scale, per layer a number of bins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvraw.arrays import TensorView, element_type, host_bytes, require_apart, require_writable, tensor_view
from kvraw.checks import integer
from kvraw.codec import args
from kvraw.codec.operands import MOST_SYMBOLS, common_device, take
from kvraw.copying.cpu import in_parts
from kvraw.copying.launch import Launch
from kvraw.copying.transfer import Transfer
from kvraw.errors import BoundsError, KvrawError, LayoutError
from kvraw.ptx.loader import read_ptx
from kvraw.runtime import fork
from kvraw.runtime.module import ArgumentBlock, Kernel
from kvraw.runtime.stream import stream_handle

__all__ = ["Chunk", "bins_per_layer", "dequantize_into", "quantize_into", "run"]

THREADS = 128
# Element types by name: number in the kernel, bytes, and the array type that the numba kernels know it by.
DTYPES: dict[str, tuple[int, int, Any]] = {
    "float32": (args.FP32, 4, np.float32),
    "float16": (args.FP16, 2, np.uint16),
    "bfloat16": (args.BF16, 2, np.int16),
}
_SIZES = {name: size for name, (_, size, _) in DTYPES.items()}
_SPLIT_VALUES = 1 << 17


@dataclass(frozen=True, slots=True)
class Chunk:
    """A KV chunk taken in: [planes * layers, tokens, channels], and the name of its element type."""

    view: TensorView
    dtype: str

    @classmethod
    def take(cls, tensor: Any, dtype: str | None, name: str = "chunk", written: bool = False) -> Chunk:
        """Take in a chunk ``[planes, layers, tokens, channels]`` or ``[layers, tokens, channels]``."""
        view = tensor_view(tensor, name)
        if written:
            require_apart(name, require_writable(name, view))
        kind = element_type(name, tensor, view, dtype, _SIZES)
        shape, strides = view.shape, view.strides
        if len(shape) == 4:
            if shape[0] > 1 and shape[1] and strides[0] != shape[1] * strides[1]:
                raise LayoutError(f"{name} has strides {strides} bytes, its planes must follow one another")
            shape, strides = (shape[0] * shape[1], *shape[2:]), strides[1:]
        if len(shape) != 3:
            raise LayoutError(f"{name} has {len(view.shape)} axes, must have 3 or 4: planes, layers, tokens, channels")
        if (
            (shape[2] > 1 and strides[2] != view.itemsize)
            or min(strides) < 0
            or any(s % view.itemsize for s in strides)
        ):
            raise LayoutError(f"{name} has strides {view.strides} bytes, its channels must be dense")
        if shape[0] > args.MOST_LAYERS:
            raise BoundsError(f"{name} has {shape[0]} planes and layers, must have at most {args.MOST_LAYERS}")
        if shape[0] * shape[1] >= 1 << 31:
            raise BoundsError(f"{name} has {shape[0] * shape[1]} rows, must have fewer than {1 << 31}")
        return cls(TensorView(view.address, shape, strides, view.itemsize, view.device, tensor), kind)


def bins_per_layer(bins: Any, layers: int) -> npt.NDArray[np.uint16]:
    """The number of bins of each layer.

    Raises
    ------
    TypeError
        They are neither an integer nor a sequence.
    BoundsError
        Not one for each layer, or outside [4, 256].
    """
    if not isinstance(bins, Iterable):
        bins = [integer("bins", bins)] * layers
    found = np.asarray(list(bins))
    if found.shape != (layers,):
        raise BoundsError(
            f"bins has {found.size} numbers, must have one, or one for each of {layers} planes and layers"
        )
    if layers and not (found.dtype.kind in "iu" and found.min() >= 4 and found.max() <= MOST_SYMBOLS):
        raise BoundsError(f"bins holds {found.min()} to {found.max()}, must hold integers in [4, {MOST_SYMBOLS}]")
    return found.astype(np.uint16)


@functools.cache
def _gpu_kernel(name: str) -> Kernel:
    return Kernel(read_ptx(f"{name}.ptx"), f"kvraw_{name}")


@functools.cache
def _cpu_kernels() -> ModuleType:
    try:
        with fork.undivided():
            from kvraw.codec import quantize_kernels
    except ImportError as error:
        raise ImportError(f"the codec on the CPU needs numba, which cannot be imported: {error}") from error
    return quantize_kernels


def _not_finite(fault: int, layer: int, token: int) -> KvrawError:
    return BoundsError(f"chunk holds a value that is not finite in layer {layer}, token {token}")


def run(
    back: bool,
    chunk: Chunk,
    bins: Any,
    symbols: Any,
    maxima: Any,
    stream: Any,
    on_done: Callable[[], None] | None = None,
) -> Transfer:
    """Quantize, or go back; ``on_done()`` is called when a GPU is through with it."""
    view = chunk.view
    layers, tokens, channels = view.shape
    middles = bins_per_layer(bins, layers) // 2 - 1
    q = take("symbols", symbols, 3, ("uint8", "int8"), 1, written=not back)
    m = take("maxima", maxima, 2, ("float32",), 4, written=not back)
    if q.shape != view.shape or m.shape != (layers, tokens):
        raise LayoutError(
            f"symbols has shape {q.shape} and maxima {m.shape}, must be {view.shape} and ({layers}, {tokens})"
        )
    device = common_device({"chunk": view, "symbols": q, "maxima": m})
    number, itemsize, array_type = DTYPES[chunk.dtype]
    rows = layers * tokens
    if device is None:
        if rows == 0 or channels == 0:
            return Transfer()
        counts = np.array([tokens, channels, view.strides[0] // itemsize, view.strides[1] // itemsize], np.int64)
        kernel = _cpu_kernels().dequantize if back else _cpu_kernels().quantize
        values, codes = host_bytes(view).view(array_type), host_bytes(q)
        largest, bad = host_bytes(m).view(np.float32), []

        def work(begin: int, end: int) -> None:
            found = kernel(values, codes, largest, middles, counts, begin, end)
            if found >= 0:
                bad.append(int(found))

        in_parts(work, rows, rows * channels // _SPLIT_VALUES)
        if bad:
            raise _not_finite(args.NOT_FINITE, *divmod(min(bad), tokens))
        return Transfer()
    handle = stream_handle(stream, device)
    if rows == 0 or channels == 0:
        return Transfer()
    block = ArgumentBlock(args.QUANTIZE)
    r = block.record[0]
    r["values"], r["symbols"], r["maxima"] = view.address, q.address, m.address
    r["value_layer"], r["value_token"] = view.strides[:2]
    r["tokens"], r["channels"], r["dtype"] = tokens, channels, number
    r["middle"][:layers] = middles
    kernel_there = _gpu_kernel("dequantize" if back else "quantize")
    launch = Launch(device, kernel_there, block, rows, THREADS, _not_finite)
    return launch.enqueue(handle, (view, q, m), on_done=on_done)


def quantize_into(
    chunk: Any, bins: int | Sequence[int], symbols: Any, maxima: Any, *, dtype: str | None = None, stream: Any = None
) -> Transfer:
    """Turn a KV chunk into symbols.

    With ``middle = bins // 2 - 1``, a value becomes ``round(value * (middle / maximum) + middle)``, in fp32, where the
    maximum is the largest magnitude of its token over all channels of the layer. A row of zeros becomes middles.

    Parameters
    ----------
    chunk : tensor of float32, float16 or bfloat16
        [planes, layers, tokens, channels], or without planes.
    bins : int or sequence of int
        For all planes and layers, or one for each, plane by plane; 4 to 256.
    symbols : tensor of uint8, [planes * layers, tokens, channels]
        Written.
    maxima : tensor of float32, [planes * layers, tokens]
        Written.
    dtype : str, optional
        The chunk's element type, where its protocol does not tell (numpy has no bfloat16).
    stream : object
        On a GPU, the stream to enqueue it on.

    Returns
    -------
    Transfer
        To wait for; on a GPU, its `wait` raises what the kernel found.

    Raises
    ------
    BoundsError
        The chunk holds an infinity or a NaN (on a GPU, from `Transfer.wait`), or bins are outside their bounds.
    LayoutError, TypeError, PlacementError
        Shapes, element types or places do not fit.

    Examples
    --------
    >>> chunk = np.array([-2.0, 0.0, 1.0, 2.0], np.float32).reshape(1, 1, 4)
    >>> symbols, maxima = np.zeros((1, 1, 4), np.uint8), np.zeros((1, 1), np.float32)
    >>> kvraw.codec.quantize_into(chunk, 16, symbols, maxima).wait()
    >>> symbols.ravel().tolist(), maxima.item()
    ([0, 7, 10, 14], 2.0)
    """
    return run(False, Chunk.take(chunk, dtype), bins, symbols, maxima, stream)


def dequantize_into(
    symbols: Any, maxima: Any, bins: int | Sequence[int], chunk: Any, *, dtype: str | None = None, stream: Any = None
) -> Transfer:
    """Turn symbols back: ``(symbol - middle) / middle * maximum``, in fp32, rounded to the chunk's type.

    Parameters
    ----------
    symbols, maxima, bins, dtype, stream
        As of `quantize_into`; they are read.
    chunk : tensor of float32, float16 or bfloat16
        Written.

    Returns
    -------
    Transfer
        To wait for; on a GPU, its `wait` raises what the kernel found.

    Raises
    ------
    BoundsError, LayoutError, TypeError, PlacementError
        Bins are outside their bounds, or something does not fit.

    Examples
    --------
    >>> symbols, maxima = np.array([[[0, 7, 14]]], np.uint8), np.array([[2.0]], np.float32)
    >>> chunk = np.zeros((1, 1, 3), np.float32)
    >>> kvraw.codec.dequantize_into(symbols, maxima, 16, chunk).wait()
    >>> chunk.ravel().tolist()
    [-2.0, 0.0, 2.0]
    """
    return run(True, Chunk.take(chunk, dtype, written=True), bins, symbols, maxima, stream)
