"""Backs fresh memory with pages, from its beginning on, in several threads with the GIL released."""

from __future__ import annotations

import errno
import threading

import numpy as np

from kvraw import config
from kvraw.errors import HostMemoryError
from kvraw.runtime import fork
from kvraw.runtime.cgroup import usable_cores
from kvraw.runtime.host import libc

__all__ = ["Populator", "interpreter_ends", "populate_threads", "touch"]

# Bytes per call. Each holds up whoever maps memory (new threads, malloc, the driver) while it runs.
PIECE = 8 << 20

# What a kernel before Linux 5.14 says to `MADV_POPULATE_WRITE`, and a sandbox that does not let madvise through.
_NOT_OFFERED = (errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP)


def populate_threads() -> int:
    """Threads that populate: `KVRAW_HOST_THREADS`, else the usable cores, at most 16."""
    return config.HOST_THREADS.get() or min(usable_cores(), 16)


def interpreter_ends() -> bool:
    """True where the interpreter has begun to shut down; it then waits for threads, which should end."""
    return not threading.main_thread().is_alive()


class Populator:
    """Populates a range piece by piece; `wait_for` tells how far it got.

    Parameters
    ----------
    address, nbytes : int
        The range, which must stay mapped until `stop` returned.
    threads : int
        How many.
    fresh : bool
        Nobody else uses the memory yet, so that where `MADV_POPULATE_WRITE` is not to be had it is written to instead.
        Memory in use is left to what touches it next.
    owner : object
        Kept alive while threads run.
    """

    def __init__(self, address: int, nbytes: int, *, threads: int, fresh: bool, owner: object) -> None:
        self._address, self._fresh, self._owner = address, fresh, owner
        self._starts = range(0, nbytes, PIECE)
        self._nbytes = nbytes
        self._changed = fork.condition()
        self._next = 0
        self._done = bytearray(len(self._starts))
        self._reached = 0  # pieces from the beginning that are all done
        self._stopping = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        # Nobody starts before all have: a thread's stack is mapped, which would wait for the pieces of the others.
        self._gate = threading.Event()
        try:
            for k in range(max(1, min(threads, len(self._starts)))):
                thread = threading.Thread(target=self._work, name=f"kvraw-populate-{k}")
                try:
                    thread.start()
                except (RuntimeError, MemoryError):  # a limit of threads or of address space: fewer will do, or none
                    break
                self._threads.append(thread)
            self._gate.set()
        except BaseException:
            self.stop()
            raise

    def _take(self) -> int | None:
        with self._changed:
            if self._stopping or self._error is not None or self._next == len(self._starts) or interpreter_ends():
                return None
            self._next += 1
            return self._next - 1

    def _work(self) -> None:
        self._gate.wait()
        while self._step():
            pass

    def _step(self) -> bool:
        """Populate the next piece; whether there was one."""
        try:
            piece = self._take()
            if piece is None:
                return False
            self._populate(self._starts[piece])
            with self._changed:
                self._done[piece] = 1
                while self._reached < len(self._done) and self._done[self._reached]:
                    self._reached += 1
                self._changed.notify_all()
        except BaseException as caught:  # whatever it is: whoever waits for the piece must learn of it
            with self._changed:
                self._error = self._error or caught
                self._changed.notify_all()
            return False
        return True

    def _populate(self, start: int) -> None:
        size = min(PIECE, self._nbytes - start)
        try:
            libc.advise(self._address + start, size, libc.POPULATE_WRITE)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise HostMemoryError(
                    f"cannot populate {self._nbytes} bytes of host memory, stopped at {start}: {error}; ask for less, "
                    f"or free memory (of the NUMA node, where the memory is bound to one)"
                ) from error
            if self._fresh:
                touch(self._address + start, size)

    def wait_for(self, nbytes: int) -> None:
        """Wait until this many bytes from the beginning are populated.

        Raises
        ------
        HostMemoryError
            The memory is not to be had.
        """
        pieces = -(-nbytes // PIECE)
        while True:
            with self._changed:
                if self._reached >= pieces:
                    return
                if self._error is not None:
                    raise self._error
                if any(t.is_alive() for t in self._threads):
                    # The timeout lets a thread notice that the interpreter ends and the workers left.
                    self._changed.wait(0.1)
                    continue
            if not self._step() and self._error is None:  # none of them lives: then this thread
                raise HostMemoryError(f"populating was stopped at {self._reached * PIECE} bytes")

    def stop(self) -> None:
        """Have the threads end, and wait for them: some tens of milliseconds. Idempotent."""
        with self._changed:
            self._stopping = True
        self._gate.set()
        for thread in self._threads:
            thread.join()
        self._owner = None


def touch(address: int, nbytes: int) -> None:
    """Write a zero to each page of fresh memory; numpy releases the GIL meanwhile."""
    np.asarray(_Bytes(address, nbytes))[:: libc.PAGE] = 0


class _Bytes:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
