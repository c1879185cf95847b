"""POSIX shared memory: created exclusively, never unlinked by who only attached, swept once its owner is gone.

An owner holds a lock (``flock``) on its segment for as long as it lives. The kernel lets go of the lock when the owner
dies, however it dies, so that others can tell a segment without owner from one in use, also across containers that
share /dev/shm but not process numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import logging
import os
import secrets
import signal
import stat
import threading
from types import FrameType

from kvraw.errors import BoundsError, HostMemoryError
from kvraw.runtime import libc

__all__ = ["PREFIX", "Segment", "attach_segment", "create_segment", "shared_memory_room", "sweep_shared_memory"]

PREFIX = "kvraw-"  # of names made here; what carries it is swept without being asked
FOLDER = "/dev/shm"

_log = logging.getLogger("kvraw")


class Segment:
    """A mapped segment.

    Attributes
    ----------
    name : str
        Without slash.
    owned : bool
        Whether this process created it, and unlinks it.
    """

    __slots__ = ("__weakref__", "_file", "_inode", "address", "name", "nbytes", "owned")

    def __init__(self, name: str, address: int, nbytes: int, file: int | None, inode: int) -> None:
        self.name, self.address, self.nbytes = name, address, nbytes
        self.owned = file is not None
        self._file, self._inode = file, inode

    def unlink(self) -> None:
        """Remove the name, where this very process created the segment; mappings live on. Idempotent.

        The lock goes with it. A forked child keeps its hands off.
        """
        if self._file is None:
            return
        file, self._file = self._file, None
        _owned.pop(id(self), None)
        path = os.path.join(FOLDER, self.name)
        with contextlib.suppress(OSError):
            # Somebody may have removed the name and made it anew.
            if os.stat(path).st_ino == self._inode:
                os.unlink(path)
        os.close(file)
        if not _owned:
            _default_again()


_owned: dict[int, Segment] = {}  # by id; read without a lock by the signal handler


def _unlink_all() -> None:
    for segment in list(_owned.values()):
        segment.unlink()


def _disown() -> None:
    """In a forked child: the segments are the parent's, and so is the lock, which an open file here would prolong."""
    for segment in _owned.values():
        if segment._file is not None:
            os.close(segment._file)
            segment._file = None
    _owned.clear()


atexit.register(_unlink_all)
os.register_at_fork(after_in_child=_disown)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    _unlink_all()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)  # die of it, as without us


def _handle_sigterm() -> None:
    """Unlink at SIGTERM where nobody handles it; a handler of the user's is left alone (its exit runs `atexit`)."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _default_again() -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _path(name: str) -> str:
    plain = name.removeprefix("/")
    if not plain or "/" in plain or "\0" in plain or plain in (".", "..") or len(plain.encode()) > 255:
        raise BoundsError(f"name is {name!r}, must be 1 to 255 bytes without a slash inside")
    return os.path.join(FOLDER, plain)


def shared_memory_room() -> int | None:
    """Bytes free in /dev/shm; None where it is not there."""
    try:
        room = os.statvfs(FOLDER)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


def _no_room(nbytes: int, why: object) -> HostMemoryError:
    return HostMemoryError(
        f"{FOLDER} cannot hold {nbytes} bytes: {why}; make it larger (mount -o remount,size=..., or a container's "
        f"--shm-size), or call kvraw.sweep_shared_memory() for what dead processes left"
    )


def create_segment(nbytes: int, name: str | None = None) -> Segment:
    """Create a segment, mode 0600, with its pages set aside, so that no access to it can raise SIGBUS.

    Parameters
    ----------
    nbytes : int
        Whole pages.
    name : str, optional
        Default: one that no other process can have. A segment of that name that this module created and whose owner
        is dead is removed first, where the name begins with `PREFIX`.

    Raises
    ------
    HostMemoryError
        /dev/shm is too small; nothing is left there.
    FileExistsError
        The name is taken.
    """
    sweep_shared_memory()
    room = shared_memory_room()
    if room is None or room < nbytes:
        raise _no_room(nbytes, "it is not there" if room is None else f"{room} bytes are free")
    if name is None:
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
    path = _path(name)
    while True:
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            raise FileExistsError(
                errno.EEXIST, f"shared memory {name!r} exists; close its owner, or sweep it where that is dead", path
            ) from None
        # A sweep may come between creation and lock, and takes the new segment for an orphan: then once more.
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            break
        os.close(file)
    inode = os.fstat(file).st_ino
    segment: Segment | None = None
    try:
        os.fchmod(file, 0o600)  # whatever the umask
        try:
            os.ftruncate(file, nbytes)
            os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            raise _no_room(nbytes, error) from error
        # Mapped through an opening of its own: a mapping that a forked child inherits keeps its opening, lock and all.
        other = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            address = libc.map_file(other, nbytes)
        finally:
            os.close(other)
        segment = Segment(path.rpartition("/")[2], address, nbytes, file, inode)
        _owned[id(segment)] = segment
        _handle_sigterm()
    except BaseException as error:
        if segment is None:
            os.unlink(path)
            os.close(file)
        else:
            libc.unmap(segment.address, nbytes)
            segment.unlink()
        if isinstance(error, OSError):
            raise HostMemoryError(f"cannot map {nbytes} bytes of shared memory: {error}") from error
        raise
    return segment


def attach_segment(name: str, nbytes: int | None = None) -> Segment:
    """Map a segment that another process created; nothing that this process does will unlink it.

    Parameters
    ----------
    nbytes : int, optional
        Bytes to map; default: all.

    Raises
    ------
    FileNotFoundError
        There is none of that name.
    BoundsError
        It is smaller than `nbytes`.
    """
    path = _path(name)
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(file)
        wanted = status.st_size if nbytes is None else nbytes
        if not 0 < wanted <= status.st_size:
            raise BoundsError(f"nbytes is {wanted}, must be in [1, {status.st_size}], the size of {name!r}")
        address = libc.map_file(file, wanted)
    finally:
        os.close(file)
    return Segment(path.rpartition("/")[2], address, wanted, None, status.st_ino)


def sweep_shared_memory(prefix: str = PREFIX) -> list[str]:
    """Remove segments whose owner is dead; returns their names. Processes that attached to one keep it.

    Parameters
    ----------
    prefix : str
        Of the names to look at. All segments of that prefix must have been created by kvraw: those of others carry no
        lock, and look as if their owner were dead.
    """
    if not prefix:
        raise BoundsError("prefix is empty, must name segments that kvraw created")
    gone: list[str] = []
    try:
        names = os.listdir(FOLDER)
    except OSError:
        return gone
    for name in names:
        if not name.startswith(prefix):
            continue
        path = os.path.join(FOLDER, name)
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # gone meanwhile, or somebody else's
            continue
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == status.st_ino:
                os.unlink(path)
                gone.append(name)
        except OSError:  # locked: its owner lives
            continue
        finally:
            os.close(file)
    if gone:
        _log.info("removed shared memory that dead processes left: %s", ", ".join(gone))
    return gone
