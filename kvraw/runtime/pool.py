"""A pool of host memory for chunks: mapped with transparent huge pages, pinned where there is a GPU."""

from __future__ import annotations

import bisect
import contextlib
import logging
import mmap
import threading
from collections.abc import Iterable
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvraw.errors import BoundsError, ClosedError, ForkError
from kvraw.runtime.context import current_device
from kvraw.runtime.driver import driver, driver_or_none, usable_here
from kvraw.runtime.inflight import Completion
from kvraw.runtime.memory import Registration

__all__ = ["HostChunk", "HostPool"]

_log = logging.getLogger("kvraw")
_MADV_POPULATE_WRITE = 23  # Linux 5.14


def _gpu_at_hand() -> bool:
    try:
        return driver_or_none() is not None
    except ForkError:  # a child that wants host memory alone may have it
        return False


class HostChunk:
    """`nbytes` of a pool. `free` gives them back; the pool must be open for any use of the address."""

    __slots__ = ("__weakref__", "address", "nbytes", "pool")

    def __init__(self, pool: HostPool, address: int, nbytes: int) -> None:
        self.pool, self.address, self.nbytes = pool, address, nbytes

    def numpy(self, dtype: npt.DTypeLike = np.uint8) -> np.ndarray:
        """The chunk as a 1-D array; it keeps the pool's memory alive."""
        return self.pool.view(self.address, self.nbytes).view(dtype)

    def free(self) -> None:
        """Give the chunk back to the pool.

        Raises
        ------
        ValueError
            It was given back already.
        """
        self.pool.free([self])

    def __repr__(self) -> str:
        return f"HostChunk({self.address:#x}, {self.nbytes} bytes)"


class HostPool:
    """Host memory for chunks, page-aligned and of exactly the size asked for (rounded up to whole pages).

    Parameters
    ----------
    nbytes : int
        Bytes.
    device : int, optional
        Pin the memory for the GPUs, in a context of this device.
    pin : bool, optional
        True: pin, or raise. False: do not pin. None, the default: pin now where a device was named or a CUDA context is
        current, else at the pool's first use by a GPU transfer; a pool never creates a context that nobody asked for.

    Raises
    ------
    MemoryError
        The memory cannot be mapped, or a chunk does not fit.
    DriverNotFoundError, DriverError
        It was to be pinned and cannot be; nothing is left mapped.
    """

    ALIGNMENT = 4096

    def __init__(self, nbytes: int, *, device: int | None = None, pin: bool | None = None) -> None:
        if nbytes <= 0:
            raise BoundsError(f"nbytes is {nbytes}, must be positive")
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(f"cannot map {self.nbytes} bytes of host memory: {error}") from error
        self.huge_pages = "refused"
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
            self.huge_pages = "transparent"
        self._memory = memory
        self._bytes = np.frombuffer(memory, np.uint8)  # the last view of it unmaps the memory
        self.address = int(self._bytes.ctypes.data)
        self._lock = threading.Lock()
        self._holes: list[tuple[int, int]] = [(0, self.nbytes)]  # (offset, size), sorted, never adjacent
        self._live: dict[int, int] = {}  # offset -> size
        self._busy: list[Completion] = []
        self._registration: Registration | None = None
        self._closed = False
        if device is None:
            device = 0 if pin else current_device() if pin is None and _gpu_at_hand() else None
        if device is not None and pin is not False:
            self.pin(device)

    # pinning

    @property
    def pinned(self) -> bool:
        """Whether the memory is registered with the driver."""
        return self._registration is not None

    @property
    def device_shift(self) -> int:
        """What to add to an address of the pool for the address at which a GPU sees it."""
        if self._registration is None:
            raise ClosedError("the pool is closed" if self._closed else "the pool is not pinned")
        return self._registration.device_address - self.address

    def pin(self, device: int) -> None:
        """Populate the memory and register it with the driver, in a context of this device. Idempotent."""
        self.require_open()
        if self._registration is not None:
            return
        with self._lock:
            if self._registration is None:
                driver()  # before the work of populating
                memory = self._memory
                try:
                    memory.madvise(_MADV_POPULATE_WRITE)
                except (OSError, AttributeError):
                    self._bytes[:: mmap.PAGESIZE] |= 0
                self._registration = Registration(self.address, self.nbytes, device, owner=memory)

    # chunks

    def chunks(self, count: int, nbytes: int) -> list[HostChunk]:
        """`count` chunks of `nbytes` each, aligned to 4096 bytes; all or none.

        Raises
        ------
        MemoryError
            They do not fit; says what was asked for, what is free and the largest hole.
        """
        self.require_open()
        if count < 0 or nbytes <= 0:
            raise BoundsError(f"count is {count}, nbytes {nbytes}: must be >= 0 and > 0")
        size = -(-nbytes // self.ALIGNMENT) * self.ALIGNMENT
        out: list[HostChunk] = []
        with self._lock:
            for _ in range(count):
                at = next((i for i, (_, hole) in enumerate(self._holes) if hole >= size), None)
                if at is None:
                    for chunk in out:
                        self._give_back(chunk.address - self.address)
                    holes = [h for _, h in self._holes]
                    raise MemoryError(
                        f"the pool cannot give {count} chunks of {nbytes} bytes: {sum(holes)} of {self.nbytes} bytes "
                        f"are free, the largest hole is {max(holes, default=0)}"
                    )
                offset, hole = self._holes[at]
                self._holes[at : at + 1] = [(offset + size, hole - size)] if hole > size else []
                self._live[offset] = size
                out.append(HostChunk(self, self.address + offset, nbytes))
        return out

    def free(self, chunks: Iterable[HostChunk]) -> None:
        """Give chunks back, in any order.

        Raises
        ------
        ValueError
            One of them is not a live chunk of this pool; those before it are given back.
        """
        self.require_open()
        with self._lock:
            for chunk in chunks:
                if chunk.pool is not self or chunk.address - self.address not in self._live:
                    raise ValueError(f"{chunk!r} is not a live chunk of this pool (freed twice?)")
                self._give_back(chunk.address - self.address)

    def _give_back(self, offset: int) -> None:
        size = self._live.pop(offset)
        at = bisect.bisect_left(self._holes, (offset, 0))
        if at < len(self._holes) and self._holes[at][0] == offset + size:
            size += self._holes.pop(at)[1]
        if at and sum(self._holes[at - 1]) == offset:
            offset, before = self._holes.pop(at - 1)
            size, at = size + before, at - 1
        self._holes.insert(at, (offset, size))

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """Bytes of the pool as an array; it keeps the memory alive."""
        self.require_open()
        offset = address - self.address
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise BoundsError(f"address {address:#x} with {nbytes} bytes lies outside the pool")
        return self._bytes[offset : offset + nbytes]

    def info(self) -> dict[str, object]:
        """What was really obtained: size, pinned or not, huge pages, chunks, bytes free, largest hole."""
        with self._lock:
            holes = [h for _, h in self._holes]
            return {
                "nbytes": self.nbytes,
                "pinned": self.pinned,
                "huge_pages": self.huge_pages,
                "chunks": len(self._live),
                "free": sum(holes),
                "largest_hole": max(holes, default=0),
                "closed": self._closed,
            }

    # lifetime

    def borrow(self, completion: Completion) -> None:
        """Note an operation that uses this pool; `close` waits for it."""
        with self._lock:
            if len(self._busy) > 64:
                self._busy = [c for c in self._busy if not c.done()]
            self._busy.append(completion)

    def close(self) -> None:
        """Wait for the transfers that use the pool, unpin it, and drop the memory once no view needs it. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if usable_here():
            for completion in self._busy:
                completion.wait()
        self._busy = []
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        self._bytes = np.empty(0, np.uint8)

    def require_open(self) -> None:
        """Raise `ClosedError` where the pool was closed."""
        if self._closed:
            raise ClosedError("the pool is closed")

    def __enter__(self) -> HostPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
