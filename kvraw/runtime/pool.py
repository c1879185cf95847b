"""Chunks of host memory: handed out, given back, and reused once no transfer uses them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvraw.checks import Uncopied, integer
from kvraw.errors import BoundsError, ClosedError, HostMemoryError
from kvraw.runtime.buffer import HostBuffer
from kvraw.runtime.host_map import HostMemory, HostOptions
from kvraw.runtime.suballoc import Arena

__all__ = ["HostChunk", "HostPool"]


class ChunkKind:
    """What live chunks of one pool and size have in common: one object, so that a whole row is checked at once."""

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class HostChunk(Uncopied):
    """`nbytes` of a pool. `free` gives them back; the pool must be open for any use of the address.

    Other libraries take it as an array of bytes: through DLPack, the array interface or ``memoryview(chunk.numpy())``;
    what they make of it keeps the pool's memory mapped.
    """

    __slots__ = ("__weakref__", "_seen", "address", "kind", "nbytes", "pool")

    def __init__(self, pool: HostPool, address: int, nbytes: int, kind: ChunkKind) -> None:
        self.pool, self.address, self.nbytes = pool, address, nbytes
        self.kind: ChunkKind | None = kind

    @property
    def freed(self) -> bool:
        """Whether it was given back."""
        return self.kind is None

    def numpy(self, dtype: npt.DTypeLike = np.uint8) -> np.ndarray:
        """The chunk as a 1-D array; it keeps the pool's memory alive, but not the chunk from being handed out again."""
        if self.freed:
            self.pool.require_open()
            raise ClosedError(f"{self!r} was given back to its pool")
        return self.pool.view(self.address, self.nbytes).view(dtype)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        self._seen = self.numpy()  # the array that is made of this keeps the chunk alone
        return dict(self._seen.__array_interface__)

    def __dlpack__(self, **options: Any) -> Any:
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # plain CPU memory

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


class HostPool(HostBuffer):
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
    options : HostOptions, optional
        Where the memory comes from, and how it is made ready.
    limit : int, optional
        Most bytes handed out at a time, chunks rounded up to 4096; can be changed later.

    Raises
    ------
    HostMemoryError
        The memory is not to be had, or a chunk does not fit. It is a MemoryError.
    DriverNotFoundError, DriverError
        It was to be pinned and cannot be; nothing is left mapped or registered.
    """

    ALIGNMENT = 4096
    limit: int | None

    def __init__(
        self,
        nbytes: int,
        *,
        device: int | None = None,
        pin: bool | None = None,
        options: HostOptions | None = None,
        limit: int | None = None,
    ) -> None:
        if limit is not None and integer("limit", limit) < 0:
            raise BoundsError(f"limit is {limit}, must be >= 0")
        super().__init__(nbytes, device=device, pin=pin, options=options)
        self.limit = limit

    def _adopt(self, memory: HostMemory, target: int | None, options: HostOptions) -> None:
        self.limit = None
        self._arena = Arena()
        self._kinds: dict[int, ChunkKind] = {}
        self._waiting: deque[tuple[int, int]] = deque()  # (sequence of the last operation before the free, offset)
        self._waiting_bytes = 0
        self._allocations = self._frees = self._failures = self._peak = 0
        self._start_offset = -memory.address % self.ALIGNMENT  # of borrowed memory
        super()._adopt(memory, target, options)

    @property
    def _noun(self) -> str:
        return "pool"

    def _extend(self, ready: int) -> None:
        start = max(self._ready, self._start_offset)
        super()._extend(ready)
        end = ready // self.ALIGNMENT * self.ALIGNMENT if ready < self.nbytes else ready
        self._ready = end
        if end > start:
            self._arena.extend(start, end - start)

    def _settle(self) -> None:
        """Give the arena back what was freed before operations that are all over by now. The lock is held."""
        super()._settle()
        over = self._busy[0][0] if self._busy else self._sequence + 1
        while self._waiting and self._waiting[0][0] < over:
            _, offset = self._waiting.popleft()
            self._waiting_bytes -= self._arena.size_of(offset)
            self._arena.give(offset)

    def chunks(self, count: int, nbytes: int, *, timeout: float = 0.0) -> list[HostChunk]:
        """`count` chunks of `nbytes` each, aligned to 4096 bytes; all or none.

        Parameters
        ----------
        timeout : float
            Seconds to wait for memory that was freed and is still used by transfers, and for a pool that grows.

        Raises
        ------
        HostMemoryError
            They do not fit; says what was asked for, what is free and the largest hole. It is a MemoryError.
        """
        self.require_open()
        count, nbytes = integer("count", count), integer("nbytes", nbytes)
        if count < 0 or nbytes <= 0:
            raise BoundsError(f"count is {count}, nbytes {nbytes}: must be >= 0 and > 0")
        size = -(-nbytes // self.ALIGNMENT) * self.ALIGNMENT
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                found = self._take(count, size)
                if found is None and self._waiting:
                    self._settle()
                    found = self._take(count, size)
                if found is not None:
                    self._allocations += count
                    self._peak = max(self._peak, self._in_use())
                    kind = self._kinds.setdefault(nbytes, ChunkKind(nbytes))
                    return [HostChunk(self, self.address + offset, nbytes, kind) for offset in found]
                growing = self._growth is not None and self._growth.running
                if not (self._waiting or growing) or time.monotonic() >= deadline:
                    self._failures += 1
                    raise HostMemoryError(self._shortage(count, nbytes, size, growing))
            time.sleep(200e-6)
            self.require_open()

    def _in_use(self) -> int:
        return self._arena.used - self._waiting_bytes

    def _take(self, count: int, size: int) -> list[int] | None:
        arena = self._arena
        if count * size > arena.free or (self.limit is not None and self._in_use() + count * size > self.limit):
            return None
        out: list[int] = []
        for _ in range(count):
            offset = arena.take(size)
            if offset is None:
                for taken in out:
                    arena.give(taken)
                return None
            out.append(offset)
        return out

    def _shortage(self, count: int, nbytes: int, size: int, growing: bool) -> str:
        text = (
            f"the pool cannot give {count} chunks of {nbytes} bytes: {self._arena.free} of {self.nbytes} bytes are "
            f"free, the largest hole is {self._arena.largest_hole}"
        )
        if self._waiting:
            text += f"; {self._waiting_bytes} bytes were freed but {len(self._busy)} transfers may still use them"
        if self.limit is not None and self._in_use() + count * size > self.limit:
            text += f"; the limit is {self.limit} bytes, of which {self._in_use()} are handed out"
        if self._ready < self.nbytes:
            error = self._growth.error if self._growth is not None else None
            text += f"; {self._ready} bytes are ready" + (
                ", the pool still grows" if growing else f", growing ended: {error or 'stopped'}"
            )
        return text

    def free(self, chunks: Iterable[HostChunk]) -> None:
        """Give chunks back, in any order. What transfers may still use is handed out again once they are over.

        Raises
        ------
        ValueError
            One of them is not a live chunk of this pool; those before it are given back.
        """
        self.require_open()
        if isinstance(chunks, HostChunk):
            raise TypeError("chunks is a HostChunk, must be a sequence of chunks (HostChunk.free gives back one)")
        with self._lock:
            self._settle()
            last = self._busy[-1][0] if self._busy else 0
            for chunk in chunks:
                offset = chunk.address - self.address
                if chunk.pool is not self or chunk.freed or not self._arena.holds(offset):
                    raise ValueError(f"{chunk!r} is not a live chunk of this pool (freed twice?)")
                chunk.kind = None
                self._frees += 1
                if last:
                    self._waiting.append((last, offset))
                    self._waiting_bytes += self._arena.size_of(offset)
                else:
                    self._arena.give(offset)

    def info(self) -> dict[str, object]:
        """What was really obtained, see `HostBuffer.info`; and of chunks: how many are handed out, what is free.

        ``waiting`` are bytes that were freed and that transfers may still use.
        """
        with self._lock:
            if not self._closed and not self._forked:
                self._settle()
            return super().info() | {
                "chunks": len(self._arena) - len(self._waiting),
                "used": self._in_use(),
                "free": self._arena.free,
                "waiting": self._waiting_bytes,
                "largest_hole": self._arena.largest_hole,
                "peak": self._peak,
                "limit": self.limit,
                "allocations": self._allocations,
                "frees": self._frees,
                "failures": self._failures,
            }
