"""Repeated calls of a transfer plan: what was found out and bound for calls of a kind is not asked again.

A call is repeated when its ids are a vector on the host and its chunks are live chunks of one pinned pool, as many of
both as in a call before. It then takes the ids, the chunks' addresses, the stream and an event, and runs the bound
program, which also checks the ids, the context and that no capture is in progress. Whatever is different goes the
plan's general way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from kvraw.arrays import I64, U64, IndexVector
from kvraw.engines.bound import BoundCall
from kvraw.engines.device_state import DeviceState
from kvraw.engines.gpu import GpuCall, GpuPlan
from kvraw.engines.planner import Choice
from kvraw.runtime.context import DeviceScope, met
from kvraw.runtime.driver import driver
from kvraw.runtime.inflight import Completion, Operation
from kvraw.runtime.pool import ChunkKind, HostPool
from kvraw.runtime.stream import Stream, stream_handle

__all__ = ["RepeatedCalls"]

_MOST = 64  # kinds of calls that are kept
_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)
_kind_of, _address_of = attrgetter("kind"), attrgetter("address")


class _Kind(NamedTuple):
    """What is known of calls with so many ids and chunks."""

    state: DeviceState
    pool: weakref.ref[HostPool]
    shift: int
    bits: int  # the alignment of its chunks as the device sees them
    choice: Choice
    kernel: BoundCall | None  # None: staged


class RepeatedCalls:
    """The repeated calls of one plan on a GPU.

    Parameters
    ----------
    gpu : GpuPlan
        The plan.
    device : int
        Its device.
    nbytes, per_chunk : int
        Bytes and items of a chunk.
    distinct : bool
        No chunk may stand twice.
    """

    def __init__(self, gpu: GpuPlan, device: int, nbytes: int, per_chunk: int, distinct: bool) -> None:
        self._gpu, self._device, self._nbytes, self._per_chunk = gpu, device, nbytes, per_chunk
        self._distinct = distinct
        self._kinds: dict[tuple[int, int, int], _Kind] = {}
        self._joins: set[tuple[int, int]] = set()  # ids and chunks of calls whose engine depends on joined ids

    def enqueue(
        self,
        state: DeviceState,
        addresses: tuple[U64, U64],
        index: IndexVector,
        skip: int,
        stream: int,
        on_error: Callable[[Exception], None] | None = None,
        refs: object = None,
    ) -> Completion:
        """Enqueue a call for chunks in one registration, at these addresses as the host and as the device see them.

        The device's context is current, no capture is in progress, ids lie on the host or where kernels reach them, and
        there are as many chunks as they need. `refs` are kept until the copy is over.
        """
        operation = state.books.begin(stream)
        try:
            host, seen = addresses
            call = GpuCall(index, seen, host, skip, index.count - skip, True, False, on_error=on_error)
            self._gpu.enqueue(state, operation, call)
            return operation.commit((index.owner, refs))
        except BaseException:
            operation.abort()
            raise

    def learn(self, state: DeviceState, pool: HostPool, call: GpuCall) -> None:
        """Keep what a call that was enqueued by its bound program found out, for those of its kind."""
        if call.first or call.index.host is None:
            return
        choice, joined, size = self._gpu.settled_choice(call), 0, (call.count, len(call.chunks))
        if choice is None:
            joined = self._gpu.joined_items(call.index.host)
            choice = self._gpu.settled_choice(call, joined)
            if choice is None:
                return
            self._joins.add(size)
        kernel = self._gpu.bound_kernel(state, call) if choice.engine == "kernel" else None
        if len(self._kinds) >= _MOST:
            self._kinds.clear()
            self._joins.clear()
        key = (*size, joined)
        self._kinds[key] = _Kind(state, weakref.ref(pool), pool.device_shift, call.bits, choice, kernel)

    def __call__(self, chunks: Sequence[Any], ids: Any, stream: Any, cache: object) -> tuple[Completion, Choice] | None:
        """Enqueue a call and keep what it uses; None where it must go the general way.

        Raises
        ------
        BoundsError
            An id is bad; nothing is moved.
        """
        if type(ids) is not np.ndarray or ids.dtype is not _INT64 or ids.strides != (8,) or type(chunks) is not list:
            return None
        try:
            pool: HostPool = chunks[0].pool
            version = pool.version
            kinds = list(map(_kind_of, chunks))
        except (AttributeError, IndexError):
            return None
        kind, count = kinds[0], len(kinds)
        size = len(ids), count
        known = self._kinds.get((*size, self._gpu.joined_items(ids) if size in self._joins else 0))
        if (
            known is None
            or known.pool() is not pool
            or type(kind) is not ChunkKind
            or kind.nbytes != self._nbytes
            or kinds.count(kind) != count
            or (self._distinct and len(set(chunks)) != count)
        ):
            return None
        state = known.state
        books = state.books
        if state.lost or state.owner is not driver() or not books.events:
            return None
        if type(stream) is Stream and stream.device == self._device:
            handle = stream.open_handle or stream.handle
        else:
            handle = stream_handle(stream, self._device)
        owners = chunks.copy()
        addresses: U64 = np.fromiter(map(_address_of, owners), _UINT64, count)
        operation = books.begin(handle)
        try:
            operation.uses = addresses
            if pool.use_chunks(operation, version) == known.shift:
                if known.kernel is not None and not known.shift:
                    done = self._gpu.run_kernel(operation, known.kernel, ids, addresses, addresses)
                else:
                    done = self._run(known, operation, ids, addresses)
                if not done:  # the device's context may not be current; or a capture is in progress
                    with DeviceScope(self._device):
                        done = self._run(known, operation, ids, addresses)
                if done:
                    return operation.commit((cache, owners, ids)), known.choice
        except BaseException as error:
            operation.abort()
            met(error, self._device)
            raise
        operation.abort()
        return None

    def _run(self, known: _Kind, operation: Operation, ids: I64, addresses: U64) -> bool:
        seen = addresses + np.uint64(known.shift % 2**64) if known.shift else addresses
        if known.kernel is not None:
            return self._gpu.run_kernel(operation, known.kernel, ids, seen, addresses)
        return self._gpu.run_staged(known.state, operation, ids, seen, addresses, known.bits)
