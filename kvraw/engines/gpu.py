"""One plan on a GPU: picks the engine of each call and enqueues it."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvraw.arrays import I64, U64, IndexVector
from kvraw.engines import copy_engine
from kvraw.engines.arena import StagingRing
from kvraw.engines.board import once
from kvraw.engines.bound import BoundCall, IdCheck, bind_kernel
from kvraw.engines.device_state import DeviceState
from kvraw.engines.kernel import KernelPlan, kernels_barred
from kvraw.engines.operands import Operands, check_distinct, check_host_index
from kvraw.engines.planner import Choice, best, profile_for
from kvraw.engines.staged import StagedPlan
from kvraw.errors import BoundsError, DriverError, PlacementError
from kvraw.plan import CopyPlan
from kvraw.runtime import fork
from kvraw.runtime.inflight import Operation

__all__ = ["GpuCall", "GpuPlan"]

_NO_IDS: I64 = np.zeros(0, np.int64)
_MOST_BOUND = (
    64  # kinds of calls of a plan that are kept as programs: an argument block of 4 KiB for each launch in them
)


@dataclass(slots=True)
class GpuCall:
    """One call: which items, by which index, to or from where; not changed once made.

    Attributes
    ----------
    index : IndexVector
        Of the cache's side.
    chunks, host_chunks : numpy.ndarray of uint64
        Addresses of the chunks as the device and as the host see them.
    link : bool
        Host memory takes part.
    capturing : bool
        A stream capture is in progress.
    edges : tuple of int
        Addresses in chunks that no copy of the copy engine may span.
    bits : int
        The alignment of `chunks`, or-ed together; -1: not known.
    on_error : callable, optional
        Receives what kernels find in ids on the device, where nobody waits for the operation.
    """

    index: IndexVector
    chunks: U64
    host_chunks: U64
    first: int
    count: int
    link: bool
    capturing: bool
    edges: tuple[int, ...] = ()
    bits: int = -1
    on_error: Callable[[Exception], None] | None = None


class GpuPlan:
    """A copy plan between a cache on a GPU and a row of chunks.

    Parameters
    ----------
    plan : CopyPlan
        What to copy.
    store : bool
        The chunks are the destination.
    bases : numpy.ndarray of uint64
        Base addresses of the cache.
    chunk_bytes, per_chunk : int
        Bytes and items of a chunk.
    engine : str
        "auto", "kernel", "copy" or "staged".
    ctas : int, optional
        Most thread blocks of any kernel; 0 means none: the copy engine alone.
    check : bool
        Check indices, in the kernel where they lie on the device.
    distinct : bool
        Refuse what a load would write twice by indices on the host.
    names : tuple of str
        What errors call the source's and the destination's index.
    """

    def __init__(
        self,
        plan: CopyPlan,
        store: bool,
        bases: U64,
        chunk_bytes: int,
        per_chunk: int,
        *,
        engine: str = "auto",
        ctas: int | None = None,
        check: bool = True,
        distinct: bool = False,
        names: tuple[str, str] = ("src_index", "dst_index"),
    ) -> None:
        self.plan, self.store, self.engine, self.ctas = plan, store, engine, ctas
        self._bases, self._chunk_bytes, self._per_chunk = bases, chunk_bytes, per_chunk
        self.direction = "store" if store else "load"
        self._check, self._names = check, names
        self.kernel = KernelPlan(plan, ctas=ctas or None, check=check, names=names)
        self._staged: StagedPlan | None = None
        self._described = copy_engine.DescriptorPlan(plan)
        src, dst = plan.src_flat, plan.dst_flat
        # Items whose ids follow each other are neighbours on both sides: the copy engine joins them.
        self._joins = (
            src.inner + src.outer * (src.page == 1) == plan.run_bytes == dst.inner + dst.outer * (dst.page == 1)
        )
        self._choices: dict[tuple[object, ...], Choice] = {}
        self._bound: dict[tuple[object, ...], BoundCall | None] = {}
        self._seen: set[tuple[object, ...]] = set()  # kinds of calls that came once
        self._lock = fork.lock()  # of argument blocks of bound launches
        paged, name = (src, names[0]) if store else (dst, names[1])
        self.id_check = IdCheck(name, paged if check else None, distinct and check and not store)
        self._fixed = Choice(engine, "asked for", 0.0) if engine in ("kernel", "copy") and ctas != 0 else None

    def _sides(self, index: IndexVector, chunks: U64, bits: int = -1) -> tuple[Operands, Operands]:
        paged, flat = Operands(self._bases, index), Operands(chunks, None, None, bits)
        return (paged, flat) if self.store else (flat, paged)

    def settled_choice(self, call: GpuCall, joined: int | None = None) -> Choice | None:
        """The engine of calls like one that was enqueued, where it is the same whatever their ids are.

        With `joined`, that of calls with as many `joined_items`.
        """
        plan = self.plan
        if plan.src_flat.skip_negative or plan.dst_flat.skip_negative:
            return None
        if self._fixed is not None:
            return self._fixed
        key = (call.count, call.first % self._per_chunk, call.link, False, False, False)
        return self._choices.get(key if joined is None else (*key, joined))

    @staticmethod
    def joined_items(ids: I64) -> int:
        """How many ids follow each other, on the average."""
        return len(ids) // (1 + int(np.count_nonzero(ids[1:] - ids[:-1] != 1)))

    def choose(self, state: DeviceState, call: GpuCall) -> Choice:
        """The engine of a call."""
        host = call.index.host
        if self._fixed and call.link and host is not None and not call.capturing:
            return self._fixed  # asked for, and nothing speaks against it
        gaps = False
        if call.link and self.plan.src_flat.skip_negative | self.plan.dst_flat.skip_negative:
            gaps = host is None or bool((host[call.first :] < 0).any())
        key: tuple[object, ...] = (
            call.count,
            call.first % self._per_chunk,
            call.link,
            call.capturing,
            host is None,
            gaps,
        )
        choice = self._choices.get(key)
        if choice is not None:
            return choice
        joined = self._per_chunk if self._joins and host is not None and call.link and call.count > 1 else 1
        best_case = self._decide(state, call, gaps, joined, " at best" if joined > 1 else "")
        if joined == 1 or best_case.engine != "copy":
            return self._keep(key, best_case)  # however neighbouring the ids are
        assert host is not None
        joined = self.joined_items(host[call.first : call.first + call.count])
        key = (*key, joined)
        return self._choices.get(key) or self._keep(key, self._decide(state, call, gaps, joined))

    def _keep(self, key: tuple[object, ...], choice: Choice) -> Choice:
        if len(self._choices) > 4096:
            self._choices.clear()
        self._choices[key] = choice
        return choice

    def _decide(self, state: DeviceState, call: GpuCall, gaps: bool, joined: int, copy_note: str = "") -> Choice:
        plan, nbytes = self.plan, call.count * self.plan.item_bytes
        profile = profile_for(state.device)
        run = plan.run_bytes * max(1, min(joined, self._per_chunk))
        seconds = {
            "kernel": profile.seconds("kernel", self.direction, plan.run_bytes, nbytes),
            "copy": profile.seconds("copy", self.direction, run, nbytes),
            "staged": profile.seconds("staged", self.direction, plan.run_bytes, nbytes),
        }
        barred = {}
        if not call.link:
            barred["copy"] = barred["staged"] = "both sides are device memory"
        if call.index.host is None:
            barred["copy"] = "the ids lie on the device"
        if call.capturing:
            barred["copy"] = barred["staged"] = "a stream capture is in progress"
        if gaps and self.store:
            barred.setdefault("staged", "ids are or may be left out, and whole chunks would overwrite their bytes")
        whole = self._whole_chunks(call)
        if not whole[1]:
            barred.setdefault("staged", "no chunk is covered whole")
        if self.ctas == 0:
            barred["kernel"] = barred["staged"] = "ctas=0 allows no kernel"
        named = "copy" if self.engine == "auto" and self.ctas == 0 else self.engine
        found = best({e: s for e, s in seconds.items() if e not in barred} or seconds)
        reason = "asked for"
        if named == "auto" and found != "copy" and (no_kernel := kernels_barred(state.owner, plan.width())):
            named, reason = "copy", no_kernel
            barred = {"copy": f"{barred['copy']}, and {no_kernel}"} if "copy" in barred else {}
        if named != "auto":
            soft = named == "copy" and call.index.host is not None  # slower, but right
            if named in barred and not soft and not (named == "staged" and not whole[1]):
                raise PlacementError(f"engine is {named!r}, but {barred[named]}")
            return Choice(named, reason, seconds[named] * 1e6)
        if found == "staged":
            try:
                self._stage(state)  # takes the device memory that it needs: only where it is to be used
            except (PlacementError, DriverError) as error:
                if isinstance(error, DriverError) and error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                    raise
                barred["staged"] = str(error)
                found = best({e: s for e, s in seconds.items() if e not in barred})
        others = [
            f"{e} {barred[e]}" if e in barred else f"{e} {s * 1e6:.0f} us{copy_note if e == 'copy' else ''}"
            for e, s in seconds.items()
            if e != found
        ]
        why = "the fastest by the model, a kernel only by a margin"
        return Choice(found, f"{why} ({profile.source}); {'; '.join(others)}", seconds[found] * 1e6)

    def _whole_chunks(self, call: GpuCall) -> tuple[int, int]:
        """First chunk that is covered whole, and how many are."""
        begin = -(-call.first // self._per_chunk)
        return begin, max(0, (call.first + call.count) // self._per_chunk - begin)

    def enqueue(self, state: DeviceState, operation: Operation, call: GpuCall) -> Choice:
        """Enqueue a call; the device's context is current.

        Raises
        ------
        BoundsError
            An index on the host is bad; nothing was enqueued.
        """
        choice = self.choose(state, call)
        if self._run_bound(state, operation, call, choice.engine):
            return choice
        self.check(call.index, call.first)
        if choice.engine == "kernel":
            src, dst = self._sides(call.index, call.chunks, call.bits)
            self.kernel.enqueue(state, operation, src, dst, call.first, call.count, link=call.link, told=call.on_error)
        elif choice.engine == "copy":
            src, dst = self._sides(call.index, call.host_chunks)
            found = self._described(src, dst, call.first, call.count, apart=(self._bases,), edges=call.edges)
            operation.enqueued.append(operation.stream)
            copy_engine.enqueue(found, operation.stream, capturing=call.capturing, edges=call.edges, cut=True)
        else:
            self._enqueue_staged(state, operation, call)
        return choice

    def check(self, index: IndexVector, first: int) -> None:
        """Check indices that are on the host, behind `first`.

        Raises
        ------
        BoundsError
            One is out of bounds, or stands twice where it must not.
        """
        name, side, distinct = self.id_check
        if side is not None and index.host is not None:
            check_host_index(name, index.host, side, first)
            if distinct:
                check_distinct(name, index.host, first)

    def _run_bound(self, state: DeviceState, operation: Operation, call: GpuCall, engine: str) -> bool:
        """Enqueue a call by its bound program, event and all; False where it must be enqueued step by step."""
        host = call.index.host
        if call.capturing or engine == "copy" or (host is None and engine == "kernel"):
            return False
        if engine == "kernel" and host is not None:
            bound = self.bound_kernel(state, call)
            return bound is not None and self.run_kernel(operation, bound, host, call.chunks, call.host_chunks)
        if call.first or call.count != len(call.chunks) * self._per_chunk:
            return False
        there = call if host is None else None
        ids = _NO_IDS if host is None else host
        return self.run_staged(state, operation, ids, call.chunks, call.host_chunks, call.bits, call.edges, there)

    def run_kernel(self, operation: Operation, bound: BoundCall, ids: I64, seen: U64, places: U64) -> bool:
        """Enqueue a bound kernel call; False where it must be enqueued step by step.

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

    def run_staged(
        self,
        state: DeviceState,
        operation: Operation,
        ids: I64,
        seen: U64,
        places: U64,
        bits: int,
        edges: tuple[int, ...] = (),
        there: GpuCall | None = None,
    ) -> bool:
        """Enqueue whole chunks through the staging slots by a bound program; False where it must go step by step.

        `bits` is the alignment of the chunks as the device sees them, or -1; `there` a call with ids on the device.
        """
        if len(places) == 1:
            low = high = places.item(0)
        else:
            low, high = int(np.minimum.reduce(places)), int(np.maximum.reduce(places))
        high += self._chunk_bytes
        cuts = state.cuts()
        at = bisect.bisect_right(cuts, low)
        if (at < len(cuts) and cuts[at] < high) or (edges and any(low < edge < high for edge in edges)):
            return False
        staged, ring = self._stage(state)
        with ring.lock:
            width = 0 if there is None else there.index.width
            bound = self._bound_staged(state, staged, ring, len(ids), width, seen, places, bits)
            if bound is None:
                return False
            addresses: tuple[int, int] | None = None
            if there is not None:
                status = state.board.take(operation, self.kernel, 0, there.on_error) if self._check else 0
                addresses = there.index.address, status
            if not _run(operation, bound, ids, seen, places, addresses):
                return False
            ring.advance(bound.steps)
        return True

    def bound_kernel(self, state: DeviceState, call: GpuCall) -> BoundCall | None:
        """The program of a kernel call; None where it needs more than an argument block holds."""
        bits = call.bits if call.bits >= 0 else int(np.bitwise_or.reduce(call.chunks))
        bits &= 15
        key = ("kernel", call.first, call.count, len(call.chunks), bits, call.link, state)
        try:
            return self._bound[key]
        except KeyError:
            if not self._came_before(key):
                return None
        chunks = len(call.chunks)
        tables: tuple[U64 | int, U64 | int] = (self._bases, chunks) if self.store else (chunks, self._bases)
        launch = self.kernel.bind(
            state,
            tables,
            int(not self.store),
            call.first,
            call.count,
            bits | int(np.bitwise_or.reduce(self._bases)),
            link=call.link,
        )
        bound = None
        if launch is not None:
            flat = int(self.store)
            bound = bind_kernel(state, launch, self.id_check, call.first, call.count, chunks, flat)
        return self._keep_bound(key, bound)

    def _bound_staged(
        self,
        state: DeviceState,
        staged: StagedPlan,
        ring: StagingRing,
        count: int,
        width: int,
        seen: U64,
        places: U64,
        bits: int,
    ) -> BoundCall | None:
        bits = (bits if bits >= 0 else int(np.bitwise_or.reduce(seen))) & 15
        joined: tuple[bool, ...] = (False,)
        if len(places) > 1:
            joined = (False, *(places[1:] == places[:-1] + np.uint64(self._chunk_bytes)).tolist())
        key = ("staged", count, width, bits, joined, ring.turn, state)
        try:
            return self._bound[key]
        except KeyError:
            if not self._came_before(key):
                return None
        check = self.id_check if not width else self.id_check._replace(side=None)
        bound = staged.bind(state, ring, check, len(places), bits, joined, width)
        return bound if bound is None else self._keep_bound(key, bound)  # None: its slots were not used yet

    def _came_before(self, key: tuple[object, ...]) -> bool:
        """Whether a call of a kind came before: the first takes less time without a program."""
        if key in self._seen:
            return True
        if len(self._seen) >= _MOST_BOUND:
            self._seen.clear()
        self._seen.add(key)
        return False

    def _keep_bound(self, key: tuple[object, ...], bound: BoundCall | None) -> BoundCall | None:
        if len(self._bound) >= _MOST_BOUND:
            self._bound.clear()
        self._bound[key] = bound
        return bound

    def _stage(self, state: DeviceState) -> tuple[StagedPlan, StagingRing]:
        """The staged plan and the ring of its direction; an error where a row does not fit a slot."""
        ring = state.arena.ring(self.direction)
        if self._staged is None:
            self._staged = StagedPlan(
                self.plan,
                self.store,
                self._bases,
                self._chunk_bytes,
                ring.nbytes,
                ctas=self.ctas,
                check=self._check,
                names=self._names,
            )
        return self._staged, ring

    def _enqueue_staged(self, state: DeviceState, operation: Operation, call: GpuCall) -> None:
        told = None if call.on_error is None else once(call.on_error)
        chunk, chunks = self._whole_chunks(call)
        end = call.first + call.count
        if chunks:
            staged, ring = self._stage(state)
            staged.enqueue(
                state, ring, operation, call.index, call.host_chunks, call.chunks, chunk, chunks, call.edges, told
            )
        # What is not a whole chunk: the ends, by the kernel, straight to or from the chunks.
        inner = (chunk * self._per_chunk, (chunk + chunks) * self._per_chunk) if chunks else (end, end)
        src, dst = self._sides(call.index, call.chunks)
        for begin, stop in ((call.first, inner[0]), (inner[1], end)):
            if stop > begin:
                self.kernel.enqueue(state, operation, src, dst, begin, stop - begin, link=call.link, told=told)


def _run(
    operation: Operation, bound: BoundCall, ids: I64, seen: U64, places: U64, there: tuple[int, int] | None
) -> bool:
    """Run a bound program for an operation, and note where it enqueued."""
    event = operation.event
    assert event is not None
    enqueued = operation.enqueued
    enqueued.append(operation.stream)
    enqueued += bound.streams
    try:
        done = bound.run(operation.stream, event, ids, seen, places, there)
    except BoundsError:
        enqueued.clear()
        raise
    if not done:
        enqueued.clear()
    operation.recorded = done
    return done
