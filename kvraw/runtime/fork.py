"""Forks of the process: what a child finds of the locks, tables and threads of its parent.

A child has one thread: locks that its parent's other threads held would never be released, and what they were changing
stays half changed. So all locks of kvraw come from here and are free in a child; tables are changed in such an order
that a child, as an interrupt, finds them as they were or as they are to be (see `suballoc`); and no fork falls into the
midst of what could be neither, such as an import.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

__all__ = ["condition", "epoch", "in_child", "lock", "undivided", "wait_for"]

_log = logging.getLogger("kvraw")
_PATIENCE = 30.0  # seconds that a fork waits for what should not be divided: an import that waits for this very thread


class Lockable(Protocol):
    """A lock that a fork waits for."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool:
        """Lock it; whether that was possible in time."""

    def release(self) -> None:
        """Unlock it."""


_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_callbacks: list[Callable[[], None]] = []
_whole = threading.RLock()
_waited: list[Lockable] = [_whole]
_forking = threading.local()  # what a forking thread holds meanwhile
_epoch = 0


def lock() -> Any:
    """A re-entrant lock (a finalizer may run in the midst of what its own thread has locked), free in a child."""
    made = threading.RLock()
    _locks.add(made)
    return made


def condition(lock: Any = None) -> threading.Condition:
    """A condition, of a lock that was made here or of its own, for which nobody waits in a child."""
    made = threading.Condition(lock if lock is not None else threading.RLock())
    _locks.add(made)
    return made


def in_child(callback: Callable[[], None]) -> None:
    """Call this in each forked child, in the order of these calls; locks are free by then."""
    _callbacks.append(callback)


def wait_for(one: Lockable) -> None:
    """Have each fork wait until nobody holds this lock of another library's."""
    _waited.append(one)


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """A block that a fork waits for, such as an import: a child's own would wait for ever for the thread it lacks."""
    with _whole:
        yield


def epoch() -> int:
    """Number of forks between this process and the one that loaded kvraw."""
    return _epoch


def _before() -> None:
    _forking.held = []
    for one in _waited:
        if one.acquire(timeout=_PATIENCE):
            _forking.held.append(one)


def _let_go() -> None:
    while _forking.held:
        _forking.held.pop().release()


def _own(one: Any) -> bool:
    """True where the forking thread holds it, and will release it in the child as well."""
    return bool(one._is_owned())


def _in_child() -> None:
    global _epoch
    _epoch += 1
    _let_go()
    for one in list(_locks):
        if not _own(one):
            one._at_fork_reinit()  # as `threading` and `logging` do with theirs
    if not _own(_whole):
        _whole._at_fork_reinit()  # type: ignore[attr-defined]
    for callback in _callbacks:
        try:
            callback()
        except Exception:  # the others are to be called all the same
            _log.exception("a table could not be made anew in a forked child")


os.register_at_fork(before=_before, after_in_parent=_let_go, after_in_child=_in_child)
