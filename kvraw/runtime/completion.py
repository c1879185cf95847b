"""What an asynchronous operation borrows lives until an event recorded after it: the queue of one device."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvraw.errors import BoundsError, DriverError, TransferTimeoutError
from kvraw.runtime import fork
from kvraw.runtime.driver import driver, relaxed

__all__ = ["Completion", "CompletionQueue", "Operation"]

_log = logging.getLogger("kvraw")

_EVERY = 16  # operations begun between two looks at what is over
_PER_THREAD = 2  # CU_STREAM_PER_THREAD: another stream in each thread

Callback = Callable[[], Exception | None]


class Runs(Protocol):
    """A program of driver commands, as far as an operation knows it."""

    def run(self, *ids: Any) -> bool:
        """Carry it out; False where it enqueued nothing."""


class Completion:
    """One enqueued operation: its event, what must outlive it, and what is to happen once it is over.

    Attributes
    ----------
    stream : int
        The stream that it belongs to.
    captured : bool
        It was captured into a graph: it runs at each replay, and what it uses is never used for anything else.
    queue : CompletionQueue
        That of its device.
    error : Exception or None
        What it met, once it is over.
    handled : bool
        Somebody learns the error; else it is logged.
    uses : numpy.ndarray of uint64, or None
        Addresses of the chunks that it uses, where it is known.
    """

    __slots__ = (
        *("__weakref__", "_callbacks", "_checks", "_event", "_pending", "_refs", "captured", "ended", "error"),
        *("handled", "queue", "stream", "uses"),
    )

    stream: int
    captured: bool
    ended: int  # of the same numbers as `Operation.begun`, once its event was recorded
    queue: CompletionQueue
    error: Exception | None
    uses: Any
    _event: int | None
    _pending: bool
    _refs: object
    _checks: tuple[Callback, ...]
    _callbacks: tuple[Callback, ...]

    def __repr__(self) -> str:
        event = f"event {self._event:#x}" if self._event is not None else "not known to be over"
        return f"transfer on stream {self.stream:#x}, {'over' if self.finished else event}"

    @property
    def finished(self) -> bool:
        """Whether it is known to be over; asks nobody. False for ever where the driver cannot tell any more."""
        return self._event is None and not self._pending

    def done(self) -> bool:
        """Whether the operation is over; finishes it if so."""
        with relaxed():
            over = self.over()
        self.queue.release_refs()
        return over

    def over(self) -> bool:
        """The same for those who hold a lock: what the operation borrowed is not dropped yet.

        Its end may lead to a finalizer that wants any lock. To be asked within the driver's `relaxed`.
        """
        if self._pending:
            return False
        if self._event is None:
            return True
        with self.queue.lock:
            if self._event is not None:
                if not driver().event_done(self._event):
                    return False
                self._finish()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Wait on the host until the operation is over, with the GIL released; kept where it is over already.

        Raises
        ------
        TransferTimeoutError
            It is not after `timeout` seconds; it goes on.
        """
        if self.captured:  # what replays reported since the last call; waits for nothing
            self.error = _run(self._checks)
            return
        self.handled = True
        event = self._event
        if timeout is not None:
            self._wait_until(time.monotonic() + timeout, timeout)
            return
        if event is None or self.done():
            return
        driver().event_synchronize(event)
        with self.queue.lock:
            if self._event is not None:
                self._finish()
        self.queue.release_refs()

    def _wait_until(self, deadline: float, timeout: float) -> None:
        pause = 20e-6
        while not self.done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeoutError(f"{self!r}: not after {timeout} s")
            time.sleep(min(pause, left))
            pause = min(pause * 2, 1e-3)

    def wait_on(self, stream: int) -> None:
        """Make a stream of the same device wait until the operation is over."""
        with self.queue.lock:
            if self._event is not None:
                driver().stream_wait_event(stream, self._event)

    def hold(self, stream: int) -> None:
        """The same for who hands the operation out only then: where it fails, nothing is under way any more."""
        try:
            self.wait_on(stream)
        except BaseException:
            self.wait()
            raise

    def _finish(self) -> None:
        if self._pending:  # a finalizer came back here, in this very thread
            return
        self._pending = True
        try:
            checks, self._checks = self._checks, ()
            callbacks, self._callbacks = self._callbacks, ()
            # The error is there before the event is gone: whoever finds no event looks for it.
            self.error = _run(checks) or self.error
            self.error = _run(callbacks) or self.error
            event, self._event = self._event, None
        finally:
            self._pending = False
        if event is not None:
            self.queue.give_event(event)
        self.queue.released.append(self._refs)
        self._refs = None


def _run(callbacks: tuple[Callback, ...]) -> Exception | None:
    error = None
    for one in callbacks:
        error = one() or error
    return error


class Operation(Completion):
    """One operation while it is being enqueued; ends in `commit` or `abort`. It counts as not over before.

    Attributes
    ----------
    enqueued : list of int
        Streams that were given work for it.
    recorded : bool
        Its event was recorded behind all of that.
    begun : int
        A number that is larger than `ended` of all operations whose events were recorded before.
    """

    __slots__ = ("begun", "enqueued", "recorded")

    def __init__(self, queue: CompletionQueue, stream: int, captured: bool) -> None:
        self.begun = next(queue.numbers)
        self.stream, self.captured, self.queue, self.error, self.uses = stream, captured, queue, None, None
        self._event = None
        if not captured:
            try:
                self._event = queue.events.pop()
            except IndexError:
                self._event = queue.take_event()
        self._pending, self.handled, self.recorded = True, False, False
        self._refs, self._checks, self._callbacks = None, (), ()
        self.enqueued: list[int] = []

    @property
    def event(self) -> int | None:
        """The event to be recorded; None where it is captured."""
        return self._event

    def add_check(self, report: Callback) -> None:
        """Call this once the operation is over; what it returns is the operation's error."""
        self._checks += (report,)

    def on_done(self, callbacks: Callback) -> None:
        """Call this once the operation is over, after all reports."""
        self._callbacks += (callbacks,)

    def follow(self, stream: int) -> None:
        """Make the operation's stream wait for what another stream was given so far."""
        event = self.queue.take_event()
        self.on_done(functools.partial(self.queue.give_event, event))
        driver().event_record(event, stream)
        driver().stream_wait_event(self.stream, event)

    def run(self, program: Runs, *ids: Any, streams: Sequence[int] = ()) -> bool:
        """Have a program enqueue all of it, the event as well; False where it enqueued nothing.

        `ids` are what the program is run with; it enqueues on `streams` beside the operation's own.

        Raises
        ------
        BoundsError
            An id is bad; nothing was enqueued.
        DriverError
            A driver call failed; what came before it was enqueued.
        """
        enqueued = self.enqueued
        before = len(enqueued)
        enqueued.append(self.stream)
        enqueued += streams
        try:
            done = self.recorded = program.run(*ids)
        except BoundsError:
            del enqueued[before:]
            raise
        if not done:
            del enqueued[before:]
        return done

    def abandon(self) -> None:
        """`abort` where a program enqueued nothing."""
        self.enqueued.clear()
        self.abort()

    def commit(self, refs: object) -> Completion:
        """Record the event on the stream behind all that was enqueued, and keep `refs` until it is reached."""
        queue, self._refs = self.queue, refs
        if self._event is None:
            self._pending = False
            queue.captured.append(self)
            return self
        self.enqueued.append(self.stream)
        try:
            if not self.recorded:
                queue.owner.event_record(self._event, self.stream)
            self.ended = next(queue.numbers)
            stream = self.stream if self.stream != _PER_THREAD else -threading.get_ident()
            behind = queue.streams.get(stream)
            if behind is None:
                behind = queue.streams.setdefault(stream, deque())
            behind.append(self)
        except BaseException:
            self.abort()
            raise
        self._pending = False
        return self

    def abort(self) -> None:
        """Give everything back after a failure; waits where work was enqueued, since nothing else tells its end."""
        if not self._pending:
            return
        callbacks, event, refs, over = self._checks + self._callbacks, self._event, self._refs, False
        try:
            if self.captured and self.enqueued:
                raise DriverError("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 900, "cuStreamSynchronize")
            for stream in set(self.enqueued):
                driver().stream_synchronize(stream)
            over = True
        except DriverError:
            pass
        finally:
            if not over:
                self.queue.abandoned.append((callbacks, refs))  # never used again: work may still hold it
            # What is lost counts as under way for ever: so does the memory that it borrowed.
            self._event, self._checks, self._callbacks, self._refs, self._pending = None, (), (), None, not over
        if over:
            if event is not None:
                self.queue.give_event(event)
            _run(callbacks)


class CompletionQueue:
    """Operations of one device that are not known to be over, and events to be used again.

    Attributes
    ----------
    streams : dict of int to deque
        The operations by stream. `commit` appends, which takes no lock; operations are taken off with it.
    events : list of int
        Events that nobody uses; while there is one, an operation can begin without the device's context.
    """

    def __init__(self) -> None:
        self.owner = driver()
        self.lock = fork.lock()
        # In order: where the front is under way, so is what is behind it.
        self.streams: dict[int, deque[Operation]] = {}
        self.numbers = itertools.count()
        self.events: list[int] = []
        self.fences: dict[int, int] = {}  # events behind what is no operation, by stream
        self._begun = 0
        self.abandoned: list[object] = []
        self.captured: list[Completion] = []  # for good: nothing tells when the graphs are gone that replay them
        self.released: deque[object] = deque()  # what finished operations borrowed, to be dropped without a lock
        self._errors: deque[Exception] = deque()  # to be logged without a lock: whoever logs holds locks of his own

    def __len__(self) -> int:
        return sum(map(len, list(self.streams.values())))

    def take_event(self) -> int:
        """An event that nobody uses. The device's context is current, unless there is one in `events`."""
        try:
            return self.events.pop()
        except IndexError:
            return driver().event_create()

    def give_event(self, event: int) -> Exception | None:
        """Take an event back."""
        self.events.append(event)
        return None

    def begin(self, stream: int, *, captured: bool = False) -> Operation:
        """Begin an operation on a stream, and finish old ones that are over. The device's context is current.

        Asking whether an event was reached costs half a launch, so a few operations are left in the queue for a while;
        and a capture that is in progress on the stream has no time for it.
        """
        if not captured:
            self._begun += 1
            if not self._begun % _EVERY:
                self.reap()
            elif self.released:
                self.release_refs()
        return Operation(self, stream, captured)

    def fence(self, stream: int) -> None:
        """Have `drain` wait for what a stream was given so far by calls that are no operations."""
        event = self.fences.get(stream)
        if event is None:
            event = self.fences[stream] = self.take_event()
        self.owner.event_record(event, stream)

    def release_refs(self) -> None:
        """Drop what finished operations borrowed, and log errors that nobody waits for. The caller holds no lock."""
        with contextlib.suppress(IndexError):  # another thread took it
            while self.released:
                self.released.popleft()
        with contextlib.suppress(IndexError):
            while self._errors:
                _log.error("%s", self._errors.popleft())

    def fail_all(self, error: Exception) -> None:
        """End every operation with an error: the context, with all its events and work, is gone."""
        with self.lock:
            failed = [one for queue in self.streams.values() for one in queue]
            self.streams.clear()
            self.events.clear()
            self.fences.clear()
            for one in failed:
                one.error = one.error or error
                one._event, one._checks, one._callbacks, one._pending = None, (), (), False
                self.released.append(one._refs)
                one._refs = None
        self.release_refs()

    def poll(self) -> DriverError | None:
        """Finish operations that are over, without waiting; for those who hold a lock. The driver's error."""
        failed: DriverError | None = None
        with self.lock, self.owner.relaxed():
            for stream, queue in list(self.streams.items()):
                try:
                    self._finish_together(stream, queue)
                    while queue and (first := queue[0]).over():
                        self._remove(queue, first)
                except DriverError as error:
                    failed = failed or error
        return failed

    def _finish_together(self, stream: int, queue: deque[Operation]) -> None:
        """Finish all operations of a stream that ended before its newest began, where this is over: one question.

        What another thread enqueued meanwhile may be behind it in the stream, whichever was committed first. Not those
        of default streams: other contexts of the device have such as well, and ended threads had.
        """
        known = list(queue)
        newest = known[-1] if len(known) > 2 and stream > _PER_THREAD else None
        if newest is None or (event := newest._event) is None or not self.owner.event_done(event):
            return
        for one in known:
            if (one.ended < newest.begun or one is newest) and one._event is not None and not one._pending:
                one._finish()
                self._remove(queue, one)

    def _remove(self, queue: deque[Operation], one: Operation) -> None:
        try:
            queue.remove(one)
        except ValueError:  # another thread, or a finalizer in the midst of this one, did
            return
        if one.error is not None and not one.handled:
            self._errors.append(one.error)

    def reap(self) -> None:
        """Finish operations that are over, without waiting; an error that nobody waits for is logged."""
        failed = self.poll()
        self.release_refs()
        if failed is not None:
            raise failed

    def drain(self) -> None:
        """Wait for every operation in the queue, and for what `fence` was called behind."""
        while True:
            with self.lock:
                queues = list(self.streams.values())
                found = next(((queue, one) for queue in queues for one in list(queue) if not one._pending), None)
            if found is None:
                break
            queue, oldest = found
            handled = oldest.handled
            oldest.wait()
            oldest.handled = handled
            with self.lock:
                self._remove(queue, oldest)
        for event in list(self.fences.values()):
            self.owner.event_synchronize(event)
        self.release_refs()
