"""Chunks of host memory: handed out, given back, and reused once no transfer uses them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvraw.checks import NotPicklable, integer
from kvraw.errors import BoundsError, ClosedError, ForkError, HostMemoryError
from kvraw.runtime.completion import Operation
from kvraw.runtime.host.buffer import HostBuffer
from kvraw.runtime.host.mapping import HostMapping, HostOptions
from kvraw.runtime.host.suballoc import Arena, Size
from kvraw.runtime.host.usage import Use

__all__ = ["HostChunk", "HostPool"]


class ChunkKind:
    """The object that live chunks of one pool and size share, so that a whole row is checked at once."""

    __slots__ = ("__weakref__", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class _Wait(NamedTuple):
    """A freed chunk's grant, and the operations that may still use it."""

    grant: int
    users: tuple[Use, ...]

    def over(self) -> bool:
        """True where nothing uses it any more."""
        return all(use.finished for use in self.users)


class HostChunk(NotPicklable):
    """`nbytes` of a pool. `free` gives them back; the pool must be open for any use of the address.

    Other libraries take it as an array of bytes: through DLPack, the array interface or ``memoryview(chunk.numpy())``;
    what they make of it keeps the pool's memory mapped.

    Examples
    --------
    >>> with kvraw.HostPool(1 << 20, pin=False) as pool:
    ...     (chunk,) = pool.chunks(1, 8192)  # a HostChunk
    ...     chunk.numpy(np.float32)[:] = 1.5
    ...     chunk.free()
    """

    __slots__ = ("__weakref__", "_seen", "address", "kind", "nbytes", "pool")

    def __init__(self, pool: HostPool, address: int, nbytes: int, kind: ChunkKind) -> None:
        self.pool, self.address, self.nbytes = pool, address, nbytes
        self.kind: ChunkKind | None = kind

    @property
    def freed(self) -> bool:
        """True once it was given back."""
        return self.kind is None

    def numpy(self, dtype: npt.DTypeLike = np.uint8) -> np.ndarray:
        """The chunk as an array; it keeps the pool's memory alive, but not the chunk from being handed out again.

        Parameters
        ----------
        dtype : data type
            Of its elements.

        Returns
        -------
        numpy.ndarray
            A view with one axis.

        Raises
        ------
        ClosedError
            The chunk, or its pool, was given back.
        """
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

    Attributes
    ----------
    version : int
        Another one whenever a chunk was freed.

    Raises
    ------
    HostMemoryError
        The memory is unavailable. It is a MemoryError.
    DriverNotFoundError, DriverError
        It was to be pinned and cannot be; nothing is left mapped or registered.
    PlacementError
        It was to be pinned, and nothing says by which device.
    BoundsError
        A size is not positive, or the limit negative.

    Examples
    --------
    >>> with kvraw.HostPool(64 << 20, pin=False) as pool:  # on a GPU: device=0
    ...     first, second = pool.chunks(2, 1 << 20)
    ...     pool.free([first])
    ...     pool.info()["used"]
    1048576
    """

    ALIGNMENT = 4096
    _noun = "pool"
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

    def _adopt(self, memory: HostMapping, target: int | None, options: HostOptions) -> None:
        self.limit = None
        self._arena = Arena()
        self._kinds: weakref.WeakValueDictionary[int, ChunkKind] = weakref.WeakValueDictionary()
        self._kind = ChunkKind(0)  # the last one
        self._waiting: dict[int, _Wait] = {}  # what was freed and may still be used, by offset
        self._waiting_bytes = 0
        self._freeing: tuple[HostChunk, int, _Wait] | None = None  # a free that has begun
        self._torn, self._repairs = False, 0  # something did not come to its end
        self.version = 0
        self._copied = False  # the books are a copy of those of a parent process, the memory is the same
        self._allocations = self._failures = self._peak = 0
        self._start_offset = -memory.address % self.ALIGNMENT  # of borrowed memory
        super()._adopt(memory, target, options)

    def _in_child(self) -> None:
        super()._in_child()
        self._copied |= self._memory.segment is not None

    # Who changes the tables calls `_begin` and `_finish`; what an interrupt, a finalizer, a signal handler or a fork
    # left between them, the next one brings to its end. What is true: the arena, `HostChunk.kind`, `_waiting`.

    def _begin(self) -> int:
        if self._torn:
            self._repair()
        self._torn = True
        return self._repairs

    def _finish(self, begun: int) -> None:
        self._torn = self._repairs != begun

    def _repair(self) -> None:
        self._repairs += 1
        freeing, self._freeing = self._freeing, None
        if freeing is not None and freeing[0].freed:
            self._freeing = freeing
            self._put_aside(*freeing[1:])
            self._freeing = None
        for offset, wait in list(self._waiting.items()):
            if self._arena.grant_of(offset) is not wait.grant:
                self._waiting.pop(offset, None)
            elif wait.over():
                self._give(offset, wait)
        self._waiting_bytes = sum(map(int, [wait.grant for wait in self._waiting.values()]))
        self.version += 1
        self._torn = False

    def _put_aside(self, offset: int, wait: _Wait) -> None:
        """Give the arena what was freed, or have it wait for what uses it; at times more than once."""
        if self._arena.grant_of(offset) is not wait.grant or offset in self._waiting:
            return
        if not wait.users:
            self._arena.release(offset, wait.grant)
            return
        for use in wait.users:
            if (freed := self._uses.get(use)) is not None:
                freed.append(offset)
        self._waiting[offset] = wait
        self._waiting_bytes += wait.grant
        if wait.over():  # in the meantime
            self._give(offset, wait)

    def _give(self, offset: int, wait: _Wait) -> None:
        self._arena.release(offset, wait.grant)
        if self._waiting.get(offset) is wait:
            del self._waiting[offset]
            self._waiting_bytes -= wait.grant

    def _settle(self) -> None:
        """Give the arena what waited for operations that are over, and what has become ready. The lock is held."""
        self._drop_finished()
        start, end = max(self._arena.end, self._start_offset), self._ready
        if end < self.nbytes:
            end -= end % self.ALIGNMENT
        if not self._ended and end <= start:
            return
        begun = self._begin()
        ended, self._ended = self._ended, []
        for offset in ended:
            wait = self._waiting.get(offset)
            if wait is not None and wait.over():
                self._give(offset, wait)
        if end > start:
            self._arena.extend(start, end - start)
        self._finish(begun)

    def chunks(self, count: int, nbytes: int, *, timeout: float = 0.0) -> list[HostChunk]:
        """`count` chunks of `nbytes` each, aligned to 4096 bytes; all or none.

        Parameters
        ----------
        count, nbytes : int
            How many, and bytes of each.
        timeout : float
            Seconds to wait for memory that was freed and is still used by transfers, and for a pool that grows.

        Returns
        -------
        list of HostChunk
            The chunks; their contents are whatever was there.

        Raises
        ------
        BoundsError
            `count` is negative, or `nbytes` not positive.
        ClosedError
            The pool is closed.
        HostMemoryError
            They do not fit; says what was asked for, what is free and the largest hole. It is a MemoryError.
        """
        self.require_open()
        count, nbytes = integer("count", count), integer("nbytes", nbytes)
        if count < 0 or nbytes <= 0:
            raise BoundsError(f"count is {count}, nbytes {nbytes}: must be >= 0 and > 0")
        size = Size(-(-nbytes // self.ALIGNMENT) * self.ALIGNMENT)
        deadline = time.monotonic() + timeout
        try:
            while True:
                # One line, here and below: an interrupt at the end of the block would come before its lock is free.
                with self._lock: found = self._hand_out(count, nbytes, size, deadline)  # fmt: skip # noqa: E701
                if found is not None:
                    return found
                time.sleep(200e-6)
                self.require_open()
        except BaseException:
            with self._lock: self._arena.revoke(size)  # fmt: skip # noqa: E701
            raise

    def _hand_out(self, count: int, nbytes: int, size: Size, deadline: float) -> list[HostChunk] | None:
        """The chunks; None where they may be there later."""
        self.require_open()
        if self._copied:
            raise ForkError(
                "the pool lies in shared memory and is handed out by a parent process, which would hand out the same; "
                "chunks from before the fork can be used, new ones are to come from a pool of this process"
            )
        if self._torn:
            self._repair()
        offsets = self._take(count, size)
        if offsets is None:
            self._settle()
            offsets = self._take(count, size)
        if offsets is not None:
            self._allocations += count
            self._peak = max(self._peak, self._in_use())
            kind = self._kind
            if kind.nbytes != nbytes:
                kind = self._kinds.get(nbytes) or ChunkKind(nbytes)
                self._kind = self._kinds[nbytes] = kind
            return [HostChunk(self, self.address + offset, nbytes, kind) for offset in offsets]
        growing = self._growth is not None and self._growth.running
        if not (self._waiting or growing) or time.monotonic() >= deadline:
            self._failures += 1
            raise HostMemoryError(self._shortage(count, nbytes, size, growing))
        return None

    def _in_use(self) -> int:
        return self._arena.used - self._waiting_bytes

    def _take(self, count: int, size: Size) -> list[int] | None:
        if count * size > self._arena.free or (self.limit is not None and self._in_use() + count * size > self.limit):
            return None
        return self._arena.grant(count, size)

    def _shortage(self, count: int, nbytes: int, size: int, growing: bool) -> str:
        text = (
            f"the pool cannot give {count} chunks of {nbytes} bytes: {self._arena.free} of {self.nbytes} bytes are "
            f"free, the largest hole is {self._arena.largest_hole}"
        )
        if self._waiting:
            text += f"; {self._waiting_bytes} bytes were freed but {len(self._uses)} transfers may still use them"
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

        Parameters
        ----------
        chunks : iterable of HostChunk
            Chunks of this pool.

        Raises
        ------
        TypeError
            It is a single chunk.
        ValueError
            One of them is not a live chunk of this pool; those before it are given back.
        """
        self.require_open()
        if isinstance(chunks, HostChunk):
            raise TypeError("chunks is a HostChunk, must be a sequence of chunks (HostChunk.free gives back one)")
        listed = list(chunks)
        with self._lock: self._take_back(listed)  # fmt: skip # noqa: E701

    def _take_back(self, chunks: list[HostChunk]) -> None:
        self._settle()
        begun = self._begin()
        users: dict[int, list[Use]] = {}
        if self._uses:
            addresses = {chunk.address for chunk in chunks}
            for use in list(self._uses):
                uses = use.uses
                if uses is not None and type(uses) is not frozenset:
                    uses = use.uses = frozenset(uses.tolist())  # only now: most are over before a chunk is freed
                for address in addresses if uses is None else addresses & uses:
                    users.setdefault(address, []).append(use)
        for chunk in chunks:
            offset = chunk.address - self.address
            grant = None if chunk.pool is not self or chunk.freed else self._arena.grant_of(offset)
            if grant is None:
                self._finish(begun)
                raise ValueError(f"{chunk!r} is not a live chunk of this pool (freed twice?)")
            wait = _Wait(grant, tuple(users[chunk.address]) if chunk.address in users else ())
            self._freeing = chunk, offset, wait
            chunk.kind = None  # from here on it is freed, whatever comes between
            self.version += 1
            self._put_aside(offset, wait)
            self._freeing = None
        self._finish(begun)

    def mark_live_chunks(self, use: Use, version: int, require_live: Callable[[], None]) -> None:
        """`mark_used` for chunks that were live at a `version` of the pool; checked anew where it is another.

        Memory that another thread frees after this is not handed out before the operation is over.
        """
        with self._lock:
            if self._torn:
                self._repair()
            self.mark_used(use)
            if version != self.version:
                require_live()

    def use_chunks(self, operation: Operation, version: int) -> int | None:
        """`mark_live_chunks` for an operation on a GPU, where nothing is to be looked at once more: the `device_shift`.

        None, and nothing is noted, where the pool is closed or not pinned, or another thread freed chunks since.
        """
        memory = self._memory
        with self._lock:
            if (
                self._torn
                or version != self.version
                or self._closed
                or self._forked
                or not (memory.registrations or memory.kind == "pinned")
            ):
                return None
            self.note_use(operation)
            return memory.shift

    def info(self) -> dict[str, object]:
        """Tell what was really obtained, see `HostBuffer.info`; and of chunks: how many are handed out, what is free.

        ``waiting`` are bytes that were freed and that transfers may still use.

        Returns
        -------
        dict
            By name.
        """
        with self._lock:
            if not self._closed and not self._forked:
                if self._torn:
                    self._repair()
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
                "frees": self._allocations - (len(self._arena) - len(self._waiting)),
                "failures": self._failures,
            }
