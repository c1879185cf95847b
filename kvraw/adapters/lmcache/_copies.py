"""Plain copies: one between device and host, split where registrations may end, and many on the host."""

from __future__ import annotations

import ctypes
import operator
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from kvraw.adapters.deferred_errors import raise_pending
from kvraw.adapters.lmcache._place import current_stream
from kvraw.adapters.lmcache._types import ArgumentError, direction_of, number
from kvraw.addresses import FIRST, require_address
from kvraw.arrays import U64, is_pointer
from kvraw.copying import cpu
from kvraw.copying.device_state import device_state
from kvraw.copying.steps import enqueue_copy
from kvraw.errors import BoundsError
from kvraw.plain import require_memory
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.memory import locate

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["batched_memcpy", "check_alignment", "check_range", "lmcache_memcpy_async"]


_FEW, _LARGE = 4, 1 << 20  # copies, and bytes, below which it takes longer to hand them over than to make them


def check_alignment(alignment: Any) -> int:
    """The distance of possible registration ends: a power of two."""
    value = number("host_buffer_alignments", alignment)
    if value <= 0 or value & (value - 1):
        raise ArgumentError(f"host_buffer_alignments is {value}, must be power of two")
    return value


def check_range(name: str, address: int, nbytes: int, offset: int = 0) -> None:
    """Check a range of memory and its offset in a host buffer."""
    if nbytes < 0 or offset < 0 or offset + nbytes >= 2**64:
        raise BoundsError(f"nbytes is {nbytes}, host_buffer_offset {offset}: must be >= 0, and below 2**64 together")
    if nbytes:
        require_address(name, address, nbytes)


def copy_on_host(dest: int, src: int, nbytes: int) -> None:
    """Copy host memory now."""
    if nbytes < 8 * _LARGE or abs(dest - src) < nbytes:
        ctypes.memmove(dest, src, nbytes)
        return
    starts = np.arange(0, nbytes, _LARGE).astype(np.uint64)  # pieces, for several threads
    sizes = np.minimum(np.uint64(_LARGE), np.uint64(nbytes) - starts)
    cpu.copy_batch(starts + np.uint64(dest), starts + np.uint64(src), sizes)


def lmcache_memcpy_async(
    dest: int | Tensor,
    src: int | Tensor,
    nbytes: int,
    direction: Any,
    host_buffer_offset: int,
    host_buffer_alignments: int,
) -> None:
    """Copy bytes between device and host on the device's current stream; on the host where no device takes part.

    Parameters
    ----------
    dest, src : int or tensor
        Both addresses, or both dense tensors.
    host_buffer_offset, host_buffer_alignments : int
        Where the host side lies in its buffer, and the distance at which one registration of that buffer may end and
        the next begin: no single copy spans such an end.
    """
    alignment = check_alignment(host_buffer_alignments)
    to_host = direction_of(direction)
    device: int | None = None
    ask = True
    if type(dest) is not int or type(src) is not int:
        dest, src, device, ask = _ends(dest, src, nbytes)
    check_range("dest", dest, nbytes, host_buffer_offset)
    check_range("src", src, nbytes)
    if not nbytes:
        return
    if device is None and ask:
        # The end that ought to be on the device is asked about first: mostly it is, and the other need not be.
        for address in (src, dest) if to_host else (dest, src):
            device = locate(address, 1).device
            if device is not None:
                break
    if device is None:
        copy_on_host(dest, src, nbytes)
        return
    with DeviceScope(device):
        stream, state = current_stream(device), device_state(device)
        capturing = raise_pending(state, stream)
        enqueue_copy(state, (dest, src, nbytes, host_buffer_offset), alignment, stream)
        if not capturing:
            state.completions.fence(stream)  # memory that is given back waits for it


def _ends(dest: Any, src: Any, nbytes: int) -> tuple[int, int, int | None, bool]:
    """Addresses of both ends, the device of a tensor among them, and whether the driver is to be asked for it."""
    if is_pointer(dest) and is_pointer(src):
        return int(dest), int(src), None, True
    device, ask = None, False
    for name, end in (("dest", dest), ("src", src)):
        if not hasattr(end, "data_ptr"):
            raise TypeError("dest and src must be both addresses or both tensors")
        require_memory(name, end)
        if nbytes % end.element_size() or nbytes > end.numel() * end.element_size():
            raise ArgumentError(f"nbytes is {nbytes}, must be whole elements of {name} and within it")
        if not end.is_contiguous():
            raise ArgumentError(f"{name} must be dense")
        if end.device.type != "cpu":
            device, ask = end.device.index, end.device.index is None
    return int(dest.data_ptr()), int(src.data_ptr()), device, ask


def _vector(name: str, values: Any) -> tuple[U64, int]:
    """Numbers in [0, 2**63) as a vector, and the least of them."""
    try:
        if type(values) is list and values[0] is values[-1] and values.count(values[0]) == len(values):
            one = operator.index(values[0])  # one number, such as the size of all pieces
            vector: U64 = np.full(len(values), one, np.uint64)
        elif isinstance(values, np.ndarray) and values.dtype.kind in "iu":
            vector = np.ascontiguousarray(values, np.uint64)
        else:
            # Of the ways to take a list in, the fastest; unlike numpy's it takes nothing but integers.
            vector = np.frombuffer(array("L", values), np.uint64)
    except OverflowError:
        raise TypeError(f"{name} holds a number outside [0, 2**63)") from None
    except TypeError as error:
        raise TypeError(f"{name} holds what is no integer: {error}") from None
    least = int(np.minimum.reduce(vector.view(np.int64)))
    if least < 0:  # a negative number, or no address of this process
        raise TypeError(f"{name} holds a number outside [0, 2**63)")
    return vector, least


def _entangled(dst: U64, src: U64, sizes: U64) -> bool:
    """Whether some copy writes what another one reads or writes."""
    order = np.argsort(dst, kind="stable")
    begin, end = dst[order], (dst + sizes)[order]
    if (begin[1:] < end[:-1]).any():
        return True
    # The destinations are apart and in order: a source touches one where the last that begins before its end goes on.
    last = np.searchsorted(begin, src + sizes, "left").astype(np.int64) - 1
    return bool(((last >= 0) & (end[np.maximum(last, 0)] > src)).any())


def _copy_few(src_ptrs: list[int], dst_ptrs: list[int], sizes: list[int]) -> bool:
    """Copy a few pieces; does nothing, and says so, where an argument is bad or no plain number."""
    top = 2**63
    for src, dst, n in zip(src_ptrs, dst_ptrs, sizes, strict=True):
        if not (type(src) is type(dst) is type(n) is int):
            return False
        if not (0 <= n < top and 0 <= src < top and 0 <= dst < top and (not n or (src >= FIRST and dst >= FIRST))):
            return False
    for src, dst, n in zip(src_ptrs, dst_ptrs, sizes, strict=True):
        ctypes.memmove(dst, src, n)
    return True


def batched_memcpy(src_ptrs: list[int], dst_ptrs: list[int], sizes: list[int]) -> None:
    """Copy ``sizes[i]`` bytes of host memory from ``src_ptrs[i]`` to ``dst_ptrs[i]``, as if one after the other."""
    if not len(src_ptrs) == len(dst_ptrs) == len(sizes):
        raise ValueError("batched_memcpy expects equally sized src_ptrs, dst_ptrs, and sizes")
    if not len(sizes):
        return
    if len(sizes) <= _FEW and type(sizes) is list and sum(sizes) < _LARGE and _copy_few(src_ptrs, dst_ptrs, sizes):
        return
    (src, some_src), (dst, some_dst) = _vector("src_ptrs", src_ptrs), _vector("dst_ptrs", dst_ptrs)
    n, some = _vector("sizes", sizes)
    if not some:
        kept = n > 0
        src, dst, n = src[kept], dst[kept], n[kept]
        if not len(n):
            return
    if some_src < FIRST or some_dst < FIRST:
        for name, vector in (("src_ptrs", src), ("dst_ptrs", dst)):
            if (vector < FIRST).any():
                raise ArgumentError(f"{name} holds a null address, or one of the first page: {int(vector.min()):#x}")
    cpu.copy_batch(dst, src, n, in_order=len(n) > 1 and int(n.sum()) >= _LARGE and _entangled(dst, src, n))
