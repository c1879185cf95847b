"""POSIX shared memory: created whole, never unlinked by who only attached, swept once its owner is gone.

An owner holds a lock (``flock``) on its segment for as long as it lives. The kernel lets go of the lock when the owner
dies, however it dies, so that others can tell a segment without owner from one in use, also across containers that
share /dev/shm but not process numbers.

Every segment has a name of a form that nobody else uses (`_OWN`). A name that the caller chose is a second link to the
same file: whoever finds the one name unlocked knows the other by the inode, and no other file is ever swept.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import sys

from kvraw.errors import BoundsError, HostMemoryError
from kvraw.runtime import fork
from kvraw.runtime.host import backing, libc

__all__ = ["Segment", "attach_segment", "create_segment", "shared_memory_room", "sweep_shared_memory"]

FOLDER = "/dev/shm"

_OWN = re.compile(r"kvraw-[0-9]+-[0-9a-f]{12}")
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # the last for what is no regular file
_KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip

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

    __slots__ = ("__weakref__", "_file", "_inode", "_paths", "address", "name", "nbytes", "owned")

    def __init__(
        self, name: str, address: int, nbytes: int, file: int | None = None, paths: tuple[str, ...] = (), inode: int = 0
    ) -> None:
        self.name, self.address, self.nbytes = name, address, nbytes
        self.owned = file is not None
        self._file, self._paths, self._inode = file, paths, inode

    def unlink(self) -> None:
        """Remove the name, where this very process created the segment; mappings live on. Idempotent.

        The lock goes with it. A forked child keeps its hands off.
        """
        if _owned.pop(id(self), None) is None or self._file is None:
            return
        for path in self._paths:
            _unlink(path, self._inode)
        _close(self._file)


_owned: dict[int, Segment] = {}  # by id
_files: set[int] = set()  # open files that have, or wait for, an owner's lock
_finalized = False  # multiprocessing's children: `_unlink_all` is one of their finalizers


def _unlink_all() -> None:
    for segment in list(_owned.values()):
        segment.unlink()


def _disown() -> None:
    """In a forked child: the segments are the parent's, and so is the lock, which an open file here would prolong."""
    global _finalized
    _finalized = False
    for file in _files:
        with contextlib.suppress(OSError):
            os.close(file)
    _files.clear()
    _owned.clear()


atexit.register(_unlink_all)
fork.in_child(_disown)


def _unlink_at_exit() -> None:
    """The children of multiprocessing end without `atexit`, but not without its finalizers."""
    global _finalized
    if _finalized or "multiprocessing.util" not in sys.modules:
        return
    from multiprocessing import process, util

    if process.parent_process() is not None:
        util.Finalize(None, _unlink_all, exitpriority=-100)  # once their own children are over
        _finalized = True


def _open_new() -> tuple[int, str]:
    """A new file that is locked, and its path, of a name of its own."""
    while True:
        path = os.path.join(FOLDER, f"kvraw-{os.getpid()}-{secrets.token_hex(6)}")
        with fork.undivided():  # no fork comes between the opening of such a file and its entry in `_files`
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _files.add(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            # A sweep may come between creation and lock, and takes the new file for an orphan: then once more.
            if os.fstat(file).st_nlink:
                return file, path
        except BaseException:
            os.unlink(path)
            _close(file)
            raise
        _close(file)


def _close(file: int) -> None:
    with fork.undivided():
        _files.discard(file)
        os.close(file)


def _unlink(path: str, inode: int) -> None:
    """Remove a name, unless somebody has removed it and made it anew."""
    with contextlib.suppress(OSError):
        if os.stat(path, follow_symlinks=False).st_ino == inode:
            os.unlink(path)


def _path(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}, must be a string")
    plain = name.removeprefix("/")
    try:
        size = len(os.fsencode(plain))
    except UnicodeEncodeError:
        size = 0
    if "/" in plain or "\0" in plain or plain in (".", "..") or not 0 < size <= 255:
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


def _taken(path: str) -> FileExistsError:
    name = os.path.basename(path)
    return FileExistsError(
        errno.EEXIST, f"shared memory {name!r} exists: its owner lives, or it is none that kvraw created", path
    )


def create_segment(nbytes: int, name: str | None = None, *, replace: bool = False) -> Segment:
    """Create a segment, mode 0600, with its pages set aside, so that no access to it can raise SIGBUS.

    Nobody can attach to it before it is whole.

    Parameters
    ----------
    nbytes : int
        Its size.
    name : str, optional
        Default: one that no other process can have. A segment of that name that kvraw created, and whose owner is
        dead, is removed first.
    replace : bool
        Whatever has the name loses it.

    Raises
    ------
    HostMemoryError
        /dev/shm is too small, or not to be written; nothing is left there.
    FileExistsError
        The name is taken.
    """
    chosen = None if name is None else _path(name)
    sweep_shared_memory()
    if chosen is not None and os.path.lexists(chosen):
        if not replace:
            raise _taken(chosen)
        try:
            os.unlink(chosen)
        except OSError as error:
            raise HostMemoryError(f"cannot replace shared memory {name!r}: {error}") from error
    room = shared_memory_room()
    if room is None or room < nbytes:
        why = f"{FOLDER} is not there" if room is None else f"{os.strerror(errno.ENOSPC)}, {room} bytes are free"
        raise _no_room(nbytes, why)
    backing.require_memory(nbytes)
    try:
        file, path = _open_new()
    except OSError as error:
        raise HostMemoryError(f"cannot create {nbytes} bytes of shared memory in {FOLDER}: {error}") from error
    paths, address, segment = [path], 0, None
    inode = os.fstat(file).st_ino
    try:
        os.fchmod(file, 0o600)  # whatever the umask
        try:
            os.ftruncate(file, nbytes)
            os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            raise _no_room(nbytes, error) from error
        # Mapped through an opening of its own: a mapping that a forked child inherits keeps its opening, lock and all.
        other = os.open(path, _OPEN)
        try:
            address = libc.map_file(other, nbytes)
        finally:
            os.close(other)
        if chosen is not None:
            paths.append(chosen)
            try:
                os.link(path, chosen)
            except FileExistsError:
                raise _taken(chosen) from None
        _unlink_at_exit()
        segment = Segment(os.path.basename(paths[-1]), address, nbytes, file, tuple(paths), inode)
        _owned[id(segment)] = segment
    except BaseException as error:
        _owned.pop(id(segment), None)
        if address:
            libc.unmap(address, nbytes)
        for one in paths:
            _unlink(one, inode)
        _close(file)
        if isinstance(error, OSError) and not isinstance(error, FileExistsError):
            raise HostMemoryError(f"cannot map {nbytes} bytes of shared memory: {error}") from error
        raise
    return segment


def _require_ours(name: str, status: os.stat_result) -> None:
    """Who can truncate a segment can end, by SIGBUS, whoever uses it, and read what is written to it."""
    ours = os.geteuid()
    if status.st_uid not in (ours, 0):
        why = f"is user {status.st_uid}'s, must be of user {ours} or of root"
    elif status.st_mode & stat.S_IWOTH:
        why = f"has mode {stat.S_IMODE(status.st_mode):#o}, must not be writable for every user"
    else:
        return
    raise PermissionError(errno.EPERM, f"shared memory {name!r} {why}; any_user=True takes it as it is")


def attach_segment(name: str, nbytes: int | None = None, *, any_user: bool = False) -> Segment:
    """Map a segment that another process created; nothing that this process does will unlink it.

    Parameters
    ----------
    nbytes : int, optional
        Bytes to map; default: all.
    any_user : bool
        Take it whoever owns it, and can write to it: they can end this process by truncating it.

    Raises
    ------
    FileNotFoundError
        There is none of that name.
    PermissionError
        It is another user's (but root's), or others may write to it.
    HostMemoryError
        It is no regular file.
    BoundsError
        It is smaller than `nbytes`.
    """
    path = _path(name)
    # Before it is opened: to open a device or a FIFO may do things.
    mode = os.stat(path, follow_symlinks=False).st_mode
    if not stat.S_ISREG(mode):
        raise HostMemoryError(f"shared memory {name!r} is {_KINDS.get(stat.S_IFMT(mode))}, must be a regular file")
    file = os.open(path, _OPEN)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise HostMemoryError(f"shared memory {name!r} is no regular file any more")
        if not any_user:
            _require_ours(name, status)
        wanted = status.st_size if nbytes is None else nbytes
        if not 0 < wanted <= status.st_size:
            raise BoundsError(f"nbytes is {wanted}, must be in [1, {status.st_size}], the size of {name!r}")
        address = libc.map_file(file, wanted)
    finally:
        os.close(file)
    return Segment(os.path.basename(path), address, wanted)


def sweep_shared_memory(prefix: str = "") -> list[str]:
    """Remove shared memory that kvraw created and whose owner is dead.

    Whatever name they were given; no other file is touched, nor another user's. Processes that attached to one keep it.

    Parameters
    ----------
    prefix : str
        Of the names to remove; default: all.

    Returns
    -------
    list of str
        The names that were removed.

    Examples
    --------
    >>> kvraw.sweep_shared_memory("no such prefix")
    []
    """
    gone: list[str] = []
    try:
        names = [name for name in os.listdir(FOLDER) if _OWN.fullmatch(name)]
    except OSError:
        return gone
    for name in names:
        path = os.path.join(FOLDER, name)
        try:
            file = os.open(path, _OPEN)
        except OSError:  # gone meanwhile, or somebody else's
            continue
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path, follow_symlinks=False).st_ino != status.st_ino:
                continue
            others = _links(status.st_ino, name) if status.st_nlink > 1 else []
            shown = others or [name]
            if not any(one.startswith(prefix) for one in shown):
                continue
            for other in others:
                _unlink(os.path.join(FOLDER, other), status.st_ino)
            os.unlink(path)  # the last: without it nobody would know of the others
            gone += shown
        except OSError:  # locked: its owner lives
            continue
        finally:
            os.close(file)
    if gone:
        # As literals: a name may hold whatever a terminal or a reader of the log takes for something else.
        _log.info("removed shared memory that dead processes left: %s", ", ".join(map(repr, gone)))
    return gone


def _links(inode: int, name: str) -> list[str]:
    """Other names of a file."""
    with os.scandir(FOLDER) as entries:
        return [entry.name for entry in entries if entry.inode() == inode and entry.name != name]
