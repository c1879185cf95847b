"""Which transfers use a piece of memory, in the order they were enqueued."""

from __future__ import annotations

import threading
import time
from collections import deque

from kvraw.errors import DriverError, TransferTimeoutError
from kvraw.runtime.driver import relaxed
from kvraw.runtime.inflight import Completion

__all__ = ["InUse", "Running"]


class Running:
    """A thread's own work on memory, for `InUse.borrow`: over once `end` was called."""

    __slots__ = ("_over", "_thread")

    def __init__(self) -> None:
        self._over, self._thread = False, threading.current_thread().name

    def __repr__(self) -> str:
        return f"a transfer of thread {self._thread}"

    def end(self) -> None:
        """The work is over."""
        self._over = True

    def over(self) -> bool:
        """Whether it is."""
        return self._over

    done = over


class InUse:
    """Base of what transfers use: it knows those that may be under way, and waits for them."""

    def __init__(self) -> None:
        # Re-entrant: a transfer that is found to be over lets go of its arguments, whose end may lead back here.
        self._lock = threading.RLock()
        self._busy: deque[tuple[int, Completion | Running]] = deque()  # the front is not known to be over
        self._sequence = 0

    def borrow(self, completion: Completion | Running) -> None:
        """Note an operation that uses this memory; `close`, and the reuse of what is freed later, wait for it.

        To be called ahead of the enqueueing: memory that another thread frees meanwhile is then not handed out again.
        """
        with self._lock:
            self._sequence += 1
            self._busy.append((self._sequence, completion))
            if len(self._busy) % 64 == 0:
                self._settle()

    def _on_devices(self) -> list[tuple[int, Completion | Running]]:
        """What may be under way and is not the work of a thread."""
        return [one for one in self._busy if type(one[1]) is not Running]

    def _settle(self) -> None:
        """Forget the operations at the front that are over. The lock is held.

        Where the driver does not tell, they count as under way: whoever waits for them learns the error.
        """
        if not self._busy:
            return
        try:
            with relaxed():
                self._forget()
        except DriverError:
            return

    def _forget(self) -> None:
        while self._busy:
            first = self._busy[0]
            if not first[1].over():
                return
            # A finalizer may have come here in the meantime, in this very thread.
            if self._busy and self._busy[0] is first:
                self._busy.popleft()

    def _wait_idle(self, timeout: float | None, what: str) -> None:
        """Wait until nothing is under way, with the GIL released."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 20e-6
        while True:
            with self._lock:
                if self._busy:
                    with relaxed():
                        self._forget()
                left = [completion for _, completion in self._busy]
            if not left:
                return
            if deadline is not None and time.monotonic() >= deadline:
                names = [repr(completion) for completion in left if not completion.done()]
                if not names:
                    continue
                more = f" and {len(names) - 8} more" if len(names) > 8 else ""
                raise TransferTimeoutError(f"{what} is still used after {timeout} s by {', '.join(names[:8])}{more}")
            time.sleep(pause)
            pause = min(pause * 2, 1e-3)
