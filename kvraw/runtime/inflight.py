"""What an asynchronous operation borrows lives until an event recorded after it: the books of one device."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from kvraw.errors import DriverError
from kvraw.runtime.driver import driver

__all__ = ["Completion", "InFlight", "Operation"]

_log = logging.getLogger("kvraw")

Settle = Callable[[], Exception | None]


class Completion:
    """One enqueued operation: its event, what must outlive it, and what is to happen once it is over."""

    __slots__ = ("__weakref__", "_books", "_event", "_lock", "_refs", "_settle", "error")

    def __init__(self, books: InFlight, event: int, refs: object, settle: list[Settle]) -> None:
        self._books = books
        self._event: int | None = event
        self._refs: object = refs
        self._settle = settle
        self._lock = books.settle_lock
        self.error: Exception | None = None

    def done(self) -> bool:
        """Whether the operation is over; settles it if so."""
        if self._event is None:
            return True
        with self._lock:
            if self._event is not None:
                if not driver().event_done(self._event):
                    return False
                self._finish()
        return True

    def wait(self) -> None:
        """Wait on the host until the operation is over, with the GIL released."""
        event = self._event
        if event is None:
            return
        driver().event_synchronize(event)
        with self._lock:
            if self._event is not None:
                self._finish()

    def _finish(self) -> None:
        event, self._event = self._event, None
        assert event is not None
        self._refs = None
        for settle in self._settle:
            self.error = settle() or self.error
        self._settle = []
        self._books.retire(self, event)


class Operation:
    """One operation while it is being enqueued; ends in `commit` or `abort`.

    Attributes
    ----------
    stream : int
        The stream that the operation belongs to.
    enqueued : list of int
        Streams that were given work for it.
    """

    __slots__ = ("_books", "_event", "_settle", "enqueued", "stream")

    def __init__(self, books: InFlight, stream: int) -> None:
        self._books, self.stream = books, stream
        self._event = books.take_event()
        self._settle: list[Settle] = []
        self.enqueued: list[int] = []

    def then(self, settle: Settle) -> None:
        """Call this once the operation is over; what it returns is the operation's error."""
        self._settle.append(settle)

    def commit(self, refs: object) -> Completion:
        """Record an event on the stream behind all that was enqueued, and keep `refs` until it is reached."""
        try:
            driver().event_record(self._event, self.stream)
        except BaseException:
            self.enqueued.append(self.stream)
            self.abort()
            raise
        completion = Completion(self._books, self._event, refs, self._settle)
        self._books.admit(completion)
        return completion

    def abort(self) -> None:
        """Give everything back after a failure; waits where work was enqueued, since nothing else tells its end."""
        try:
            for stream in set(self.enqueued):
                driver().stream_synchronize(stream)
        except DriverError:
            self._books.lost.append(self._settle)  # never used again: work may still hold it
            return
        self._books.give_event(self._event)
        for settle in self._settle:
            settle()


class InFlight:
    """Operations of one device that are not known to be over, and events to be used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.settle_lock = threading.RLock()
        self._open: dict[int, Completion] = {}
        self._events: list[int] = []
        self.lost: list[object] = []

    def __len__(self) -> int:
        return len(self._open)

    def take_event(self) -> int:
        """An event that nobody uses. The device's context is current."""
        with contextlib.suppress(IndexError):
            return self._events.pop()
        return driver().event_create()

    def give_event(self, event: int) -> None:
        """Take an event back."""
        self._events.append(event)

    def begin(self, stream: int) -> Operation:
        """Begin an operation on a stream, and settle old ones that are over. The device's context is current."""
        self.reap()
        return Operation(self, stream)

    def admit(self, completion: Completion) -> None:
        """Put an operation on the books."""
        self._open[id(completion)] = completion

    def retire(self, completion: Completion, event: int) -> None:
        """Take an operation that is over off the books."""
        self._open.pop(id(completion), None)
        self._events.append(event)

    def _oldest(self) -> Completion | None:
        with self._lock:
            return next(iter(self._open.values()), None)

    def reap(self, limit: int = 4) -> None:
        """Settle the oldest operations that are over, without waiting; an error nobody waits for is logged."""
        while self._open and limit:
            oldest = self._oldest()
            if oldest is None or not oldest.done():
                return
            if oldest.error is not None:
                _log.error("%s", oldest.error)
            limit -= 1

    def drain(self) -> None:
        """Wait for every operation on the books."""
        while (oldest := self._oldest()) is not None:
            oldest.wait()
