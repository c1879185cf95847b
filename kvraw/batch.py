"""Copies at the pointer level: three vectors of destination, source and size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvraw.addresses import FIRST, TOP, no_address
from kvraw.arrays import U64, pointer_vector
from kvraw.cache import require_host
from kvraw.copying import copy_engine, cpu
from kvraw.copying.device_state import device_state
from kvraw.copying.submission import submit_as_one
from kvraw.copying.transfer import Transfer
from kvraw.errors import BoundsError, DriverError, PlacementError
from kvraw.runtime.completion import Operation
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.stream import stream_device, stream_handle

__all__ = ["memcpy_batch"]


def memcpy_batch(
    dst: Any,
    src: Any,
    sizes: Any,
    *,
    stream: Any = None,
    device: int | None = None,
    pageable: bool = False,
    refs: tuple[object, ...] = (),
) -> Transfer:
    """Copy `sizes[i]` bytes from `src[i]` to `dst[i]`, for every i.

    Parameters
    ----------
    dst, src, sizes : sequence of int, or 1-D uint64 arrays
        Addresses, and bytes; 0 bytes copy nothing. Destinations must not overlap other entries.
    stream : object, optional
        Enqueue the copies on this stream, in its order, unordered among themselves. Without one all addresses are host
        memory, and the call returns when the copies are done.
    device : int, optional
        The stream's device; only for a default stream, where it need not be the current context's.
    pageable : bool
        Some of the memory is neither on a GPU nor pinned: copies go one by one, and the call may wait for them.
    refs : tuple
        Kept alive until the copies are over. The three vectors need not be.

    Returns
    -------
    Transfer
        To wait for.

    Raises
    ------
    BoundsError
        The vectors differ in length, or hold something that is not an address or a size; the entry is the caller's.
    PlacementError
        Without a stream, an address is device memory; with one, it is another device's, or it is a default stream, no
        context is current and no device is named.
    DriverError
        The driver refused; `index` is the failing entry where it told. Entries before it may have been enqueued.

    Examples
    --------
    >>> a, b = np.arange(4096, dtype=np.uint8), np.zeros(4096, np.uint8)
    >>> offsets = np.array([0, 1024, 3000], np.uint64)
    >>> kvraw.memcpy_batch(offsets + b.ctypes.data, offsets + a.ctypes.data, [1000, 24, 96]).wait()
    >>> bool((b[3000:3096] == a[3000:3096]).all()), int(b[1048:3000].sum())
    (True, 0)
    """
    to, at, n = pointer_vector("dst", dst), pointer_vector("src", src), pointer_vector("sizes", sizes)
    if not len(to) == len(at) == len(n):
        raise BoundsError(
            f"dst, src and sizes have {len(to)}, {len(at)} and {len(n)} entries, must have the same number"
        )
    kept = n > 0
    for name, vector in (("dst", to), ("src", at)):
        _require_addresses(name, vector, n, kept)
    if not kept.all():
        to, at, n = to[kept], at[kept], n[kept]
    if stream is None:
        if len(n):
            for name, vector in (("dst", to), ("src", at)):
                for ends in (vector[:1], vector[-1:]):
                    require_host(name, ends, 1)
            cpu.copy_batch(to, at, n)
        return Transfer(engine="cpu")
    if device is None:
        device = stream_device(stream)
        if device is None:
            raise PlacementError("no CUDA context is current; name the default stream's device with device=")
    handle = stream_handle(stream, device)
    if not len(n):
        return Transfer(engine="copy", device=device)
    with DeviceScope(device):
        copies = copy_engine.Descriptors(to, at, n)

        def work(operation: Operation, capturing: bool) -> None:
            try:
                copy_engine.enqueue_anywhere(copies, operation.stream, capturing=capturing, pageable=pageable)
            except DriverError as error:
                if error.index is None or kept.all():
                    raise
                raise error.at(int(np.flatnonzero(kept)[error.index])) from error

        done = submit_as_one(device_state(device), handle, work, pageable=pageable, refs=refs)
        return Transfer((done,), "copy", device)


def _require_addresses(name: str, addresses: U64, sizes: U64, kept: npt.NDArray[np.bool_]) -> None:
    """Raise `BoundsError` where an entry that copies something reaches what no process has."""
    ends = addresses + sizes
    bad = kept & ((addresses < FIRST) | (sizes >= TOP) | (ends > TOP) | (ends < addresses))
    if bad.any():
        at = int(bad.argmax())
        if sizes[at] >= TOP:
            raise BoundsError(f"sizes[{at}] is {sizes[at]}, must be below {TOP:#x}")
        raise no_address(f"{name}[{at}]", int(addresses[at]), int(sizes[at]))
