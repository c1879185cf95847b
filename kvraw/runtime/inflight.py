"""What an asynchronous operation borrows lives until an event recorded after it: the books of one device."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvraw.runtime.driver import driver

__all__ = ["Completion", "InFlight"]

_log = logging.getLogger("kvraw")


class Completion:
    """One enqueued operation: its event, what must outlive it, and what is to happen once it is over."""

    __slots__ = ("_books", "_event", "_lock", "_refs", "_settle", "error", "stream")

    def __init__(
        self,
        books: InFlight,
        event: int,
        refs: tuple[object, ...],
        settle: Callable[[], Exception | None] | None = None,
        stream: int | None = None,
    ):
        self.stream = stream
        self._books = books
        self._event: int | None = event
        self._refs = refs
        self._settle = settle
        self._lock = threading.Lock()
        self.error: Exception | None = None

    def __repr__(self) -> str:
        where = "" if self.stream is None else f" on stream {self.stream:#x}"
        return f"transfer{where}, " + ("over" if self._event is None else f"event {self._event:#x}")

    def done(self) -> bool:
        """Whether the operation is over; settles it if so."""
        event = self._event
        if event is None:
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
        assert self._event is not None
        event, self._event = self._event, None
        self._refs = ()
        if self._settle is not None:
            self.error, self._settle = self._settle(), None
        self._books.retire(self, event)


class InFlight:
    """Operations of one device that are not known to be over, and events to be used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Completion] = {}
        self._events: list[int] = []

    def __len__(self) -> int:
        return len(self._open)

    def take_event(self) -> int:
        """An event for `open`, taken before the operation is enqueued. The device's context is current."""
        with self._lock:
            if self._events:
                return self._events.pop()
        return driver().event_create()

    def give_event(self, event: int) -> None:
        """Take an event back that was not recorded after all."""
        with self._lock:
            self._events.append(event)

    def open(
        self,
        event: int,
        stream: int,
        refs: tuple[object, ...],
        settle: Callable[[], Exception | None] | None = None,
    ) -> Completion:
        """Record an event on a stream behind an operation, and keep `refs` until it is reached.

        `settle` runs once, when the operation is over.
        """
        try:
            driver().event_record(event, stream)
        except BaseException:
            # Nothing will tell when the operation is over, and what it uses must not go before that.
            driver().stream_synchronize(stream)
            self.give_event(event)
            if settle is not None:
                settle()
            raise
        completion = Completion(self, event, refs, settle, stream)
        with self._lock:
            self._open[id(completion)] = completion
        return completion

    def retire(self, completion: Completion, event: int) -> None:
        """Take an operation that is over off the books."""
        with self._lock:
            self._open.pop(id(completion), None)
            self._events.append(event)

    def reap(self, limit: int = 4) -> None:
        """Settle the oldest operations that are over, without waiting; an error nobody waits for is logged."""
        for _ in range(limit):
            with self._lock:
                oldest = next(iter(self._open.values()), None)
            if oldest is None or not oldest.done():
                return
            if oldest.error is not None:
                _log.error("%s", oldest.error)

    def drain(self) -> None:
        """Wait for every operation on the books."""
        while True:
            with self._lock:
                oldest = next(iter(self._open.values()), None)
            if oldest is None:
                return
            oldest.wait()
