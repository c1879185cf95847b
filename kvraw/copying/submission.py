"""Copies by the copy engine as one operation in a stream's order, also where the batch call refuses that stream."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence

from kvraw import config
from kvraw.copying import copy_engine
from kvraw.copying.copy_engine import Descriptors
from kvraw.copying.device_state import DeviceState
from kvraw.errors import DriverError
from kvraw.runtime import fork
from kvraw.runtime.completion import Completion, Operation
from kvraw.runtime.program import Commands, Program, Value
from kvraw.runtime.stream import LEGACY

__all__ = ["Batch", "enqueue", "fits", "submit", "submit_as_one", "submit_short"]

# Copies that are handed over with the GIL kept: below 1 ms. A program of more gives it away once.
_SHORT = 2048
_NAME = "batches"
_FIRST = 64  # copies of the first batch call
_CALLS = 64  # batch calls of a program


@functools.lru_cache(16)
def _ends(most: int) -> tuple[int, ...]:
    """Where the batch calls of a program end, in copies, the driver being given at most so many at once.

    The driver takes 0.4 to 0.5 us for a copy, and the engine begins once it was given a batch. So the first is small;
    each other is larger by no more than what keeps the engine busy meanwhile, at runs of 32 KiB.
    """
    sizes, size = list[int](), float(_FIRST)
    while len(sizes) < _CALLS:
        sizes.append(min(int(size), most))
        size *= 1.4
    return tuple(itertools.accumulate(sizes))


class _Calls:
    """A program that is some batch calls with an event behind them, for one thread at a time."""

    def __init__(self, state: DeviceState, pinned: Sequence[tuple[int, int]], ends: tuple[int, ...]) -> None:
        c = Commands()
        stream, event, dst, src, sizes, last = values = [c.value() for _ in range(6)]
        self.starts, self.end = (0, *ends[:-1]), ends[-1]
        self.lock, self.at = fork.lock(), values[0].index
        self.first = c.uncaptured(stream) + 1
        for address, number in pinned:
            self.first = c.same_memory(address, number) + 1
        for begin, end in zip(self.starts, ends, strict=True):
            count: Value | int = last if end is ends[-1] else end - begin
            c.copy_batch(dst + 8 * begin, src + 8 * begin, sizes + 8 * begin, count, stream)
        c.record(event, stream)
        self.program = Program(c, state.owner, release=ends[-1] > _SHORT)


class Batch:
    """Any number of copies in batch calls, as programs.

    Parameters
    ----------
    state : DeviceState
        Of the device.
    pinned : sequence of (int, int)
        Addresses, each with the number that the driver gave what lies there: where that has changed, nothing is done.
    """

    __slots__ = ("_made", "_pinned", "state")

    def __init__(self, state: DeviceState, pinned: Sequence[tuple[int, int]] = ()) -> None:
        self.state, self._pinned = state, pinned
        self._made: dict[tuple[int, int], _Calls] = {}

    def run(self, operation: Operation, addresses: Sequence[int], count: int, most: int | None = None) -> bool:
        """Enqueue copies, given by the addresses of their vectors, at most so many at once, and the operation's event.

        False where a capture is in progress on its stream, or memory is another.
        """
        cap, begin = config.MAX_BATCH.get(), 0
        most = min(most or cap, cap)
        ends = _ends(most)
        while begin < count:
            calls = min(bisect.bisect_left(ends, count - begin) + 1, len(ends))
            made = self._made.get((most, calls))
            if made is None:
                made = self._made.setdefault((most, calls), _Calls(self.state, self._pinned, ends[:calls]))
            values, at = made.program.values, made.at
            with made.lock:
                values[at], values[at + 1] = operation.stream, operation._event  # type: ignore[assignment]
                values[at + 2], values[at + 3], values[at + 4] = addresses
                values[at + 5] = min(count - begin, made.end) - made.starts[-1]
                try:
                    operation.enqueued.append(operation.stream)
                    done = operation.recorded = made.program.run()
                except DriverError as error:
                    if error.index is None or error.command is None:
                        raise
                    raise error.at(begin + made.starts[error.command - made.first] + error.index) from error
            if not done:
                return False
            begin += made.end
            addresses = [start + 8 * made.end for start in addresses] if begin < count else addresses
        return True


def _batch(state: DeviceState) -> Batch:
    """That of all copies that name no memory."""
    known: dict[int, Batch] = state.bound[_NAME]
    return known.get(0) or known.setdefault(0, Batch(state))


def fits(state: DeviceState, stream: int) -> bool:
    """Whether copies go to a stream by batch calls; no capture is in progress."""
    return stream not in LEGACY and state.owner.batch_supported()


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

    def work(operation: Operation, capturing: bool) -> None:
        enqueue(state, operation, d, capturing=capturing, pageable=pageable, edges=edges, most=most)

    return submit_as_one(state, stream, work, pageable=pageable, refs=refs)


def enqueue(
    state: DeviceState,
    operation: Operation,
    d: Descriptors,
    *,
    capturing: bool,
    pageable: bool = False,
    edges: Sequence[int] = (),
    most: int | None = None,
) -> None:
    """Enqueue copies that span no end of a registration as a part of an operation; see `submit`."""
    if capturing or pageable or not len(d) or not fits(state, operation.stream):
        copy_engine.enqueue(d, operation.stream, capturing=capturing, pageable=pageable, edges=edges, cut=True)
        return
    addresses = [int(v.ctypes.data) for v in (d.dst, d.src, d.sizes)]
    try:
        if _batch(state).run(operation, addresses, len(d), most):
            return
    except DriverError as error:
        if error.index is None:
            raise
        raise copy_engine.refused(d, d, error.index, error) from error
    copy_engine.enqueue(d, operation.stream, capturing=True, edges=edges, cut=True)


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
    operation = state.completions.begin(stream)
    try:
        if (batch or _batch(state)).run(operation, addresses, count):
            return operation.commit(refs)
        operation.abandon()
        return None
    except BaseException:
        operation.abort()
        raise


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
