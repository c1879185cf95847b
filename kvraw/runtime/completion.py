"""What an asynchronous operation borrows lives until an event recorded after it: the books of one device."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvraw.errors import BoundsError, DriverError, TransferTimeoutError
from kvraw.runtime import fork
from kvraw.runtime.driver import driver, relaxed

__all__ = ["Captured", "Completion", "CompletionQueue", "Operation"]

_log = logging.getLogger("kvraw")

_QUIET = 8  # operations on the books that are left there by the next call

Settle = Callable[[], Exception | None]


class Runs(Protocol):
    """A program of driver commands, as far as an operation knows it."""

    def run(self, *ids: Any) -> bool:
        """Carry it out; False where it enqueued nothing."""


class Completion:
    """One enqueued operation: its event, what must outlive it, and what is to happen once it is over.

    Attributes
    ----------
    error : Exception or None
        What it met, once it is over.
    lost : bool
        It failed, and nothing will ever tell whether what was enqueued for it is over.
    told : bool
        Somebody learns the error; else it is logged.
    uses : numpy.ndarray of uint64, or None
        Addresses of the chunks that it uses, where it is known.
    """

    __slots__ = (
        *("__weakref__", "_books", "_event", "_pending", "_refs", "_reports", "_settle", "error", "lost", "on_error"),
        *("stream", "uses"),
    )

    def __init__(self, books: CompletionQueue, event: int | None, stream: int | None) -> None:
        self.stream = stream
        self.error: Exception | None = None
        self._books = books
        self._event = event
        self._pending = self.on_error = self.lost = False
        self.uses: Any = None
        self._refs: object = None
        self._reports: tuple[Settle, ...] = ()
        self._settle: tuple[Settle, ...] = ()

    def __repr__(self) -> str:
        where = "" if self.stream is None else f" on stream {self.stream:#x}"
        begun = f"event {self._event:#x}" if self._event is not None else "not known to be over"
        state = "over" if self._event is None and not self._pending else begun
        return f"transfer{where}, {state}"

    def done(self) -> bool:
        """Whether the operation is over; settles it if so."""
        with relaxed():
            over = self.over()
        self._books.let_go()
        return over

    def over(self) -> bool:
        """The same for those who hold a lock: what the operation borrowed is not let go of yet.

        Its end may lead to a finalizer that wants any lock. To be asked within the driver's `relaxed`.
        """
        if self._pending:
            return False
        if self._event is None:
            return True
        with self._books.settle_lock:
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
        self.on_error = True
        event = self._event
        if timeout is not None:
            self._wait_until(time.monotonic() + timeout, timeout)
            return
        if event is None or self.done():
            return
        driver().event_synchronize(event)
        with self._books.settle_lock:
            if self._event is not None:
                self._finish()
        self._books.let_go()

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
        with self._books.settle_lock:
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
            reports, self._reports = self._reports, ()
            settle, self._settle = self._settle, ()
            # The error is there before the event is gone: whoever finds no event looks for it.
            self.error = _run(reports) or self.error
            self.error = _run(settle) or self.error
            event, self._event = self._event, None
        finally:
            self._pending = False
        if event is not None:
            self._books.give_event(event)
        self._books.dead.append(self._refs)
        self._refs = None


def _run(settle: tuple[Settle, ...]) -> Exception | None:
    error = None
    for one in settle:
        error = one() or error
    return error


class Captured(Completion):
    """An operation captured into a graph: it runs at each replay, and what it uses is never used for anything else."""

    __slots__ = ()

    def __init__(
        self, books: CompletionQueue, refs: object, reports: tuple[Settle, ...], settle: tuple[Settle, ...]
    ) -> None:
        super().__init__(books, None, None)
        self._refs, self._reports, self._settle = refs, reports, settle  # the last is never called

    def wait(self, timeout: float | None = None) -> None:
        """Take up what replays reported since the last call; waits for nothing."""
        self.error = _run(self._reports)


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

    def __init__(self, books: CompletionQueue, stream: int, captured: bool) -> None:
        self.stream, self.error = stream, None
        self._books, self.captured = books, captured
        if captured:
            self._event = None
        elif books.events:
            try:
                self._event = books.events.pop()
            except IndexError:  # another thread took it
                self._event = books.take_event()
        else:
            self._event = books.take_event()
        self._pending, self.on_error, self.lost, self.uses = True, False, False, None
        self._refs, self._reports, self._settle = None, (), ()
        self.enqueued: list[int] = []
        self.recorded = False

    @property
    def event(self) -> int | None:
        """The event to be recorded; None where it is captured."""
        return self._event

    def report(self, report: Settle) -> None:
        """Call this once the operation is over; what it returns is the operation's error."""
        self._reports += (report,)

    def then(self, settle: Settle) -> None:
        """Call this once the operation is over, after all reports."""
        self._settle += (settle,)

    def follow(self, stream: int) -> None:
        """Make the operation's stream wait for what another stream was given so far."""
        event = self._books.take_event()
        self.then(functools.partial(self._books.give_event, event))
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

    def run_whole(self, program: Runs, refs: object) -> Completion | None:
        """`run` and `commit` for a program without ids; where it enqueued nothing, `abort` and None."""
        self.enqueued.append(self.stream)
        self.recorded = program.run()
        if self.recorded:
            return self.commit(refs)
        self.enqueued.clear()
        self.abort()
        return None

    def commit(self, refs: object) -> Completion:
        """Record the event on the stream behind all that was enqueued, and keep `refs` until it is reached."""
        if self._event is None:
            self._pending = False
            made = Captured(self._books, refs, self._reports, self._settle)
            self._books.captured.append(made)
            return made
        self.enqueued.append(self.stream)
        try:
            books = self._books
            if not self.recorded:
                books.owner.event_record(self._event, self.stream)
            self._refs = refs
            books._open.append(self)
        except BaseException:
            self.abort()
            raise
        self._pending = False
        return self

    def abort(self) -> None:
        """Give everything back after a failure; waits where work was enqueued, since nothing else tells its end."""
        if not self._pending:
            return
        settle, event, refs, over = self._reports + self._settle, self._event, self._refs, False
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
                self._books.lost.append((settle, refs))  # never used again: work may still hold it
            # What is lost counts as under way for ever: so does the memory that it borrowed.
            self._event, self._reports, self._settle, self._refs, self._pending = None, (), (), None, not over
            self.lost = not over
        if over:
            if event is not None:
                self._books.give_event(event)
            _run(settle)


class CompletionQueue:
    """Operations of one device that are not known to be over, and events to be used again.

    Attributes
    ----------
    events : list of int
        Events that nobody uses; while there is one, an operation can begin without the device's context.
    """

    def __init__(self) -> None:
        self.owner = driver()
        self.settle_lock = fork.lock()
        self._open: deque[Completion] = deque()
        self.events: list[int] = []
        self._begun = 0
        self.lost: list[object] = []
        self.captured: list[Captured] = []  # for good: nothing tells when the graphs are gone that replay them
        self.dead: deque[object] = deque()  # what operations that are over borrowed, to be let go of without a lock

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

        Asking whether an event was reached costs half a launch, so a few operations are left on the books for a while;
        and a capture that is in progress on the stream has no time for it.
        """
        self._begun += 1
        if not captured and (len(self._open) >= 2 * _QUIET or not self._begun % (2 * _QUIET)):
            self.reap()
        if self.dead and not captured:
            self.let_go()
        return Operation(self, stream, captured)

    def let_go(self) -> None:
        """Let go of what operations that are over borrowed. The caller holds no lock."""
        while self.dead:
            try:
                self.dead.popleft()
            except IndexError:  # another thread took it
                return

    def lose(self, error: Exception) -> None:
        """End every operation with an error: the context, with all its events and work, is gone."""
        with self.settle_lock:
            lost, self._open = list(self._open), deque()
            self.events.clear()
            for one in lost:
                one.error = one.error or error
                one._event, one._reports, one._settle, one._pending = None, (), (), False
                self.dead.append(one._refs)
                one._refs = None
        self.let_go()

    def reap(self, limit: int = 2 * _QUIET) -> None:
        """Settle old operations that are over, without waiting; an error nobody waits for is logged.

        One that is not over goes to the back, so that a stream that stands still does not hold up the others' books.
        """
        met: list[Exception] = []  # told outside the lock: whoever logs holds locks of his own
        # `drain` must not miss what is off the books for a moment.
        with self.settle_lock, self.owner.relaxed():
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
                if oldest.error is not None and not oldest.on_error:
                    met.append(oldest.error)
        for error in met:
            _log.error("%s", error)

    def drain(self) -> None:
        """Wait for every operation on the books."""
        while True:
            with self.settle_lock:
                # A copy: other threads commit without the lock.
                oldest = next((one for one in list(self._open) if not one._pending), None)
            if oldest is None:
                return
            on_error = oldest.on_error
            oldest.wait()
            oldest.on_error = on_error
            try:
                with self.settle_lock:
                    self._open.remove(oldest)
            except ValueError:  # another thread took it
                continue
            if oldest.error is not None and not on_error:
                _log.error("%s", oldest.error)
