"""A copy plan bound to the engines of GPUs: chooses the engine of each call and enqueues it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvraw.arrays import I64, U64, IndexVector
from kvraw.copying import copy_engine, submission
from kvraw.copying import kernel_args as ka
from kvraw.copying.addresses import AddressTable
from kvraw.copying.bound import BoundCall, IdCheck, IdChecker, id_checker
from kvraw.copying.call import Call
from kvraw.copying.chooser import Chooser
from kvraw.copying.device_state import DeviceState
from kvraw.copying.kernel import THREADS, KernelPlan
from kvraw.copying.plan import CopyPlan
from kvraw.copying.planner import Choice, RateLimit
from kvraw.copying.staged import StagedChunks, StagedItems
from kvraw.copying.staging_ring import StagingRing
from kvraw.copying.status_words import once
from kvraw.errors import DriverError
from kvraw.runtime.completion import Completion, Operation
from kvraw.runtime.host.registration import cuts_with

__all__ = ["BoundCopy", "BoundRows"]

# Kinds of calls of a plan that are kept as programs: an argument block of 4 KiB for each launch in them.
_MOST_BOUND = 64
_MOST_STAGED = 8  # caches whose staged plans are kept


class BoundRows(NamedTuple):
    """What staged calls of whole chunks have in common, and what was found out for one of them."""

    staged: StagedChunks
    ring: StagingRing
    checker: IdChecker
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
    limit : RateLimit, optional
        As of `Chooser`.
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
        limit: RateLimit | None = None,
        threads: int = THREADS,
        check: bool = True,
        distinct: bool = False,
        index_names: tuple[str, str] = ("src_index", "dst_index"),
    ) -> None:
        self.plan, self.ctas = plan, ctas
        self._check, self._names = check, index_names
        self.kernel = KernelPlan(plan, ctas=ctas or None, threads=threads, check=check, names=index_names, limit=limit)
        self.chooser = Chooser(plan, engine, where_possible=where_possible, ctas=ctas, limit=limit)
        self._described = copy_engine.DescriptorPlan(plan)
        self._staged: dict[tuple[str, bytes], StagedChunks] = {}
        self._last_staged: tuple[AddressTable, str, StagedChunks] | None = None
        self._items: dict[str, StagedItems] = {}
        self._cuts: tuple[object, tuple[int, ...], U64] = None, (), np.zeros(0, np.uint64)  # of ends of registrations
        self._joints: tuple[Sequence[object], U64] = (), np.zeros(0, np.uint64)  # of tables: see `_enqueue_copies`
        self._bound: dict[tuple[object, ...], BoundCall | None] = {}
        self._seen: set[tuple[object, ...]] = set()  # kinds of calls that came once
        src, dst = (plan.src_flat, plan.dst_flat) if check else (None, None)
        self._id_checks = IdCheck(index_names[0], src, False), IdCheck(index_names[1], dst, distinct and check)

    def choose(self, state: DeviceState, call: Call) -> Choice:
        """The engine of a call; the device's context is current."""
        return self.chooser.choose(state, call)

    def submit(
        self, state: DeviceState, stream: int, call: Call, refs: object, choice: Choice | None = None
    ) -> tuple[Completion, str]:
        """Enqueue a call as an operation of its own on a stream, and keep `refs` until it is over; with its engine.

        On the legacy default stream, which the copy engine's batch call refuses, it takes its place in the stream's
        order from a stream of ours. The device's context is current.
        """
        choice = choice or self.choose(state, call)
        if choice.engine == "copy":
            pageable = call.src.pageable or call.dst.pageable

            def work(operation: Operation, capturing: bool) -> None:
                self.enqueue(state, operation, call, choice)

            return submission.submit_as_one(state, stream, work, pageable=pageable, refs=refs), "copy"
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
        if engine == "kernel" and not call.capturing and call.host_ids and call.host_tables:
            bound = self._bound_kernel(state, call)
            if bound is not None and bound.run_call(operation, call):
                return choice
        self.check(state, call)
        if engine == "kernel":
            self._enqueue_kernel(state, operation, call, call.first, call.count, call.on_error)
        elif engine == "copy":
            self._enqueue_copies(state, operation, call)
        elif self.chooser.rows(call):
            self._enqueue_rows(state, operation, call)
        else:
            self._enqueue_items(state, operation, call)
        return choice

    def check(self, state: DeviceState, call: Call) -> None:
        """Check a call's indices that are on the host, once.

        Raises
        ------
        BoundsError
            One is out of bounds, or stands twice where it must not.
        """
        if not call.checked:
            for check, index in zip(self._id_checks, call.indices, strict=True):
                if check.side is not None and index is not None and index.host is not None:
                    id_checker(state, check)(index.host[call.first : call.end], call.first)
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
            state,
            operation,
            src,
            dst,
            first,
            count,
            link=call.src.link or call.dst.link,
            way=self.chooser.way(call),
            on_error=on_error,
        )

    def _enqueue_copies(self, state: DeviceState, operation: Operation, call: Call) -> None:
        src, dst = call.side(0, on_device=False), call.side(1, on_device=False)
        # Neighbours among chunks grow together: where their registrations end, `edges` says.
        rows = self.plan.src, self.plan.dst
        apart = [t for t, side in zip(call.tables, rows, strict=True) if not (t.link and side.table_outer)]
        known, joints = self._joints
        if len(known) != len(apart) or any(a is not b for a, b in zip(known, apart, strict=True)):
            # Not at each call: to sort gives the GIL away.
            bases = [t.host for t in apart if isinstance(t, AddressTable)]
            joints = np.unique(np.concatenate(bases)) if bases else np.zeros(0, np.uint64)
            self._joints = apart, joints
        edges, ours = call.edges, state.cuts()
        cuts = self._cuts  # once: another thread may put those of its call there
        if cuts[0] is not ours or cuts[1] != edges:
            cuts = self._cuts = ours, edges, cuts_with(edges)
        found = self._described(src, dst, call.first, call.count, joints=joints, cuts=cuts[2])
        operation.enqueued.append(operation.stream)
        pageable = call.src.pageable or call.dst.pageable
        submission.enqueue(state, operation, found, capturing=call.capturing, pageable=pageable, edges=edges)

    def bound(self, state: DeviceState, call: Call, engine: str) -> BoundCall | BoundRows | None:
        """What enqueues calls like this one, by an engine, that differ in ids and chunks alone; None: step by step."""
        if engine == "kernel":
            return self._bound_kernel(state, call)
        return self._bound_rows(state, call) if engine == "staged" else None

    def _bound_rows(self, state: DeviceState, call: Call) -> BoundRows | None:
        """What staged calls like this one have in common; None where not all is whole chunks."""
        chunks = self._chunks(call)[0]
        if call.first or call.count != len(chunks) * (self.plan.dst if call.dst is chunks else self.plan.src).page:
            return None
        staged, ring = self._rows_of(state, call)
        checker = id_checker(state, self._id_checks[0 if staged.store else 1])
        return BoundRows(staged, ring, checker, chunks.alignment)

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
        edges: tuple[int, ...] = (),
    ) -> bool:
        """Enqueue whole chunks through staging slots, unless a capture is in progress or the context is another's.

        `seen` and `places` are the chunks' addresses as the device and as the host see them, `there` ids on the device;
        no copy spans one of `edges`.

        Raises
        ------
        BoundsError
            An id is bad; nothing was enqueued.
        """
        index = there
        if index is None:
            index = IndexVector(ids, 0, len(ids))
            rows.checker(ids)
        row = places, seen, rows.bits
        return rows.staged.enqueue(state, rows.ring, operation, index, row, 0, len(places), edges, on_error)

    @staticmethod
    def _key(call: Call) -> tuple[object, ...]:
        """What calls of one program have in common."""
        src, dst = call.src, call.dst
        assert isinstance(src, AddressTable)
        assert isinstance(dst, AddressTable)
        indexed = (call.src_index is not None) + 2 * (call.dst_index is not None)
        return call.first, call.count, len(src), len(dst), src.alignment | dst.alignment, src.link, dst.link, indexed

    def _bound_kernel(self, state: DeviceState, call: Call) -> BoundCall | None:
        """The program of a kernel call; None where it needs more than an argument block holds."""
        src, dst = call.src, call.dst
        assert isinstance(src, AddressTable)
        assert isinstance(dst, AddressTable)
        ids = call.count * ((call.src_index is not None) + (call.dst_index is not None))
        if len(src.host) + len(dst.host) + ids > ka.WORDS:
            return None
        key = (*self._key(call), state)
        try:
            return self._bound[key]
        except KeyError:
            if not self._came_before(key):
                return None
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
            way=self.chooser.way(call),
        )
        bound = None
        if launch is not None:
            bound = BoundCall(state, launch, self._id_checks, call)
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

    def _rows_of(self, state: DeviceState, call: Call) -> tuple[StagedChunks, StagingRing]:
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
            staged = self._staged[key] = StagedChunks(
                self.plan,
                way == "store",
                ring.nbytes,
                paged.seen,
                self.chooser.chunk_bytes[way],
                ctas=self.ctas,
                check=self._check,
                names=self._names,
                limit=self.chooser.limit,
            )
        self._last_staged = paged, way, staged
        return staged, ring

    def _chunks(self, call: Call) -> tuple[AddressTable, IndexVector]:
        """The chunks of a staged call with a row of them, and the index of the other side."""
        store = self.chooser.way(call) == "store"
        chunks, index = (call.dst, call.src_index) if store else (call.src, call.dst_index)
        assert isinstance(chunks, AddressTable)
        assert index is not None
        return chunks, index

    def _enqueue_items(self, state: DeviceState, operation: Operation, call: Call) -> None:
        way = self.chooser.way(call)
        ring, items, host = state.arena.ring(way), self._items.get(way), int(way == "store")
        if items is None:
            items = self._items[way] = StagedItems(
                self.plan,
                way == "store",
                ring.nbytes,
                ctas=self.ctas,
                check=self._check,
                names=self._names,
                limit=self.chooser.limit,
            )
        there, span = call.side(host, on_device=False), (call.first, call.count)
        paged = call.indices[1 - host], call.tables[1 - host]
        _require(items.enqueue(state, ring, operation, *span, there, *paged, call.edges, call.on_error))

    def _enqueue_rows(self, state: DeviceState, operation: Operation, call: Call) -> None:
        on_error = None if call.on_error is None else once(call.on_error)
        chunks, index = self._chunks(call)
        page = (self.plan.dst if self.chooser.way(call) == "store" else self.plan.src).page
        at, count = self.chooser.whole_chunks(call)
        # What is not a whole chunk: the ends, by the kernel, straight to or from the chunks.
        inner = (at * page, (at + count) * page) if count else (call.end, call.end)
        for begin, stop in ((call.first, inner[0]), (inner[1], call.end)):
            if stop > begin:
                self._enqueue_kernel(state, operation, call, begin, stop - begin, on_error)
        if count:
            staged, ring = self._rows_of(state, call)
            row = chunks.host, chunks.seen, chunks.alignment
            _require(staged.enqueue(state, ring, operation, index, row, at, count, call.edges, on_error))


def _require(enqueued: bool) -> None:
    """Raise an error where a program enqueued nothing, though its context is current: by a capture that just began."""
    if not enqueued:
        raise DriverError("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 900, "cuStreamIsCapturing")
