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
_UNKNOWN = (None, None)
_NO_IDS: I64 = np.zeros(0, np.int64)
_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)
_kind_of, _address_of = attrgetter("kind"), attrgetter("address")


class _Kind(NamedTuple):
    """What is known of calls with so many ids and chunks."""

    state: DeviceState
    pool: weakref.ref[HostPool]
    shift: int
    choice: Choice
    bound: BoundCall | BoundRows  # by the kernel, or staged


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
        self._kinds: Memo[tuple[int, int, bool, int], _Kind] = Memo(_MOST)
        # Of calls by address: by the numbers of ids, chunks and items left out, the width of ids, the alignment, and
        # the items that follow each other, where the engine depends on that.
        self._placed: Memo[tuple[object, ...], tuple[DeviceState | None, BoundCall | BoundRows | None]] = Memo(_MOST)
        # Ids, chunks and link of calls whose engine depends on joined ids.
        self._joins: Memo[tuple[int, int, bool], bool] = Memo(_MOST)

    def enqueue(
        self,
        state: DeviceState,
        addresses: tuple[U64, U64],
        index: IndexVector,
        skip: int,
        stream: int,
        on_error: Callable[[Exception], None] | None = None,
        refs: object = None,
        *,
        link: bool = True,
    ) -> str | None:
        """Enqueue a call for chunks in one registration, at these addresses as the host and as the device see them.

        Without `link`, they lie in the device's memory. Ids lie on the host or where kernels reach them, and there are
        as many chunks as they need. `refs` are kept until the copy is over.

        Returns
        -------
        str or None
            The engine; empty where it was by a bound program. None where nothing was enqueued: another device's context
            is current, or a capture is in progress on the stream.
        """
        if not state.completions.events and not self._free(state, stream):
            return None  # ahead of all: an event would be made in the current context
        host, seen = addresses
        count, width = index.count - skip, 0 if index.host is not None else index.width
        size, bits = (count, len(host), link), int(np.bitwise_or.reduce(seen)) & 15
        joined = 0
        if size in self._joins and index.host is not None:
            joined = joined_items(count, index.host[skip:] if skip else index.host)
        known, bound = self._placed.get((size, skip, width, bits, joined), _UNKNOWN)
        if known is not state:  # or of a context that was reset
            bound = None
        operation, engine = state.completions.begin(stream), ""
        try:
            ids = _NO_IDS if index.host is None else index.host
            if type(bound) is BoundCall:
                done = bound.run(operation, ids, seen)
            elif type(bound) is BoundRows:
                there = index if width else None
                done = self._gpu.run_rows(state, operation, bound, ids, seen, host, there, on_error)
            else:
                done = False
            if not done:
                if not self._free(state, stream):  # a program looks at that itself
                    operation.abort()
                    return None
                chunks = AddressTable(host, seen, link, bits=bits)
                call = Call.of_chunks(self._cache, chunks, self._store, index, skip, count, on_error=on_error)
                engine = self._gpu.enqueue(state, operation, call).engine
                settled = self._settled(call, index, size) if operation.recorded else None
                if settled is not None:
                    key = (size, skip, width, bits, settled[1])
                    self._placed.keep(key, (state, self._program(state, call, settled[0])))
            operation.commit((index.owner, refs))
            return engine
        except BaseException:
            operation.abort()
            raise

    def _free(self, state: DeviceState, stream: int) -> bool:
        """Whether the device's context is current, and no capture in progress on a stream."""
        d = state.owner
        return d.context_device() == self._device and not (stream not in LEGACY and d.stream_capturing(stream))

    def _settled(self, call: Call, index: IndexVector, size: tuple[int, int, bool]) -> tuple[Choice, int] | None:
        """The engine of calls like one that was enqueued, and the joined items of those that it holds for (0: all)."""
        choice = self._gpu.chooser.settled_choice(call)
        if choice is not None or index.host is None:
            return None if choice is None else (choice, 0)
        joined = joined_items(call.count, index.host[call.first : call.end])
        choice = self._gpu.chooser.settled_choice(call, joined)
        if choice is None:
            return None
        self._joins.keep(size, True)
        return choice, joined

    def _program(self, state: DeviceState, call: Call, choice: Choice) -> BoundCall | BoundRows | None:
        """The program of calls like one that was enqueued, which keeps nothing of it alive."""
        call = _without_owners(call)
        return self._gpu.bound(state, call, choice.engine)

    def learn(self, state: DeviceState, pool: HostPool, call: Call) -> None:
        """Keep what a call that was enqueued by its bound program found out, for those of its kind."""
        index, chunks = (call.src_index, call.dst) if call.dst_index is None else (call.dst_index, call.src)
        if call.first or index is None or index.host is None or not isinstance(chunks, AddressTable):
            return
        size = call.count, len(chunks), True
        settled = self._settled(call, index, size)
        bound = None if settled is None else self._program(state, call, settled[0])
        if settled is None or bound is None:
            return
        key = (*size, settled[1])
        self._kinds.keep(key, _Kind(state, weakref.ref(pool), pool.device_shift, settled[0], bound))

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
        size = len(ids), count, True
        known = self._kinds.get((*size, joined_items(len(ids), ids) if size in self._joins else 0))
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


def _without_owners(call: Call) -> Call:
    """A call of the same kind that keeps nothing alive."""
    src, dst = (None if i is None else IndexVector(None, 0, i.count) for i in call.indices)
    return Call(call.src, call.dst, src, dst, call.first, call.count)
