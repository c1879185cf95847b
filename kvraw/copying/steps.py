"""Copies and launches in an order: enqueued as they are, or bound, where a call is one compiled function."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from kvraw.copying.device_state import DeviceState
from kvraw.copying.indexed import IndexedLaunch
from kvraw.copying.status_words import once
from kvraw.runtime import fork
from kvraw.runtime.completion import Completion, Operation
from kvraw.runtime.program import Commands, Program, Value

__all__ = ["BoundSteps", "Step", "StepCopy", "StepPart", "cut_at_ends", "enqueue_copy", "enqueue_steps"]

OnError = Callable[[Exception], None]
StepCopy = tuple[int, int, int, int]
"""A copy between pinned and device memory: destination, source, bytes, offset of the host's side in its buffer."""


class StepPart(Protocol):
    """Something that a step enqueues."""

    def enqueue(self, state: DeviceState, operation: Operation, capturing: bool, on_error: OnError) -> object:
        """Enqueue it on the operation's stream; the device's context is current."""


class Step(NamedTuple):
    """Copies and launches of an operation of several steps.

    Attributes
    ----------
    copies : list
        `StepCopy`, or a part that stands among them.
    launches : list of StepPart
        In their order.
    behind : int
        The latest step ahead of this one whose launches use what these copies write; -1: none.
    """

    copies: Sequence[StepCopy | StepPart]
    launches: Sequence[StepPart]
    behind: int = -1


def cut_at_ends(nbytes: int, offset: int, alignment: int) -> Iterator[tuple[int, int]]:
    """Begin and size of the pieces of a copy, cut at multiples of the alignment in the host buffer."""
    at = 0
    while at < nbytes:
        size = min(alignment - (offset + at) % alignment, nbytes - at)
        yield at, size
        at += size


def enqueue_copy(state: DeviceState, copy: StepCopy, alignment: int, stream: int) -> None:
    """Enqueue a copy in pieces none of which spans two registrations, which may end at multiples of `alignment`."""
    dest, src, nbytes, offset = copy
    enqueue = state.owner.memcpy_async
    if offset % alignment + nbytes <= alignment:
        enqueue(dest, src, nbytes, stream)
        return
    for at, size in cut_at_ends(nbytes, offset, alignment):
        enqueue(dest + at, src + at, size, stream)


def enqueue_steps(
    state: DeviceState,
    stream: int,
    steps: Sequence[Step],
    on_error: OnError,
    *,
    alignment: int,
    capturing: bool,
    copies_first: bool = True,
    ahead: bool = False,
    refs: object = None,
) -> Completion:
    """Enqueue steps as one operation on a stream, each behind the one before. The device's context is current.

    Parameters
    ----------
    on_error : callable
        Receives what kernels find in ids.
    alignment : int
        Registrations of the host's memory may end at multiples of it.
    capturing : bool
        A capture is in progress on the stream.
    copies_first : bool
        In a step the copies come ahead of the launches.
    ahead : bool
        The copies go on a stream of our own, ahead of the launches, and wait for those of the step that they are
        `behind`; not in a capture.
    refs : object
        Kept until all is over.
    """
    own = state.side_stream("load").handle if ahead and not capturing else stream
    operation = state.completions.begin(stream, captured=capturing)
    operation.enqueued += {stream, own}
    d, over = state.owner, dict[int, int]()

    def event_behind(on: int) -> int:
        event = state.completions.take_event()
        operation.on_done(partial(state.completions.give_event, event))
        d.event_record(event, on)
        return event

    def enqueue(parts: Sequence[Any]) -> None:
        for part in parts:
            if type(part) is tuple:
                enqueue_copy(state, part, alignment, own)
            else:
                part.enqueue(state, operation, capturing, on_error)

    try:
        if own != stream:
            d.stream_wait_event(own, event_behind(stream))
        awaited = {step.behind for step in steps}
        for number, step in enumerate(steps):
            if not copies_first:
                enqueue(step.launches)
            if own != stream and step.behind >= 0:
                d.stream_wait_event(own, over[step.behind])
            enqueue(step.copies)
            if own != stream and step.copies:
                d.stream_wait_event(stream, event_behind(own))
            if copies_first:
                enqueue(step.launches)
            if own != stream and number in awaited:
                over[number] = event_behind(stream)
        return operation.commit(refs)
    except BaseException:
        operation.abort()
        raise


class BoundSteps:
    """A program of copies and launches by ids on the device. The device's context is current where it is made.

    Parameters
    ----------
    launches : sequence of IndexedLaunch
        What is launched, each any number of times; for this alone, since their arguments are written.
    order : sequence
        Of each step how many copies it has, and which of the launches.
    copies_first : bool
        In a step the copies come ahead of the launches.
    asks : int
        Addresses of which calls say what memory lies there.
    """

    def __init__(
        self,
        state: DeviceState,
        launches: Sequence[IndexedLaunch],
        order: Sequence[tuple[int, tuple[int, ...]]],
        copies_first: bool,
        asks: int,
    ) -> None:
        self.state, self._launches, self._lock = state, launches, fork.lock()
        self._numbers = [number for _, chosen in order for number in chosen]
        self._used = sorted(set(self._numbers))
        c = Commands()
        stream, event, asked = c.value(), c.value(), c.value(2 * asks)
        copies, jobs = c.value(3 * sum(n for n, _ in order)), c.value(IndexedLaunch.JOB * len(self._numbers))
        self._stream, self._event = stream.index, event.index
        self._written = asked.index
        c.on_device(state.device)
        c.uncaptured(stream)
        for k in range(asked.index, asked.index + 2 * asks, 2):
            c.same_memory(Value(k), Value(k + 1))
        at, job = copies.index, jobs.index
        for count, chosen in order:
            for copying in (copies_first, not copies_first):
                if copying:
                    for _ in range(count):
                        c.copy(Value(at), Value(at + 1), Value(at + 2), stream)
                        at += 3
                    continue
                for number in chosen:
                    launches[number].add_to(c, stream, Value(job))
                    job += IndexedLaunch.JOB
        c.record(event, stream)
        self._program = Program(c, state.owner)

    def enqueue(
        self,
        stream: int,
        asked: list[int],
        copies: list[int],
        jobs: list[tuple[int, int, int]],
        on_error: Callable[[Exception], None],
        refs: object = None,
    ) -> Completion | None:
        """Enqueue a call.

        Parameters
        ----------
        asked : list of int
            Addresses, each with the number of the memory that must lie there.
        copies : list of int
            Destination, source and bytes of each copy, between pinned and device memory.
        jobs : list of tuple
            Of each launch the address of its ids, the first item, and how many.
        on_error : callable
            Receives the first error that kernels find in ids.

        Returns
        -------
        Completion or None
            None where nothing was enqueued: another device's context is current, a capture is in progress on the
            stream, or other memory lies at an address.
        """
        state, program, launches = self.state, self._program, self._launches
        if not state.completions.events and state.owner.context_device() != state.device:
            return None  # ahead of all: an event would be made in the current context
        operation = state.completions.begin(stream)
        try:
            sink = on_error if len(self._used) == 1 else once(on_error)
            tickets = {k: state.status.take(operation, launches[k].plan, 0, sink) for k in self._used}
            words = asked + copies
            for number, (ids, first, count) in zip(self._numbers, jobs, strict=True):
                words += launches[number].job(ids, first, count, tickets[number])
            with self._lock:
                values = program.values
                values[self._stream] = stream
                values[self._event] = operation._event  # type: ignore[assignment]
                values[self._written : self._written + len(words)] = memoryview(array("Q", words))
                operation.enqueued.append(stream)
                operation.recorded = program.run()
            if operation.recorded:
                return operation.commit(refs)
            operation.abandon()
            return None
        except BaseException:
            operation.abort()
            raise
