"""A copy plan bound to the engines of GPUs: chooses the engine of each call and enqueues it."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvraw.arrays import I64, U64, IndexVector
from kvraw.copying import copy_engine
from kvraw.copying.addresses import AddressTable
from kvraw.copying.bound import BoundCall, CallKind, IdCheck, bind_kernel
from kvraw.copying.call import Call
from kvraw.copying.chooser import Chooser
from kvraw.copying.device_state import DeviceState
from kvraw.copying.kernel import THREADS, KernelPlan
from kvraw.copying.operands import check_distinct, check_host_index
from kvraw.copying.plan import CopyPlan
from kvraw.copying.planner import Choice
from kvraw.copying.staged import StagedPlan
from kvraw.copying.staged_items import StagedItems
from kvraw.copying.staging_ring import StagingRing
from kvraw.copying.status_words import once
from kvraw.copying.submission import submit_as_one
from kvraw.errors import BoundsError
from kvraw.runtime import fork
from kvraw.runtime.completion import Completion, Operation

__all__ = ["BoundCopy", "BoundRows"]

# Kinds of calls of a plan that are kept as programs: an argument block of 4 KiB for each launch in them.
_MOST_BOUND = 64
_MOST_STAGED = 8  # caches whose staged plans are kept


class BoundRows(NamedTuple):
    """What staged calls of whole chunks have in common: one of them, and what was found out for it."""

    staged: StagedPlan
    ring: StagingRing
    call: Call
    chunk_bytes: int
    bits: int


class BoundCopy:
    """A copy plan with all that does not change from call to call, for every engine of a GPU.

    Parameters
    ----------
    plan : CopyPlan
        What to copy.
    engine : str
        "auto", "kernel", "copy" or "staged".
    where_possible : bool
        `engine` is a wish: where it cannot carry a call out, another does.
    ctas, threads : int, optional
        Most thread blocks of any kernel, 0 means none: the copy engine alone; and most threads of a block.
    check : bool
        Check indices, in the kernel where they lie on the device.
    distinct : bool
        Refuse what would be written twice by indices on the host.
    index_names : tuple of str
        What errors call the source's and the destination's index.
    """

    def __init__(
        self,
        plan: CopyPlan,
        *,
        engine: str = "auto",
        where_possible: bool = False,
        ctas: int | None = None,
        threads: int = THREADS,
        check: bool = True,
        distinct: bool = False,
        index_names: tuple[str, str] = ("src_index", "dst_index"),
    ) -> None:
        self.plan, self.ctas = plan, ctas
        self._check, self._names = check, index_names
        self.kernel = KernelPlan(plan, ctas=ctas or None, threads=threads, check=check, names=index_names)
        self.chooser = Chooser(plan, engine, where_possible=where_possible, ctas=ctas)
        self._described = copy_engine.DescriptorPlan(plan)
        self._staged: dict[tuple[str, bytes], StagedPlan] = {}
        self._last_staged: tuple[AddressTable, str, StagedPlan] | None = None
        self._items: dict[str, StagedItems] = {}
        # Of the last table of chunks, which mostly comes again: what may be copied as one.
        self._last_joined: tuple[object, object, int, tuple[bool, ...] | None] = (None, None, 0, None)
        self._bound: dict[tuple[object, ...], BoundCall | None] = {}
        self._seen: set[tuple[object, ...]] = set()  # kinds of calls that came once
        self._lock = fork.lock()  # of argument blocks of bound launches
        src, dst = (plan.src_flat, plan.dst_flat) if check else (None, None)
        self.id_checks = IdCheck(index_names[0], src, False), IdCheck(index_names[1], dst, distinct and check)

    def choose(self, state: DeviceState, call: Call) -> Choice:
        """The engine of a call; the device's context is current."""
        return self.chooser.choose(state, call)

    def submit(self, state: DeviceState, stream: int, call: Call, refs: object) -> tuple[Completion, str]:
        """Enqueue a call as an operation of its own on a stream, and keep `refs` until it is over; with its engine.

        On the legacy default stream, which the copy engine's batch call refuses, it takes its place in the stream's
        order from a stream of ours. The device's context is current.
        """
        choice = self.choose(state, call)
        if choice.engine == "copy":
            pageable = call.src.pageable or call.dst.pageable

            def work(operation: Operation, capturing: bool) -> None:
                self.enqueue(state, operation, call, choice)

            return submit_as_one(state, stream, work, pageable=pageable, refs=refs), "copy"
        operation = state.completions.begin(stream, captured=call.capturing)
        try:
            self.enqueue(state, operation, call, choice)
            return operation.commit(refs), choice.engine
        except BaseException:
            operation.abort()
            raise

    def enqueue(self, state: DeviceState, operation: Operation, call: Call, choice: Choice | None = None) -> Choice:
        """Enqueue a call as a part of an operation; the device's context is current.

        Raises
        ------
        BoundsError
            An index on the host is bad; nothing was enqueued.
        """
        if choice is None:
            choice = self.chooser.choose(state, call)
        engine = choice.engine
        if (
            engine != "copy"
            and not call.capturing
            and call.host_tables
            and self._run_bound(state, operation, call, engine)
        ):
            return choice
        self.check(call)
        if engine == "kernel":
            self._enqueue_kernel(state, operation, call, call.first, call.count, call.on_error)
        elif engine == "copy":
            self._enqueue_copies(operation, call)
        elif self.chooser.rows(call):
            self._enqueue_rows(state, operation, call)
        else:
            items, ring = self._items_of(state, call)
            items.enqueue(state, ring, operation, call, None if call.on_error is None else once(call.on_error))
        return choice

    def check(self, call: Call) -> None:
        """Check a call's indices that are on the host, once.

        Raises
        ------
        BoundsError
            One is out of bounds, or stands twice where it must not.
        """
        if call.checked:
            return
        for (name, side, distinct), index in zip(self.id_checks, call.indices, strict=True):
            if side is not None and index is not None and index.host is not None:
                ids = index.host if index.count == call.end else index.host[: call.end]
                check_host_index(name, ids, side, call.first)
                if distinct:
                    check_distinct(name, ids, call.first)
        call.checked = True

    def _enqueue_kernel(
        self,
        state: DeviceState,
        operation: Operation,
        call: Call,
        first: int,
        count: int,
        on_error: Callable[[Exception], None] | None,
    ) -> None:
        src, dst = call.side(0, on_device=True), call.side(1, on_device=True)
        self.kernel.enqueue(
            state, operation, src, dst, first, count, link=call.src.link or call.dst.link, on_error=on_error
        )

    def _enqueue_copies(self, operation: Operation, call: Call) -> None:
        src, dst = call.side(0, on_device=False), call.side(1, on_device=False)
        # Neighbours among chunks grow together: where their registrations end, `edges` says.
        rows = self.plan.src, self.plan.dst
        apart = [
            end.bases
            for end, table, side in zip((src, dst), call.tables, rows, strict=True)
            if not (table.link and side.table_outer)
        ]
        edges = call.edges
        found = self._described(src, dst, call.first, call.count, apart=apart, edges=edges)
        operation.enqueued.append(operation.stream)
        pageable = call.src.pageable or call.dst.pageable
        copy_engine.enqueue(found, operation.stream, capturing=call.capturing, pageable=pageable, edges=edges, cut=True)

    def _run_bound(self, state: DeviceState, operation: Operation, call: Call, engine: str) -> bool:
        """Enqueue a call by its program, event and all; False where it must be enqueued step by step."""
        if engine == "kernel":
            bound = self.bound_kernel(state, call) if call.host_ids else None
            if bound is None:
                return False
            with self._lock:
                return _run(operation, bound, bound.run_call, call)
        if not self.chooser.rows(call):
            return call.host_ids and self._run_items(state, operation, call)
        store = self.chooser.way(call) == "store"
        chunks, index = (call.dst, call.src_index) if store else (call.src, call.dst_index)
        assert isinstance(chunks, AddressTable)
        assert index is not None
        if call.first or call.count != len(chunks) * (self.plan.dst if store else self.plan.src).page:
            return False
        there, ids = (index, _NO_IDS) if index.host is None else (None, index.host)
        rows = self.bound_rows(state, call)
        return self.run_rows(state, operation, rows, ids, chunks.seen, chunks.host, there, call.on_error, chunks)

    def run_kernel(self, operation: Operation, bound: BoundCall, ids: I64, seen: U64, places: U64) -> bool:
        """Enqueue a bound kernel call with other ids and chunks; False where it must be enqueued step by step.

        `seen` and `places` are the chunks' addresses as the device and as the host see them.
        """
        stream, event, enqueued = operation.stream, operation._event, operation.enqueued
        assert event is not None
        enqueued.append(stream)
        with self._lock:
            try:
                done = operation.recorded = bound.run(stream, event, ids, seen, places)
            except BoundsError:
                enqueued.clear()
                raise
        if not done:
            enqueued.clear()
        return done

    def bound_rows(self, state: DeviceState, call: Call) -> BoundRows:
        """What staged calls like this one, of whole chunks, have in common."""
        staged, ring = self._rows_of(state, call)
        way = self.chooser.way(call)
        chunks = call.dst if way == "store" else call.src
        assert isinstance(chunks, AddressTable)
        return BoundRows(staged, ring, call, self.chooser.chunk_bytes[way], chunks.alignment)

    def run_rows(
        self,
        state: DeviceState,
        operation: Operation,
        rows: BoundRows,
        ids: I64,
        seen: U64,
        places: U64,
        there: IndexVector | None = None,
        on_error: Callable[[Exception], None] | None = None,
        table: AddressTable | None = None,
    ) -> bool:
        """Enqueue whole chunks through staging slots by a program; False where it must go step by step.

        `seen` and `places` are the chunks' addresses as the device and as the host see them, `there` ids on the device,
        `table` the chunks, where they are more than a pool's.
        """
        staged, ring, call, nbytes, bits = rows
        cuts, last = state.cuts.listed, self._last_joined
        if table is not None and last[0] is table and last[1] is cuts and last[2] == nbytes:
            joined = last[3]
        else:
            joined = _joined(places, nbytes, cuts, () if table is None else table.edges)
            self._last_joined = table, cuts, nbytes, joined
        if joined is None:
            return False
        with ring.lock:
            width = 0 if there is None else there.width
            key = ("rows", staged, call.count, width, bits, joined, ring.turn, state)
            bound = self._bound.get(key)
            if bound is None:
                if not self._came_before(key):
                    return False
                checks = (_UNCHECKED, _UNCHECKED) if width else self.id_checks
                bound = staged.bind(state, ring, checks, call, bits, joined, width)
                if bound is None:  # its slots were not used yet
                    return False
                self._keep_bound(key, bound)
            addresses = None
            if there is not None:
                addresses = (
                    there.address,
                    state.status.take(operation, self.kernel, 0, on_error) if self._check else 0,
                )
            if not _run(operation, bound, bound.run, ids, seen, places, addresses):
                return False
            ring.advance(bound.steps)
        return True

    def _run_items(self, state: DeviceState, operation: Operation, call: Call) -> bool:
        self.check(call)  # ahead of the copies, which are worked out by ids
        items, ring = self._items_of(state, call)
        with ring.lock:
            key = ("items", *self._key(call), ring.turn, state)
            bound = self._bound.get(key)
            if bound is None:
                if not self._came_before(key):
                    return False
                bound = items.bind(state, ring, (_UNCHECKED, _UNCHECKED), call)
                if bound is None:
                    return False
                self._keep_bound(key, bound)
            moves = items.moves(ring, call)
            if moves is None or not _run(operation, bound, bound.run_call, call, moves):
                return False
            ring.advance(bound.steps)
        return True

    @staticmethod
    def _key(call: Call) -> tuple[object, ...]:
        """What calls of one program have in common."""
        src, dst = call.src, call.dst
        assert isinstance(src, AddressTable)
        assert isinstance(dst, AddressTable)
        indexed = (call.src_index is not None) + 2 * (call.dst_index is not None)
        return call.first, call.count, len(src), len(dst), src.alignment | dst.alignment, src.link, dst.link, indexed

    def bound_kernel(self, state: DeviceState, call: Call) -> BoundCall | None:
        """The program of a kernel call; None where it needs more than an argument block holds."""
        key = (*self._key(call), state)
        try:
            return self._bound[key]
        except KeyError:
            if not self._came_before(key):
                return None
        src, dst = call.src, call.dst
        assert isinstance(src, AddressTable)
        assert isinstance(dst, AddressTable)
        lengths = len(src), len(dst)
        indexed = tuple(k for k in (0, 1) if call.indices[k] is not None)
        launch = self.kernel.bind(
            state,
            lengths,
            indexed,
            call.first,
            call.count,
            src.alignment | dst.alignment,
            link=src.link or dst.link,
        )
        bound = None
        if launch is not None:
            kind = CallKind(self.id_checks, indexed, call.first, call.count)
            bound = bind_kernel(state, launch, kind, call)
        self._keep_bound(key, bound)
        return bound

    def _came_before(self, key: tuple[object, ...]) -> bool:
        """Whether a call of a kind came before: the first takes less time without a program."""
        if key in self._seen:
            return True
        if len(self._seen) >= _MOST_BOUND:
            self._seen.clear()
        self._seen.add(key)
        return False

    def _keep_bound(self, key: tuple[object, ...], bound: BoundCall | None) -> None:
        if len(self._bound) >= _MOST_BOUND:
            self._bound.clear()
        self._bound[key] = bound

    def _rows_of(self, state: DeviceState, call: Call) -> tuple[StagedPlan, StagingRing]:
        """The staged plan of a call with a row of chunks, and the ring of its direction.

        Raises
        ------
        PlacementError
            A row does not fit a slot.
        """
        way = self.chooser.way(call)
        ring = state.arena.ring(way)
        paged = call.src if way == "store" else call.dst
        assert isinstance(paged, AddressTable)
        last = self._last_staged
        if last is not None and last[0] is paged and last[1] == way:
            return last[2], ring
        key = way, paged.seen.tobytes()
        staged = self._staged.get(key)
        if staged is None:
            if len(self._staged) >= _MOST_STAGED:
                self._staged.clear()
            staged = self._staged[key] = StagedPlan(
                self.plan,
                way == "store",
                paged.seen,
                self.chooser.chunk_bytes[way],
                ring.nbytes,
                ctas=self.ctas,
                check=self._check,
                names=self._names,
            )
        self._last_staged = paged, way, staged
        return staged, ring

    def _items_of(self, state: DeviceState, call: Call) -> tuple[StagedItems, StagingRing]:
        way = self.chooser.way(call)
        ring = state.arena.ring(way)
        items = self._items.get(way)
        if items is None:
            items = self._items[way] = StagedItems(
                self.plan, way == "store", ring.nbytes, ctas=self.ctas, check=self._check, names=self._names
            )
        return items, ring

    def _enqueue_rows(self, state: DeviceState, operation: Operation, call: Call) -> None:
        on_error = None if call.on_error is None else once(call.on_error)
        store = self.chooser.way(call) == "store"
        flat = call.dst if store else call.src
        index = call.src_index if store else call.dst_index
        assert isinstance(flat, AddressTable)
        assert index is not None
        per_chunk = (self.plan.dst if store else self.plan.src).page
        chunk, chunks = self.chooser.whole_chunks(call)
        if chunks:
            staged, ring = self._rows_of(state, call)
            staged.enqueue(state, ring, operation, index, flat.host, flat.seen, chunk, chunks, call.edges, on_error)
        # What is not a whole chunk: the ends, by the kernel, straight to or from the chunks.
        inner = (chunk * per_chunk, (chunk + chunks) * per_chunk) if chunks else (call.end, call.end)
        for begin, stop in ((call.first, inner[0]), (inner[1], call.end)):
            if stop > begin:
                self._enqueue_kernel(state, operation, call, begin, stop - begin, on_error)


_NO_IDS: I64 = np.zeros(0, np.int64)
_UNCHECKED = IdCheck("", None, False)


def _run(operation: Operation, bound: BoundCall, run: Callable[..., bool], *args: object) -> bool:
    """Run a bound program for an operation by one of its methods, and note where it enqueued."""
    event = operation._event
    assert event is not None
    enqueued = operation.enqueued
    enqueued.append(operation.stream)
    enqueued += bound.streams
    try:
        done = run(operation.stream, event, *args)
    except BoundsError:
        enqueued.clear()
        raise
    if not done:
        enqueued.clear()
    operation.recorded = done
    return done


def _joined(places: U64, nbytes: int, cuts: list[int], edges: tuple[int, ...]) -> tuple[bool, ...] | None:
    """Which chunks begin where the one before ends and may be copied with it; None where one is to be cut itself.

    No copy spans one of the ascending `cuts` or of `edges`.
    """
    joined: tuple[bool, ...] = (False,)
    if len(places) == 1:
        low = high = places.item(0)
    else:
        low, high = int(np.minimum.reduce(places)), int(np.maximum.reduce(places))
        joined = (False, *(places[1:] == places[:-1] + np.uint64(nbytes)).tolist())
    high += nbytes
    at = bisect.bisect_right(cuts, low)
    borders = cuts[at : bisect.bisect_left(cuts, high, at)] if at < len(cuts) and cuts[at] < high else []
    if edges and (len(edges) > 1 or edges[0] < high):
        borders = sorted({*borders, *filter(range(low + 1, high).__contains__, edges)})
    if not borders:
        return joined
    apart = list[bool]()
    for one, start in zip(joined, places.tolist(), strict=True):
        at = bisect.bisect_right(borders, start)
        if at < len(borders) and borders[at] < start + nbytes:
            return None
        apart.append(one and (at == 0 or borders[at - 1] != start))
    return tuple(apart)
