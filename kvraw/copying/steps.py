"""Copies and launches in an order, bound: a call writes addresses and counts, and is one compiled function."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from kvraw.copying.device_state import DeviceState
from kvraw.copying.indexed import IndexedLaunch
from kvraw.copying.status_words import once
from kvraw.runtime import fork
from kvraw.runtime.completion import Completion
from kvraw.runtime.program import Commands, Program, Value

__all__ = ["BoundSteps"]


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
        told : callable
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
            operation.enqueued.clear()
        except BaseException:
            operation.abort()
            raise
        operation.abort()
        return None
