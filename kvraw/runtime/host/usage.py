"""Which transfers use a piece of memory, and which parts of it."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from kvraw.errors import DriverError, TransferTimeoutError
from kvraw.runtime import fork
from kvraw.runtime.completion import Completion
from kvraw.runtime.driver import relaxed

__all__ = ["Call", "HostWork", "Use", "UseTracker"]


class HostWork:
    """A thread's own work on memory, for `UseTracker.mark_used`.

    Parameters
    ----------
    uses : numpy.ndarray of uint64, optional
        Addresses of the chunks that it uses; None: all of the memory.

    Attributes
    ----------
    ended : bool
        To be set when it is over; no call, which an interrupt could come before.
    """

    __slots__ = ("_thread", "ended", "stream", "uses")

    def __init__(self, uses: Any = None) -> None:
        self.ended, self._thread, self.uses = False, threading.current_thread().name, uses
        self.stream = -threading.get_ident()  # a thread's works are one after the other

    def __repr__(self) -> str:
        return f"a transfer of thread {self._thread}"

    def over(self) -> bool:
        """Whether it is."""
        return self.ended

    done = over


class Call:
    """A call that goes on; over at the latest when its frame is gone, whatever came between."""

    __slots__ = ("__weakref__", "epoch")

    def __init__(self) -> None:
        self.epoch = fork.epoch()  # calls of another process do not go on in this one


class Use:
    """One operation that uses the memory.

    Attributes
    ----------
    over : bool
        It is known to be over.
    waiting : list of int
        What was freed and may be handed out again only then.
    """

    __slots__ = ("_addresses", "completion", "over", "waiting")

    def __init__(self, completion: Completion | HostWork) -> None:
        self.completion, self.over = completion, False
        self.waiting: list[int] = []
        self._addresses: frozenset[int] | None = None

    def of(self, addresses: set[int]) -> set[int]:
        """Which of some chunks it uses, by their addresses."""
        if self._addresses is None:
            uses = getattr(self.completion, "uses", None)
            if uses is None:
                return addresses
            self._addresses = frozenset(uses.tolist())  # only now: most operations are over before a chunk is freed
        return addresses & self._addresses


class UseTracker:
    """Base of what transfers use: it knows those that may be under way, and waits for them."""

    def __init__(self) -> None:
        # Re-entrant: a transfer that is found to be over lets go of its arguments, whose end may lead back here.
        self._lock = fork.lock()
        # By stream, in order: where the front is under way, so is what is behind it.
        self._queues: dict[object, deque[Use]] = {}
        self._lost: list[Use] = []  # never known to be over: they hold up nobody but what they use
        self._borrowed = 0

    @property
    def _busy(self) -> list[Use]:
        """What may be under way."""
        return [use for queue in list(self._queues.values()) for use in list(queue)] + self._lost

    def mark_used(self, completion: Completion | HostWork) -> None:
        """Note an operation that uses this memory; `close`, and the reuse of what is freed later, wait for it.

        To be called ahead of the enqueueing: memory that another thread frees meanwhile is then not handed out again.
        """
        with self._lock:
            self.note_use(getattr(completion, "stream", None), completion)

    def note_use(self, stream: object, completion: Completion | HostWork) -> None:
        """`mark_used` where the lock is held, for an operation on a stream."""
        queue = self._queues.get(stream)
        if queue is None:
            queue = self._queues.setdefault(stream, deque())
        queue.append(Use(completion))
        self._borrowed += 1
        if self._borrowed % 64 == 0:
            self._settle()

    def _on_devices(self) -> list[Use]:
        """What may be under way and is not the work of a thread."""
        return [use for use in self._busy if type(use.completion) is not HostWork]

    def _in_child(self) -> None:
        """In a forked child: the threads of the parent are gone, and so is their work."""
        for use in self._busy:
            if type(use.completion) is HostWork:
                use.over = True
        self._lost = [use for use in self._lost if not use.over]
        self._queues = {key: deque(u for u in queue if not u.over) for key, queue in self._queues.items()}

    def _settle(self) -> None:
        """Forget the operations that are over. The lock is held.

        Where the driver does not tell, they count as under way: whoever waits for them learns the error.
        """
        if not self._queues and not self._lost:
            return
        try:
            with relaxed():
                self._forget()
        except DriverError:
            return

    def _forget(self) -> None:
        failed: DriverError | None = None
        for use in list(self._lost):
            if use.completion.over():
                self._end(use)
                self._lost = [one for one in self._lost if one is not use]
        for key in list(self._queues):
            queue = self._queues.get(key)
            if queue is None:
                continue
            try:
                self._forget_one(queue)
            except DriverError as error:
                failed = failed or error
            if not queue:
                self._queues.pop(key, None)
        if failed is not None:
            raise failed

    def _forget_one(self, queue: deque[Use]) -> None:
        while queue:
            first = queue[0]
            over = first.completion.over()
            # A finalizer may have come here in the meantime, in this very thread.
            if not queue or queue[0] is not first:
                continue
            if over:
                self._end(first)
            elif getattr(first.completion, "abandoned", False):
                self._lost.append(first)
            else:
                return
            if queue and queue[0] is first:
                queue.popleft()

    def _end(self, use: Use) -> None:
        """An operation is over; at times more than once."""
        use.over = True

    def _wait_idle(self, timeout: float | None, what: str) -> None:
        """Wait until nothing is under way, with the GIL released."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 20e-6
        while True:
            with self._lock:
                if self._queues or self._lost:
                    with relaxed():
                        self._forget()
                left = [use.completion for use in self._busy]
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
