"""Pageable host memory in transfers of a GPU: pinned buffers stand in for it, as long as a copy may use them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from kvraw.copying import cpu
from kvraw.errors import PlacementError
from kvraw.runtime import fork
from kvraw.runtime.context import at_reset
from kvraw.runtime.memory import PinnedBuffer, locate

__all__ = ["BounceBuffers", "pageable", "require_no_capture"]

_KEPT = 64 << 20  # bytes of buffers that are kept for the next call, per device
_lock = fork.lock()
_free: defaultdict[int, list[PinnedBuffer]] = defaultdict(list)
at_reset(_free.clear)


def pageable(address: int, nbytes: int) -> bool:
    """Whether a range is host memory that the device cannot reach; its context is current."""
    return not locate(address, nbytes).device_address


def require_no_capture(captured: bool) -> None:
    """Raise `PlacementError` where a capture is in progress: no replay would go by way of the buffers."""
    if captured:
        raise PlacementError("pageable host memory cannot take part in a transfer that a graph captures; pin it")


class _Lease:
    """A pinned buffer; it goes back when nobody holds the lease any more, such as a copy that is over."""

    __slots__ = ("buffer", "device")

    def __init__(self, nbytes: int, device: int) -> None:
        size = max(1 << (nbytes - 1).bit_length(), 4096)
        self.device = device
        with _lock:
            fit = next((b for b in _free[device] if b.nbytes == size and not b.closed), None)
            if fit is not None:
                _free[device].remove(fit)
        self.buffer = fit or PinnedBuffer(size, device)

    def __del__(self) -> None:
        if not hasattr(self, "buffer"):
            return
        kept = _free[self.device]
        if sum(b.nbytes for b in kept) + self.buffer.nbytes <= _KEPT:
            kept.append(self.buffer)


class BounceBuffers:
    """Buffers in the place of some ranges of host memory.

    Parameters
    ----------
    ranges : sequence of (int, int)
        Address and bytes of each.
    device : int
        The GPU.
    fill : bool
        Copy the ranges into the buffers.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], device: int, *, fill: bool) -> None:
        self._ranges = ranges
        self._leases = [_Lease(nbytes, device) for _, nbytes in ranges]
        if fill:
            self._copy(back=False)

    @property
    def addresses(self) -> list[int]:
        """Address of each buffer."""
        return [lease.buffer.address for lease in self._leases]

    def copy_back(self) -> None:
        """Copy the buffers to the ranges."""
        self._copy(back=True)

    def _copy(self, *, back: bool) -> None:
        ranges = np.array([a for a, _ in self._ranges], np.uint64)
        sizes = np.array([n for _, n in self._ranges], np.uint64)
        buffers = np.array(self.addresses, np.uint64)
        cpu.copy_batch(*((ranges, buffers) if back else (buffers, ranges)), sizes)
