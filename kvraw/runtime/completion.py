"""What an asynchronous operation borrows lives until an event recorded after it: the queue of one device."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvraw.errors import DriverError, TransferTimeoutError
from kvraw.runtime import fork
from kvraw.runtime.driver import driver, relaxed

__all__ = ["Captured", "Completion", "CompletionQueue", "Operation"]

_log = logging.getLogger("kvraw")

_QUIET = 8  # operations in the queue that are left there by the next call

Callback = Callable[[], Exception | None]


class Completion:
    """One enqueued operation: its event, what must outlive it, and what is to happen once it is over.

    Attributes
    ----------
    error : Exception or None
        What it met, once it is over.
    abandoned : bool
        It failed, and nothing will ever tell whether what was enqueued for it is over.
    handled : bool
        Somebody learns the error; else it is logged.
    uses : numpy.ndarray of uint64, or None
        Addresses of the chunks that it uses, where it is known.
    """

    __slots__ = (
        *(
            "__weakref__",
            "_callbacks",
            "_checks",
            "_event",
            "_pending",
            "_queue",
            "_refs",
            "abandoned",
            "error",
            "handled",
        ),
        *("handled", "stream", "uses"),
    )

    def __init__(self, queue: CompletionQueue, event: int | None, stream: int | None) -> None:
        self.stream = stream
        self.error: Exception | None = None
        self._queue = queue
        self._event = event
        self._pending = self.handled = self.abandoned = False
        self.uses: Any = None
        self._refs: object = None
        self._checks: tuple[Callback, ...] = ()
        self._callbacks: tuple[Callback, ...] = ()

    def __repr__(self) -> str:
        where = "" if self.stream is None else f" on stream {self.stream:#x}"
        begun = f"event {self._event:#x}" if self._event is not None else "not known to be over"
        state = "over" if self._event is None and not self._pending else begun
        return f"transfer{where}, {state}"

    def done(self) -> bool:
        """Whether the operation is over; settles it if so."""
        with relaxed():
            over = self.over()
        self._queue.release_refs()
        return over

    def over(self) -> bool:
        """The same for those who hold a lock: what the operation borrowed is not let go of yet.

        Its end may lead to a finalizer that wants any lock. To be asked within the driver's `relaxed`.
        """
        if self._pending:
            return False
        if self._event is None:
            return True
        with self._queue.lock:
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
        self.handled = True
        event = self._event
        if timeout is not None:
            self._wait_until(time.monotonic() + timeout, timeout)
            return
        if event is None or self.done():
            return
        driver().event_synchronize(event)
        with self._queue.lock:
            if self._event is not None:
                self._finish()
        self._queue.release_refs()

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
        with self._queue.lock:
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
            self._queue.give_event(event)
        self._queue.released.append(self._refs)
        self._refs = None


def _run(callbacks: tuple[Callback, ...]) -> Exception | None:
    error = None
    for one in callbacks:
        error = one() or error
    return error


class Captured(Completion):
    """An operation captured into a graph: it runs at each replay, and what it uses is never used for anything else."""

    __slots__ = ()

    def __init__(
        self, queue: CompletionQueue, refs: object, checks: tuple[Callback, ...], callbacks: tuple[Callback, ...]
    ) -> None:
        super().__init__(queue, None, None)
        self._refs, self._checks, self._callbacks = refs, checks, callbacks  # the last is never called

    def wait(self, timeout: float | None = None) -> None:
        """Take up what replays reported since the last call; waits for nothing."""
        self.error = _run(self._checks)


class Operation(Completion):
    """One operation while it is being enqueued; ends in `commit` or `abort`. It counts as not over before.

    Attributes
    ----------
    stream : int
        The stream that the operation belongs to.
    captured : bool
        It is captured into a graph.
    enqueued : list of int
        Streams that were given work for it.
    recorded : bool
        Its event was recorded behind all of that.
    """

    __slots__ = ("captured", "enqueued", "recorded")

    stream: int

    def __init__(self, queue: CompletionQueue, stream: int, captured: bool) -> None:
        self.stream, self.error = stream, None
        self._queue, self.captured = queue, captured
        if captured:
            self._event = None
        elif queue.events:
            try:
                self._event = queue.events.pop()
            except IndexError:  # another thread took it
                self._event = queue.take_event()
        else:
            self._event = queue.take_event()
        self._pending, self.handled, self.abandoned, self.uses = True, False, False, None
        self._refs, self._checks, self._callbacks = None, (), ()
        self.enqueued: list[int] = []
        self.recorded = False

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
        event = self._queue.take_event()
        self.on_done(functools.partial(self._queue.give_event, event))
        driver().event_record(event, stream)
        driver().stream_wait_event(self.stream, event)

    def commit(self, refs: object) -> Completion:
        """Record the event on the stream behind all that was enqueued, and keep `refs` until it is reached."""
        if self._event is None:
            self._pending = False
            made = Captured(self._queue, refs, self._checks, self._callbacks)
            self._queue.captured.append(made)
            return made
        self.enqueued.append(self.stream)
        try:
            queue = self._queue
            if not self.recorded:
                queue.owner.event_record(self._event, self.stream)
            self._refs = refs
            queue._open.append(self)
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
                self._queue.abandoned.append((callbacks, refs))  # never used again: work may still hold it
            # What is lost counts as under way for ever: so does the memory that it borrowed.
            self._event, self._checks, self._callbacks, self._refs, self._pending = None, (), (), None, not over
            self.abandoned = not over
        if over:
            if event is not None:
                self._queue.give_event(event)
            _run(callbacks)


class CompletionQueue:
    """Operations of one device that are not known to be over, and events to be used again.

    Attributes
    ----------
    events : list of int
        Events that nobody uses; while there is one, an operation can begin without the device's context.
    """

    def __init__(self) -> None:
        self.owner = driver()
        self.lock = fork.lock()
        self._open: deque[Completion] = deque()
        self.events: list[int] = []
        self._begun = 0
        self.abandoned: list[object] = []
        self.captured: list[Captured] = []  # for good: nothing tells when the graphs are gone that replay them
        self.released: deque[object] = deque()  # what operations that are over borrowed, to be let go of without a lock

    def __len__(self) -> int:
        return len(self._open)

    def take_event(self) -> int:
        """An event that nobody uses. The device's context is current."""
        try:
            return self.events.pop()
        except IndexError:
            return driver().event_create()

    def give_event(self, event: int) -> Exception | None:
        """Take an event back."""
        self.events.append(event)
        return None

    def begin(self, stream: int, *, captured: bool = False) -> Operation:
        """Begin an operation on a stream, and settle old ones that are over. The device's context is current.

        Asking whether an event was reached costs half a launch, so a few operations are left in the queue for a while;
        and a capture that is in progress on the stream has no time for it.
        """
        self._begun += 1
        if not captured and (len(self._open) >= 2 * _QUIET or not self._begun % (2 * _QUIET)):
            self.reap()
        if self.released and not captured:
            self.release_refs()
        return Operation(self, stream, captured)

    def release_refs(self) -> None:
        """Let go of what operations that are over borrowed. The caller holds no lock."""
        while self.released:
            try:
                self.released.popleft()
            except IndexError:  # another thread took it
                return

    def fail_all(self, error: Exception) -> None:
        """End every operation with an error: the context, with all its events and work, is gone."""
        with self.lock:
            lost, self._open = list(self._open), deque()
            self.events.clear()
            for one in lost:
                one.error = one.error or error
                one._event, one._checks, one._callbacks, one._pending = None, (), (), False
                self.released.append(one._refs)
                one._refs = None
        self.release_refs()

    def reap(self, limit: int = 2 * _QUIET) -> None:
        """Settle old operations that are over, without waiting; an error nobody waits for is logged.

        One that is not over goes to the back, so that a stream that stands still does not hold up the others.
        """
        met: list[Exception] = []  # told outside the lock: whoever logs holds locks of his own
        # `drain` must not miss what is off the queue for a moment.
        with self.lock, self.owner.relaxed():
            while self._open and limit:
                limit -= 1
                oldest = self._open[0]
                over = oldest.over()
                # A finalizer may have settled operations in the meantime, in this very thread.
                if not self._open or self._open[0] is not oldest:
                    continue
                if not over:
                    self._open.rotate(-1)
                    break
                self._open.popleft()
                if oldest.error is not None and not oldest.handled:
                    met.append(oldest.error)
        for error in met:
            _log.error("%s", error)

    def drain(self) -> None:
        """Wait for every operation in the queue."""
        while True:
            with self.lock:
                # A copy: other threads commit without the lock.
                oldest = next((one for one in list(self._open) if not one._pending), None)
            if oldest is None:
                return
            handled = oldest.handled
            oldest.wait()
            oldest.handled = handled
            try:
                with self.lock:
                    self._open.remove(oldest)
            except ValueError:  # another thread took it
                continue
            if oldest.error is not None and not handled:
                _log.error("%s", oldest.error)
