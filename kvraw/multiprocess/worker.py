"""A worker's store and retrieve: prepare, copy, commit, at once or in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar

from kvraw.cache import PagedCache
from kvraw.checks import integer
from kvraw.copying.transfer import Transfer
from kvraw.errors import BoundsError, ClosedError, LayoutError, TransferTimeoutError
from kvraw.multiprocess.client import CacheClient
from kvraw.multiprocess.contexts import EngineDrivenContext, Slots, create_engine_driven_context
from kvraw.multiprocess.endpoints import Keys
from kvraw.multiprocess.keys import CacheKey
from kvraw.multiprocess.paged import PagedCopies, compute_kv_layout
from kvraw.runtime import fork
from kvraw.runtime.closeable import Closing

__all__ = ["EngineWorker", "Stored"]

T = TypeVar("T")


class Stored(NamedTuple):
    """What became of a key's chunks.

    Attributes
    ----------
    stored, present, refused : int
        Chunks that were copied; that the server had, or somebody is writing; for which it has no room.
    """

    stored: int
    present: int
    refused: int


class EngineWorker(Closing):
    """Stores blocks of a paged cache with a cache server, and loads them.

    On a GPU copies run on streams of kvraw's own, behind what `stream` was given.

    Parameters
    ----------
    context : EngineDrivenContext
        The way to the server; it is the worker's from here on, and closed with it.
    cache : PagedCache
        The cache.
    options
        Of `TransferPlan`: `engine`, `neighbour`, `max_rate`.

    Raises
    ------
    LayoutError
        The context's chunks are none of this cache.
    """

    def __init__(self, context: EngineDrivenContext, cache: PagedCache, **options: Any) -> None:
        metadata = context.metadata
        if cache.chunk_bytes(metadata.chunk_tokens) != context.chunk_bytes:
            raise LayoutError(
                f"the context's chunks have {context.chunk_bytes} bytes, those of the cache "
                f"{cache.chunk_bytes(metadata.chunk_tokens)}"
            )
        self.context, self.cache = context, cache
        self._per = metadata.blocks_per_chunk
        self._copies = PagedCopies(cache, self._per, **options)
        self._lock = fork.lock()
        self._stores: set[Future[Stored]] = set()
        self._loads: set[Future[int]] = set()
        # One thread each: a load does not wait for stores, and commits are in order.
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._calls = 0  # in callers' own threads
        self._idle = fork.condition(self._lock)
        self._closed = False

    @classmethod
    def connect(
        cls, cache: PagedCache, endpoint: str | None = None, *, chunk_tokens: int = 256, dtype: str | None = None,
        timeout: float = 5.0, keys: Keys | None = None, use_messages: bool = False, **options: Any,
    ) -> EngineWorker:  # fmt: skip
        """A worker with a connection and a context of its own.

        Parameters
        ----------
        cache : PagedCache
            The cache.
        endpoint, timeout, keys
            Of `CacheClient`.
        chunk_tokens : int
            Tokens of a chunk.
        dtype : str, optional
            Of `compute_kv_layout`.
        use_messages : bool
            By message, even where the server's shared memory is at hand.
        options
            Of `TransferPlan`.

        Returns
        -------
        EngineWorker
            The worker.

        Raises
        ------
        ServerError, ServerTimeoutError
            The server refused, or is not there.
        """
        metadata = compute_kv_layout(cache, chunk_tokens, dtype)
        client = CacheClient(endpoint, timeout=timeout, keys=keys)
        try:
            context = create_engine_driven_context(metadata, client, device=cache.device, use_messages=use_messages)
            return cls(context, cache, **options)
        except BaseException:
            client.close()
            raise

    # at once

    def store(self, key: CacheKey, block_ids: Sequence[int], *, stream: Any = None) -> Stored:
        """Store what the server does not have of a key's chunks; they are there when the call returns.

        Parameters
        ----------
        key : CacheKey
            Which tokens.
        block_ids : sequence of int
            Blocks of the tokens from `key.start` on.
        stream : object, optional
            For a cache on a GPU: the copy sees what this stream was given before.

        Returns
        -------
        Stored
            What became of the chunks.

        Raises
        ------
        BoundsError
            There are too few blocks, or one is out of bounds.
        ServerError, ServerTimeoutError
            The server refused, restarted or does not answer; nothing was published, or it is not known.
        ClosedError
            The worker is closed.
        """
        return self._call(lambda: self._store(key, block_ids, stream))

    def retrieve(
        self, key: CacheKey, block_ids: Sequence[int], *, skip_first_n_tokens: int = 0, stream: Any = None
    ) -> int:
        """Load all chunks of a key, or none.

        Parameters
        ----------
        key : CacheKey
            Which tokens.
        block_ids : sequence of int
            Blocks of the tokens from `key.start` on.
        skip_first_n_tokens : int
            Tokens to leave out, rounded down to whole blocks.
        stream : object, optional
            For a cache on a GPU: what it is given later sees the copy.

        Returns
        -------
        int
            Tokens that were loaded, or left out on demand; 0 where the server does not have all chunks.

        Raises
        ------
        BoundsError
            There are too few blocks, or one is out of bounds.
        ServerError, ServerTimeoutError
            The server refused, restarted or does not answer: what was loaded must not be used.
        ClosedError
            The worker is closed.
        """
        skip = self._skip(skip_first_n_tokens)
        return self._call(lambda: self._retrieve(key, block_ids, skip, stream))

    def _skip(self, tokens: int) -> int:
        return max(integer("skip_first_n_tokens", tokens), 0) // self.cache.geometry.block_size

    def _call(self, work: Callable[[], T]) -> T:
        with self._lock:
            self._require_open()
            self._calls += 1
        try:
            return work()
        finally:
            with self._lock:
                self._calls -= 1
                self._idle.notify_all()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the worker is closed")

    def _require_blocks(self, key: CacheKey, block_ids: Sequence[int]) -> None:
        need = len(key.hashes(self.context.metadata)) * self._per
        if len(block_ids) < need:
            raise BoundsError(f"block_ids has {len(block_ids)} entries, the key's chunks have {need} blocks")

    def _store(self, key: CacheKey, block_ids: Sequence[int], stream: Any) -> Stored:
        self._require_blocks(key, block_ids)
        slots = self.context.prepare_store(key)
        if slots.ticket:
            self._copy(slots, lambda: self._copies.gather(block_ids, slots.chunks, slots.chunk_indices, stream))
            self.context.commit_store(slots)
        return Stored(len(slots.chunks), slots.present, slots.refused)

    def _retrieve(self, key: CacheKey, block_ids: Sequence[int], skip: int, stream: Any) -> int:
        self._require_blocks(key, block_ids)
        slots = self.context.prepare_retrieve(key)
        if slots is None or not slots.ticket:
            return 0
        chunks = slots.chunks
        self._copy(slots, lambda: self._copies.scatter(block_ids, chunks, skip, stream))
        self.context.commit_retrieve(slots)
        return len(chunks) * self.context.metadata.chunk_tokens

    def _copy(self, slots: Slots, enqueue: Callable[[], Transfer]) -> None:
        """Copy; where that fails, end the ticket once nothing copies any more."""
        transfer: Transfer | None = None
        try:
            transfer = enqueue()
            transfer.wait()
        except BaseException:
            try:
                if transfer is not None:
                    transfer.wait()
            finally:
                self.context.abort(slots)
            raise

    # in the background

    def submit_store(self, key: CacheKey, block_ids: Sequence[int], *, stream: Any = None) -> Future[Stored]:
        """`store` in the background. The blocks must not be overwritten before it is over, see `flush_inflight_stores`.

        Parameters
        ----------
        key, block_ids, stream
            Of `store`; the copy sees at least what the stream was given before this call.

        Returns
        -------
        Future of Stored
            To wait for; it raises what `store` does.

        Raises
        ------
        ClosedError
            The worker is closed.
        """
        return self._submit("kvraw-store", self._stores, lambda: self._store(key, block_ids, stream))

    def submit_retrieve(
        self, key: CacheKey, block_ids: Sequence[int], *, skip_first_n_tokens: int = 0, stream: Any = None
    ) -> Future[int]:
        """`retrieve` in the background. The blocks hold the tokens once the future says so.

        Parameters
        ----------
        key, block_ids, skip_first_n_tokens, stream
            Of `retrieve`.

        Returns
        -------
        Future of int
            To wait for; it raises what `retrieve` does.

        Raises
        ------
        ClosedError
            The worker is closed.
        """
        skip = self._skip(skip_first_n_tokens)
        return self._submit("kvraw-retrieve", self._loads, lambda: self._retrieve(key, block_ids, skip, stream))

    def _submit(self, name: str, futures: set[Future[T]], work: Callable[[], T]) -> Future[T]:
        with self._lock:
            self._require_open()
            threads = self._threads.get(name)
            if threads is None:
                threads = self._threads[name] = ThreadPoolExecutor(1, name)
            future = threads.submit(work)
            futures.add(future)
        future.add_done_callback(lambda done: self._forget(futures, done))
        return future

    def _forget(self, futures: set[Future[T]], future: Future[T]) -> None:
        with self._lock:
            futures.discard(future)

    def flush_inflight_stores(self, timeout: float | None = None) -> None:
        """Wait until every store that was submitted is over, however it ends: then blocks may be overwritten.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; default: for ever.

        Raises
        ------
        TransferTimeoutError
            Some are still under way.
        """
        with self._lock:
            futures = list(self._stores)
        left = wait(futures, timeout).not_done
        if left:
            raise TransferTimeoutError(f"{len(left)} stores are under way after {timeout} s")

    def close(self, timeout: float | None = 60.0) -> None:
        """Wait for what is under way, then take leave of the server. Idempotent.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; default: 60.

        Raises
        ------
        TransferTimeoutError
            Something is still under way; nothing new is taken, and `close` can be called again.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._closed = True
            futures: list[Future[Any]] = [*self._stores, *self._loads]
        left = wait(futures, timeout).not_done
        with self._lock:
            while self._calls and not left:
                remaining = None if end is None else end - time.monotonic()
                if remaining is not None and remaining <= 0:
                    break
                self._idle.wait(remaining)
            if left or self._calls:
                raise TransferTimeoutError(f"{len(left) + self._calls} transfers are under way after {timeout} s")
            threads, self._threads = list(self._threads.values()), {}
        for one in threads:
            one.shutdown(wait=threading.current_thread() not in getattr(one, "_threads", ()))
        self.context.close()
