"""Functions that numba compiles in the background, while Python does their work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvraw.runtime import fork

__all__ = ["Compiled"]

_log = logging.getLogger("kvraw")
T = TypeVar("T")


class Compiled(Generic[T]):
    """A compiled function, once it is there.

    Parameters
    ----------
    what : str
        What Python does, slower, without it: for the log.
    make : callable
        Imports numba and compiles the function, or loads it from the disk's cache.

    Attributes
    ----------
    entry : callable or None
        The function; None until it is compiled, and where it cannot be.
    """

    def __init__(self, what: str, make: Callable[[], T]) -> None:
        self.entry: T | None = None
        self._what, self._make = what, make
        self._lock = fork.lock()
        fork.wait_for(self._lock)  # a fork in the midst of compiling would leave the compiler's locks to nobody
        self._thread: threading.Thread | None = None
        self._tried = False

    def start(self) -> None:
        """Compile in the background, once."""
        with self._lock:
            if self._tried or self._thread is not None:
                return
            # Not a daemon: at the exit of the process a thread in the midst of the compiler would crash it.
            thread = self._thread = threading.Thread(target=self.compile, name="kvraw-compile")
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the process exits
            self._tried = True

    def compile(self) -> None:
        """Compile now, or wait for a compilation that is under way."""
        with self._lock:
            if self._tried:
                return
            self._tried = True
            try:
                self.entry = self._make()
            except Exception as error:
                _log.info("%s by Python, slower: %s: %s", self._what, type(error).__name__, error)
