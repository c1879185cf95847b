"""Repeated calls of a transfer plan: what was found out and bound for calls of a kind is not asked again.

A call is repeated when its ids are a vector on the host and its chunks are live chunks of one pinned pool, as many of
both as in a call before. It then takes the ids, the chunks' addresses, the stream and an event, and runs the bound
program, which also checks the ids, the context and that no capture is in progress. Whatever is different goes the
plan's general way, which runs the same programs for chunks that it has resolved, wherever they are pinned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from kvraw.arrays import I64, U64, IndexVector
from kvraw.copying.addresses import AddressTable
from kvraw.copying.bound import BoundCall
from kvraw.copying.bound_copy import BoundCopy, BoundRows
from kvraw.copying.call import Call
from kvraw.copying.chooser import joined_items
from kvraw.copying.device_state import DeviceState
from kvraw.copying.planner import Choice
from kvraw.memo import Memo
from kvraw.runtime.completion import Completion, Operation
from kvraw.runtime.context import DeviceScope, note_error
from kvraw.runtime.driver import driver
from kvraw.runtime.host.pool import ChunkKind, HostPool
from kvraw.runtime.stream import LEGACY, Stream, stream_handle

__all__ = ["RepeatedCalls"]

_MOST = 64  # kinds of calls that are kept
_NO_IDS: I64 = np.zeros(0, np.int64)
_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)
_kind_of, _address_of = attrgetter("kind"), attrgetter("address")


class _Bound(NamedTuple):
    """The program of calls of a kind."""

    state: DeviceState
    choice: Choice
    bound: BoundCall | BoundRows  # by the kernel, or staged


class _Kind(NamedTuple):
    """What is known of calls with so many ids and chunks of a pool."""

    state: DeviceState
    choice: Choice
    bound: BoundCall | BoundRows
    pool: weakref.ref[HostPool]
    shift: int


class RepeatedCalls:
    """The repeated calls of one plan on a GPU.

    Parameters
    ----------
    gpu : BoundCopy
        The plan.
    device : int
        Its device.
    cache : AddressTable
        The cache's.
    nbytes : int
        Bytes of a chunk.
    store : bool
        The chunks are the destination.
    distinct : bool
        No chunk may stand twice.
    """

    def __init__(
        self, gpu: BoundCopy, device: int, cache: AddressTable, nbytes: int, store: bool, distinct: bool
    ) -> None:
        self._gpu, self._device, self._cache, self._nbytes = gpu, device, cache, nbytes
        self._store, self._distinct = store, distinct
        self._kinds: Memo[tuple[int, ...], _Kind] = Memo(_MOST)
        # By the numbers of ids and chunks, whether these are host memory, the items left out, the width of ids and the
        # alignment; and by joined ids, where the engine depends on these.
        self._bound: Memo[tuple[int, ...], _Bound] = Memo(_MOST)
        # What begins the keys of calls whose engine depends on joined ids.
        self._joins: Memo[tuple[int, ...], bool] = Memo(_MOST)

    def enqueue(
        self,
        state: DeviceState,
        chunks: AddressTable,
        index: IndexVector,
        skip: int,
        stream: int,
        on_error: Callable[[Exception], None] | None = None,
        refs: object = None,
    ) -> str | None:
        """Enqueue a call for chunks that were resolved, as an operation of its own; `refs` are kept until it is over.

        Ids lie on the host or where kernels reach them, and there are as many chunks as they need.

        Returns
        -------
        str or None
            The engine; empty where it was by a bound program. None where nothing was enqueued: another device's context
            is current, or a capture is in progress on the stream.
        """
        if not state.completions.events and not self._free(state, stream):
            return None  # ahead of all: an event would be made in the current context
        operation, engine = state.completions.begin(stream), ""
        try:
            key, choice = self._again(state, operation, chunks, index, skip, on_error)
            if choice is None:
                if not self._free(state, stream):  # a program looks at that itself
                    operation.abort()
                    return None
                engine = self._anew(key, state, operation, chunks, index, skip, on_error).engine
            operation.commit((index.owner, refs))
            return engine
        except BaseException:
            operation.abort()
            raise

    def run(
        self,
        state: DeviceState,
        operation: Operation,
        chunks: AddressTable,
        index: IndexVector,
        skip: int,
        on_error: Callable[[Exception], None] | None = None,
        pool: HostPool | None = None,
    ) -> Choice:
        """Enqueue a call for chunks that were resolved; what is found out is kept for others, of the `pool` as well.

        The device's context is current, no capture is in progress, ids lie on the host or where kernels reach them, and
        there are as many chunks as they need.
        """
        key, choice = self._again(state, operation, chunks, index, skip, on_error)
        return choice or self._anew(key, state, operation, chunks, index, skip, on_error, pool)

    def _again(
        self,
        state: DeviceState,
        operation: Operation,
        chunks: AddressTable,
        index: IndexVector,
        skip: int,
        on_error: Callable[[Exception], None] | None,
    ) -> tuple[tuple[int, ...], Choice | None]:
        """Enqueue a call by the program for its kind; the kind, and None where nothing was enqueued."""
        host, seen, ids = chunks.host, chunks.seen, index.host
        count, width, joined = index.count - skip, 0, 0
        size = count, len(host), chunks.link
        if ids is None:
            width, ids = index.width, _NO_IDS
        elif size in self._joins:
            joined = joined_items(count, ids[skip:])
        bits = chunks.bits if chunks.bits >= 0 else chunks.alignment
        key = (*size, skip, width, bits, joined)
        known = self._bound.get(key)
        if known is not None and known.state is state:  # not of a context that was reset
            bound = known.bound
            if isinstance(bound, BoundCall):
                done = bound.run(operation, ids, seen)
            else:
                there = index if width else None
                done = self._gpu.run_rows(state, operation, bound, ids, seen, host, there, on_error, chunks.edges)
            if done:
                return key, known.choice
        return key, None

    def _anew(
        self,
        key: tuple[int, ...],
        state: DeviceState,
        operation: Operation,
        chunks: AddressTable,
        index: IndexVector,
        skip: int,
        on_error: Callable[[Exception], None] | None,
        pool: HostPool | None = None,
    ) -> Choice:
        count = index.count - skip
        call = Call.of_chunks(self._cache, chunks, self._store, index, skip, count, on_error=on_error)
        choice = self._gpu.enqueue(state, operation, call)
        if operation.recorded:
            self._keep(key, state, call, pool)
        return choice

    def _keep(self, key: tuple[int, ...], state: DeviceState, call: Call, pool: HostPool | None) -> None:
        """Keep the program that ran a call, for those of its kind."""
        index = call.src_index or call.dst_index
        assert index is not None
        choice, joined, size = self._gpu.chooser.settled_choice(call), 0, key[:3]
        if choice is None:
            if index.host is None:
                return
            joined = joined_items(call.count, index.host[call.first :])
            choice = self._gpu.chooser.settled_choice(call, joined)
            if choice is None:
                return
            self._joins.keep(size, True)
        src, dst = (None if i is None else IndexVector(None, 0, i.count) for i in call.indices)
        call = Call(call.src, call.dst, src, dst, call.first, call.count)  # keeps nothing alive
        bound = self._gpu.bound(state, call, choice.engine)
        if bound is None:
            return
        self._bound.keep((*key[:-1], joined), _Bound(state, choice, bound))
        if pool is not None and index.host is not None and not call.first:
            kind = _Kind(state, choice, bound, weakref.ref(pool), pool.device_shift)
            self._kinds.keep((*size[:2], joined), kind)

    def _free(self, state: DeviceState, stream: int) -> bool:
        """Whether the device's context is current, and no capture in progress on a stream."""
        d = state.owner
        return d.context_device() == self._device and not (stream not in LEGACY and d.stream_capturing(stream))

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
        known = self._kinds.get((*size, joined_items(len(ids), ids) if (*size, True) in self._joins else 0))
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
        completions = state.completions
        if state.was_reset or state.owner is not driver() or not completions.events:
            return None
        if type(stream) is Stream and stream.device == self._device:
            handle = stream.open_handle or stream.handle
        else:
            handle = stream_handle(stream, self._device)
        owners = chunks.copy()
        addresses: U64 = np.fromiter(map(_address_of, owners), _UINT64, count)
        operation = completions.begin(handle)
        try:
            operation.uses = addresses
            if pool.use_chunks(operation, version) == known.shift:
                if type(known.bound) is BoundCall and not known.shift:
                    done = known.bound.run(operation, ids, addresses)
                else:
                    done = self._run(known, operation, ids, addresses)
                if not done:  # the device's context may not be current; or a capture is in progress
                    with DeviceScope(self._device):
                        done = self._run(known, operation, ids, addresses)
                if done:
                    return operation.commit((cache, owners, ids)), known.choice
        except BaseException as error:
            operation.abort()
            note_error(error, self._device)
            raise
        operation.abort()
        return None

    def _run(self, known: _Kind, operation: Operation, ids: I64, addresses: U64) -> bool:
        seen = addresses + np.uint64(known.shift % 2**64) if known.shift else addresses
        bound = known.bound
        if isinstance(bound, BoundCall):
            return bound.run(operation, ids, seen)
        return self._gpu.run_rows(known.state, operation, bound, ids, seen, addresses)
