"""Copies by the copy engine as one operation in a stream's order, also where the batch call refuses that stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvraw import config
from kvraw.copying import copy_engine
from kvraw.copying.copy_engine import Descriptors
from kvraw.copying.device_state import DeviceState
from kvraw.errors import DriverError
from kvraw.runtime import fork
from kvraw.runtime.completion import Completion, Operation
from kvraw.runtime.program import Commands, Program
from kvraw.runtime.stream import LEGACY

__all__ = ["Batch", "fits", "submit", "submit_as_one", "submit_short"]

# Copies that are handed over with the GIL kept, as one program: below 1 ms.
_SHORT = 2048
_NAME = "batches"


class Batch:
    """The program that is one batch call with an event behind it, for one thread at a time.

    Parameters
    ----------
    state : DeviceState
        Of the device.
    pinned : sequence of (int, int)
        Addresses, each with the number that the driver gave what lies there: where that has changed, nothing is done.
    """

    __slots__ = ("_at", "_program", "lock", "state")

    def __init__(self, state: DeviceState, pinned: Sequence[tuple[int, int]] = ()) -> None:
        self.state = state
        c = Commands()
        first = c.value(6)
        stream, event, dst, src, sizes, count = (type(first)(first.index + k) for k in range(6))
        c.uncaptured(stream)
        for address, number in pinned:
            c.same_memory(address, number)
        c.copy_batch(dst, src, sizes, count, stream)
        c.record(event, stream)
        self.lock, self._program, self._at = fork.lock(), Program(c, state.owner), first.index

    def run(self, operation: Operation, addresses: tuple[int, int, int], count: int) -> bool:
        """Enqueue copies and the operation's event; False where a capture is in progress, or memory is another."""
        values, at, event = self._program.values, self._at, operation._event
        assert event is not None
        values[at], values[at + 1], values[at + 5] = operation.stream, event, count
        values[at + 2], values[at + 3], values[at + 4] = addresses
        return self._program.run()


def submit(
    state: DeviceState,
    stream: int,
    d: Descriptors,
    *,
    pageable: bool = False,
    edges: Sequence[int] = (),
    most: int | None = None,
    refs: object = None,
) -> Completion:
    """Enqueue copies that span no end of a registration, at least one, as one operation in a stream's order.

    The device's context is current.

    Parameters
    ----------
    pageable : bool
        Pageable memory takes part.
    edges : sequence of int
        Where allocations and registrations that others made end.
    most : int, optional
        The most copies that the driver is given at once.

    Raises
    ------
    DriverError
        The driver refused; `index` is the failing copy, where it told. Copies before it may have been enqueued.
    """
    step, count = most or len(d), len(d)
    if not pageable and fits(state, stream, min(count, step)) and count <= step:
        addresses = int(d.dst.ctypes.data), int(d.src.ctypes.data), int(d.sizes.ctypes.data)
        try:
            done = submit_short(state, stream, addresses, count, refs)
        except DriverError as error:
            if error.index is None:
                raise
            raise copy_engine.refused(d, d, error.index, error) from error
        if done is not None:
            return done

    def work(operation: Operation, capturing: bool) -> None:
        for begin in range(0, len(d), step):
            part = d
            if step < len(d):
                part = Descriptors(*(v[begin : begin + step] for v in (d.dst, d.src, d.sizes)))
            try:
                copy_engine.enqueue(
                    part, operation.stream, capturing=capturing, pageable=pageable, edges=edges, cut=True
                )
            except DriverError as error:
                if error.index is None or not begin:
                    raise
                raise error.at(begin + error.index) from error

    return submit_as_one(state, stream, work, pageable=pageable, refs=refs)


def fits(state: DeviceState, stream: int, count: int) -> bool:
    """Whether that many copies go to a stream as one short call."""
    short = count <= _SHORT and count <= config.MAX_BATCH.get()
    return short and stream not in LEGACY and state.owner.batch_supported()


def submit_short(
    state: DeviceState,
    stream: int,
    addresses: tuple[int, int, int],
    count: int,
    refs: object,
    batch: Batch | None = None,
) -> Completion | None:
    """Enqueue copies that `fits` by the addresses of their destinations, sources and sizes; see `submit`.

    None, and nothing is enqueued, where a capture is in progress on the stream, or the `batch` finds other memory.
    """
    if batch is None:
        known = state.bound[_NAME]
        batch = known.get(0) or known.setdefault(0, Batch(state))
    operation = state.completions.begin(stream)
    try:
        with batch.lock:
            operation.enqueued.append(stream)
            operation.recorded = batch.run(operation, addresses, count)
        if operation.recorded:
            return operation.commit(refs)
        operation.enqueued.clear()
    except BaseException:
        operation.abort()
        raise
    operation.abort()
    return None


def submit_as_one(
    state: DeviceState,
    stream: int,
    work: Callable[[Operation, bool], object],
    *,
    pageable: bool = False,
    refs: object = None,
) -> Completion:
    """Have `work` enqueue copies as one operation, which takes its place in the order of a stream.

    The device's context is current.

    Parameters
    ----------
    stream : int
        The caller's. For the legacy default stream, which the batch call refuses, a stream of ours takes the copies.
    work : callable
        Given the operation, on whose stream it enqueues, and whether a capture is in progress.
    pageable : bool
        Pageable memory takes part, so that copies go one by one anyway.
    refs : object
        Kept alive until the copies are over.
    """
    capturing = state.owner.stream_capturing(stream)
    aside = stream in LEGACY and not capturing and not pageable
    operation = state.completions.begin(state.side_stream("copy").handle if aside else stream, captured=capturing)
    try:
        if aside:
            operation.follow(stream)
        operation.enqueued.append(operation.stream)
        work(operation, capturing)
        completion = operation.commit(refs)
    except BaseException:
        operation.abort()
        raise
    if aside:
        completion.hold(stream)
    return completion
