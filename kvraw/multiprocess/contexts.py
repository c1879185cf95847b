"""How a worker's chunks get to the cache server and back: through its shared memory, or by message.

Both in two phases. `prepare_store` reserves slots for what the server does not have, the worker copies, `commit_store`
publishes. `prepare_retrieve` locks what the server has, the worker copies, `commit_retrieve` gives it back, and says
whether it was still locked: only then are the bytes right.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvraw.errors import BoundsError, ClosedError, HostMemoryError, KvrawError
from kvraw.multiprocess import messages as m
from kvraw.multiprocess.client import CacheClient, ServerError, ServerTimeoutError
from kvraw.multiprocess.keys import CacheKey, EngineDrivenContextMetadata
from kvraw.runtime import fork
from kvraw.runtime.closeable import Closing
from kvraw.runtime.host.buffer import HostBuffer

__all__ = [
    "EngineDrivenContext",
    "MessageContext",
    "SharedMemoryContext",
    "Slots",
    "create_engine_driven_context",
]

_log = logging.getLogger("kvraw")
_BATCH = 8 << 20  # bytes of the frames of one message; a chunk that is larger goes alone
_WINDOW = 3  # of such messages under way
_AGAIN = 0.002  # seconds between two looks at what is coming from the disk
_KEPT = 64 << 20  # bytes of staging that a context by message keeps


class Slots(NamedTuple):
    """What a ticket is about.

    Attributes
    ----------
    chunks : list of numpy.ndarray of uint8
        Memory to copy into (store) or out of (retrieve), one entry for each of `chunk_indices`.
    chunk_indices : list of int
        Which chunks of the key.
    ticket : int
        For commit and abort; 0: there is nothing to copy and nothing to commit.
    present, refused : int
        Of a store: chunks that the server has, and those for which it has no room.
    """

    chunks: list[Any]
    chunk_indices: list[int]
    ticket: int
    present: int = 0
    refused: int = 0


class EngineDrivenContext(ABC, Closing):
    """The two phases of store and retrieve. Threads may share a context.

    Parameters
    ----------
    metadata : EngineDrivenContextMetadata
        What the chunks are.
    client : CacheClient
        The connection; it is the context's from here on, and closed with it.

    Attributes
    ----------
    metadata : EngineDrivenContextMetadata
        What the chunks are.
    client : CacheClient
        The connection.
    """

    def __init__(self, metadata: EngineDrivenContextMetadata, client: CacheClient) -> None:
        self.metadata, self.client = metadata, client
        self.chunk_bytes = metadata.layout_desc.nbytes
        self._lookups: dict[bytes, list[int]] = {}  # tickets of lookups by the last key that was asked for
        self._lock = fork.lock()

    @property
    def layout_desc(self) -> Any:
        """A chunk's shapes and types."""
        return self.metadata.layout_desc

    def prepare_store(self, key: CacheKey) -> Slots:
        """Reserve slots for the chunks that the server does not have.

        Parameters
        ----------
        key : CacheKey
            Which tokens.

        Returns
        -------
        Slots
            Where to copy, to be ended by `commit_store` or `abort` where its ticket is not 0.

        Raises
        ------
        ServerError, ServerTimeoutError
            The server refused, or does not answer.
        """
        hashes = key.hashes(self.metadata)
        if not hashes:
            return Slots([], [], 0)
        reply: m.Slots = self._ask_ticket(m.PrepareStore(id=self.client.number(), keys=hashes))
        if reply.ticket:
            try:
                self._require_indices(reply, len(hashes))
                chunks = self._writable(reply)
            except BaseException:
                self.client.forget(reply.ticket)
                raise
        else:
            chunks = []
        return Slots(chunks, list(reply.indices), reply.ticket, reply.present, reply.refused)

    def _ask_ticket(self, request: Any) -> Any:
        """Ask for a ticket; where the reply does not come, the ticket is not to stay open."""
        try:
            return self.client.request(request)
        except (ServerTimeoutError, KeyboardInterrupt):
            self.client.forget(request.id)
            raise

    def _ask_until_loaded(self, request: Callable[[], Any]) -> Any:
        """Ask again as long as the server reads from its disk; within the client's timeout."""
        end = time.monotonic() + self.client.timeout
        while True:
            reply = self._ask_ticket(request())
            if type(reply) is not m.Found or not reply.loading or time.monotonic() >= end:
                return reply
            time.sleep(_AGAIN)

    @staticmethod
    def _require_indices(reply: m.Slots, count: int) -> None:
        last = -1
        for at in reply.indices:
            if not last < at < count:
                raise BoundsError(f"the server's index {at} must be in ({last}, {count})")
            last = at

    def commit_store(self, slots: Slots) -> None:
        """Publish what was copied into the slots.

        Parameters
        ----------
        slots : Slots
            Of `prepare_store`.

        Raises
        ------
        ServerError
            Nothing was published: the time limit was over, or the server was restarted.
        ServerTimeoutError
            The server does not answer.
        """
        if slots.ticket:
            try:
                self._commit_store(slots)
            finally:
                self._done_with(slots)

    def prepare_retrieve(self, key: CacheKey) -> Slots | None:
        """Lock all chunks of a key for reading; None where the server does not have them all.

        Parameters
        ----------
        key : CacheKey
            Which tokens.

        Returns
        -------
        Slots or None
            Where to copy from, to be ended by `commit_retrieve` where its ticket is not 0.

        Raises
        ------
        ServerError, ServerTimeoutError
            The server refused, or does not answer.
        """
        hashes = key.hashes(self.metadata)
        if not hashes:
            return Slots([], [], 0)
        reply = self._ask_until_loaded(lambda: m.PrepareRetrieve(id=self.client.number(), keys=hashes))
        if type(reply) is m.Found:
            return None
        try:
            if len(reply.indices) != len(hashes):
                raise BoundsError(f"the server gave {len(reply.indices)} slots, must be {len(hashes)}")
            return Slots(self._readable(reply), list(range(len(hashes))), reply.ticket)
        except BaseException:
            self.client.forget(reply.ticket)
            raise

    def commit_retrieve(self, slots: Slots) -> None:
        """Give the chunks of a retrieve back.

        Parameters
        ----------
        slots : Slots
            Of `prepare_retrieve`.

        Raises
        ------
        ServerError
            The time limit was over, or the server was restarted: what was read must not be used.
        ServerTimeoutError
            The server does not answer, so that is not known.
        """
        if slots.ticket:
            try:
                self.client.request(m.Commit(ticket=slots.ticket))
            finally:
                self._done_with(slots)

    def abort(self, slots: Slots) -> None:
        """End a store or retrieve that failed, once nothing copies any more; nothing is published. Never raises.

        Parameters
        ----------
        slots : Slots
            Of `prepare_store` or `prepare_retrieve`.
        """
        if slots.ticket:
            self.client.forget(slots.ticket)
            self._done_with(slots)

    def lookup(self, key: CacheKey) -> int:
        """Tokens of the key, from its start, that the server has.

        Parameters
        ----------
        key : CacheKey
            Which tokens.

        Returns
        -------
        int
            Tokens; a retrieve of a key that ends there hits, unless chunks are evicted in between.
        """
        hashes = key.hashes(self.metadata)
        if not hashes:
            return 0
        reply: m.Found = self.client.request(m.Lookup(keys=hashes, lock=False))
        return reply.hits * self.metadata.chunk_tokens

    def prefetch(self, key: CacheKey) -> int:
        """`lookup`, and what was found stays there until `free_lookup_locks`, or the server's limit for reads.

        Parameters
        ----------
        key : CacheKey
            Which tokens.

        Returns
        -------
        int
            Tokens that are there and locked.
        """
        hashes = key.hashes(self.metadata)
        if not hashes:
            return 0
        reply: m.Found = self._ask_until_loaded(lambda: m.Lookup(id=self.client.number(), keys=hashes, lock=True))
        if reply.loading:
            return 0
        if reply.ticket:
            with self._lock:
                self._lookups.setdefault(hashes[-1], []).append(reply.ticket)
        return reply.hits * self.metadata.chunk_tokens

    def free_lookup_locks(self, key: CacheKey) -> None:
        """Undo every `prefetch` of this key. Never raises.

        Parameters
        ----------
        key : CacheKey
            The same key.
        """
        hashes = key.hashes(self.metadata)
        with self._lock:
            tickets = self._lookups.pop(hashes[-1], []) if hashes else []
        for ticket in tickets:
            self.client.forget(ticket)

    def stats(self) -> dict[str, float]:
        """The server's counts.

        Returns
        -------
        dict
            By name.
        """
        reply: m.StatsReply = self.client.request(m.Stats())
        return reply.values

    @abstractmethod
    def _writable(self, reply: m.Slots) -> list[Any]: ...

    @abstractmethod
    def _readable(self, reply: m.Slots) -> list[Any]: ...

    def _commit_store(self, slots: Slots) -> None:
        self.client.request(m.Commit(ticket=slots.ticket))

    def _done_with(self, slots: Slots) -> None:
        """Nothing is copied into or out of the slots any more."""

    def close(self) -> None:
        """Take leave of the server; what was not committed is dropped. Idempotent."""
        self.client.close()


# Pools that this process is attached to, by name and mark: each is mapped, and registered with the driver, once.
_attached: dict[tuple[str, bytes], tuple[HostBuffer, int]] = {}
_attaching = fork.lock()


def _attach(name: str, nbytes: int, mark: bytes, device: int | None) -> HostBuffer:
    with _attaching:
        buffer, uses = _attached.get((name, mark), (None, 0))
        if buffer is None:
            buffer = HostBuffer.attach(name, nbytes, pin=False)
            if buffer.view(buffer.address, len(mark)).tobytes() != mark:
                buffer.close()
                raise HostMemoryError(f"shared memory {name!r} is not the server's pool")
        try:
            if device is not None:
                buffer.pin(device)
        except BaseException:
            if not uses:
                buffer.close()
            raise
        _attached[name, mark] = buffer, uses + 1
        return buffer


def _detach(name: str, mark: bytes) -> None:
    with _attaching:
        buffer, uses = _attached.pop((name, mark))
        if uses > 1:
            _attached[name, mark] = buffer, uses - 1
            return
    buffer.close()


def _drop_in_child() -> None:
    _attached.clear()


fork.in_child(_drop_in_child)


class SharedMemoryContext(EngineDrivenContext):
    """Copies go straight into and out of the server's pool.

    Parameters
    ----------
    metadata : EngineDrivenContextMetadata
        What the chunks are.
    client : CacheClient
        The connection; it is the context's from here on.
    device : int, optional
        Register the pool with the driver for this GPU, once for all contexts of the process.

    Raises
    ------
    FileNotFoundError, HostMemoryError, PermissionError
        This process cannot have the server's pool.
    ServerError, ServerTimeoutError
        The server refused, or is not there.
    DriverError
        The pool cannot be registered.
    """

    def __init__(self, metadata: EngineDrivenContextMetadata, client: CacheClient, device: int | None = None) -> None:
        super().__init__(metadata, client)
        reply = client.register(self.chunk_bytes, shared=True)
        self._pool_name, self._mark = reply.pool, reply.mark
        try:
            self.pool = _attach(reply.pool, reply.pool_bytes, reply.mark, device)
        except BaseException:
            client.request(m.Unregister())
            raise
        self._gone = False

    def _views(self, reply: m.Slots) -> list[Any]:
        if len(reply.offsets) != len(reply.indices):
            raise BoundsError(f"the server gave {len(reply.offsets)} offsets, must be {len(reply.indices)}")
        base, nbytes = self.pool.address, self.chunk_bytes
        return [self.pool.view(base + offset, nbytes) for offset in reply.offsets]

    _writable = _readable = _views

    def close(self) -> None:
        """Take leave of the server, and give its pool back once no array of it is left. Idempotent."""
        with self._lock:
            if self._gone:
                return
            self._gone = True
        super().close()
        if fork.epoch() == self.client._epoch:
            _detach(self._pool_name, self._mark)


class MessageContext(EngineDrivenContext):
    """Copies go through memory of this process, and by message; for workers that cannot have the server's pool.

    Parameters
    ----------
    metadata : EngineDrivenContextMetadata
        What the chunks are.
    client : CacheClient
        The connection; it is the context's from here on.
    device : int, optional
        Have that memory pinned for this GPU.

    Raises
    ------
    ServerError, ServerTimeoutError
        The server refused, or is not there.
    """

    def __init__(self, metadata: EngineDrivenContextMetadata, client: CacheClient, device: int | None = None) -> None:
        super().__init__(metadata, client)
        client.register(self.chunk_bytes, shared=False)
        self._device = device
        self._free: list[HostBuffer] = []
        self._taken: dict[int, list[HostBuffer]] = {}  # by ticket
        self._gone = False

    def _staging(self, ticket: int, count: int) -> list[Any]:
        buffers: list[HostBuffer] = []
        with self._lock:
            if self._gone:
                raise ClosedError("the context is closed")
            while self._free and len(buffers) < count:
                buffers.append(self._free.pop())
            self._taken[ticket] = buffers
        while len(buffers) < count:
            buffers.append(HostBuffer(self.chunk_bytes, device=self._device, pin=self._device is not None))
        return [one.view(one.address, self.chunk_bytes) for one in buffers]

    def _done_with(self, slots: Slots) -> None:
        with self._lock:
            for one in self._taken.pop(slots.ticket, ()):
                if not self._gone and len(self._free) * self.chunk_bytes < _KEPT:
                    self._free.append(one)
                else:
                    one.close()

    def _writable(self, reply: m.Slots) -> list[Any]:
        return self._staging(reply.ticket, len(reply.indices))

    def _batches(self, count: int) -> list[range]:
        step = max(1, _BATCH // self.chunk_bytes)
        return [range(at, min(at + step, count)) for at in range(0, count, step)]

    def _commit_store(self, slots: Slots) -> None:
        parts: list[tuple[m.Request, Sequence[Any]]] = [
            (m.Put(ticket=slots.ticket, first=span.start), [slots.chunks[at] for at in span])
            for span in self._batches(len(slots.chunks))
        ]
        try:
            # The commit goes behind them: the server carries out a client's requests in their order.
            self.client.exchange([*parts, (m.Commit(ticket=slots.ticket), ())], lambda reply, frames: None, _WINDOW)
        except BaseException:
            with self._lock:
                self._taken.pop(slots.ticket, None)  # messages may still be read from it
            raise

    def _readable(self, reply: m.Slots) -> list[Any]:
        count = len(reply.indices)
        chunks: list[Any] = []

        def take(done: Any, frames: Sequence[Any]) -> None:
            chunks.extend(np.frombuffer(frame, np.uint8) for frame in frames)

        parts: list[tuple[m.Request, Sequence[Any]]] = [
            (m.Get(ticket=reply.ticket, first=span.start, count=len(span)), ()) for span in self._batches(count)
        ]
        self.client.exchange(parts, take, _WINDOW)
        if len(chunks) != count or any(one.nbytes != self.chunk_bytes for one in chunks):
            raise ServerError("payload", f"{len(chunks)} frames, must be {count} of {self.chunk_bytes} bytes")
        if self._device is None:
            return chunks
        pinned = self._staging(reply.ticket, count)
        for to, source in zip(pinned, chunks, strict=True):
            to[:] = source
        return pinned

    def close(self) -> None:
        """Take leave of the server. Idempotent."""
        with self._lock:
            if self._gone:
                return
            self._gone = True
            free, self._free = self._free, []
        super().close()
        for one in free:
            one.close()


def create_engine_driven_context(
    metadata: EngineDrivenContextMetadata,
    client: CacheClient,
    *,
    device: int | None = None,
    use_messages: bool = False,
) -> EngineDrivenContext:
    """A context through shared memory where this process can have the server's pool, else by message.

    Parameters
    ----------
    metadata : EngineDrivenContextMetadata
        What the chunks are.
    client : CacheClient
        The connection; it is the context's from here on.
    device : int, optional
        The GPU that holds the cache.
    use_messages : bool
        By message in any case.

    Returns
    -------
    EngineDrivenContext
        The context.

    Raises
    ------
    ServerError, ServerTimeoutError
        The server refused, or is not there; the client stays open.
    """
    if not use_messages:
        try:
            return SharedMemoryContext(metadata, client, device)
        except (ServerError, ServerTimeoutError):
            raise
        except (KvrawError, OSError) as error:
            _log.warning("the cache server's pool is out of reach, going by message: %s", error)
    return MessageContext(metadata, client, device)
