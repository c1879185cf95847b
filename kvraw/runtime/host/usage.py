"""Which transfers use a piece of memory, and which parts of it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from kvraw.errors import DriverError, TransferTimeoutError
from kvraw.runtime import fork
from kvraw.runtime.completion import Completion

__all__ = ["HostUse", "HostWork", "Use", "UseTracker"]

_MOST = 64  # uses that are kept before those that are over are looked for


class HostUse:
    """A thread's own use of memory, as a pool keeps it.

    Attributes
    ----------
    uses : numpy.ndarray of uint64, optional
        Addresses of the chunks that it uses; None: all of the memory.
    """

    __slots__ = ("_thread", "_work", "queue", "uses")

    def __init__(self, work: HostWork) -> None:
        self._work: Callable[[], HostWork | None] = weakref.ref(work)
        self._thread, self.queue, self.uses = threading.current_thread().name, None, None

    def __repr__(self) -> str:
        return f"a transfer of thread {self._thread}"

    @property
    def finished(self) -> bool:
        """Whether it is over."""
        work = self._work()
        return work is None or work.ended

    def end(self) -> None:
        """It is over, whoever still has the work."""
        self._work = lambda: None


class HostWork:
    """Work of the calling thread; over at the latest when its frame is gone, whatever came between.

    Attributes
    ----------
    ended : bool
        To be set when it is over; no call, which an interrupt could come before.
    use : HostUse
        What is noted with the memory.
    """

    __slots__ = ("__weakref__", "ended", "use")

    def __init__(self) -> None:
        self.ended, self.use = False, HostUse(self)


Use = Completion | HostUse


class UseTracker:
    """Base of what transfers use: it knows those that may be under way, and waits for them."""

    def __init__(self) -> None:
        # Re-entrant: a transfer that is found to be over lets go of its arguments, whose end may lead back here.
        self._lock = fork.lock()
        # What may be under way, each with what was freed and may be handed out again only once it is over.
        self._uses: dict[Use, list[int]] = {}
        self._most = _MOST
        self._ended: list[int] = []  # what was freed and waited for something that is over now

    def note_use(self, use: Use) -> None:
        """Note an operation that uses the memory; `close`, and the reuse of what is freed, wait for it.

        The lock is held. To be called ahead of the enqueueing: memory that another thread frees meanwhile is then not
        handed out again.
        """
        self._uses.setdefault(use, [])
        if len(self._uses) > self._most:
            self._drop_finished()
            self._most = max(_MOST, 2 * len(self._uses))

    def _in_child(self) -> None:
        """In a forked child: the threads of the parent are gone, and so is their work."""
        for use in list(self._uses):
            if type(use) is HostUse:
                use.end()

    def _drop_finished(self) -> DriverError | None:
        """Forget the operations that are over. The lock is held.

        Where the driver does not tell (its error), they count as under way: whoever waits for them learns the error.
        """
        queues = {use.queue for use in list(self._uses) if use.queue is not None}
        failed = [error for queue in queues if (error := queue.poll()) is not None]
        for use, freed in list(self._uses.items()):
            if use.finished:
                self._ended += freed
                self._uses.pop(use, None)
        return failed[0] if failed else None

    def _wait_idle(self, timeout: float | None, what: str) -> None:
        """Wait until nothing is under way, with the GIL released."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 20e-6
        while True:
            with self._lock:
                failed, left = self._drop_finished(), list(self._uses)
            if failed is not None:
                raise failed
            if not left:
                return
            if deadline is not None and time.monotonic() >= deadline:
                more = f" and {len(left) - 8} more" if len(left) > 8 else ""
                names = ", ".join(map(repr, left[:8]))
                raise TransferTimeoutError(f"{what} is still used after {timeout} s by {names}{more}")
            time.sleep(pause)
            pause = min(pause * 2, 1e-3)
