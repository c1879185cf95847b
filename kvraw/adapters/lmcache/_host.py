"""Host memory from the system: huge pages, NUMA nodes, shared segments; callers read the texts of its errors."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path

from kvraw.errors import HostMemoryError
from kvraw.runtime import facts, libc
from kvraw.runtime.populate import Populator, populate_threads

__all__ = ["HUGE_PAGE", "bind", "create_shared", "map_memory", "populate", "unlink_shared", "unmap"]

HUGE_PAGE = 2 << 20
_log = logging.getLogger("kvraw")
_SHARED = Path("/dev/shm")


def map_memory(nbytes: int, *, huge: bool = False, file: int = -1) -> int:
    """Map zeroed memory, anonymous or of a file; the address.

    Raises
    ------
    RuntimeError
        ``mmap failed: ...``
    """
    size = -(-nbytes // libc.PAGE) * libc.PAGE
    try:
        if file >= 0:
            return libc.map_file(file, size)
        if huge:
            return libc.map_anonymous(size, huge_page=HUGE_PAGE)
        address = libc.map_anonymous(size, align=HUGE_PAGE if size >= HUGE_PAGE else libc.PAGE)
    except OSError as error:
        raise RuntimeError(f"mmap failed: {os.strerror(error.errno or 0)}") from None
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        libc.advise(address, size, libc.HUGEPAGE)
    return address


def unmap(address: int, nbytes: int) -> None:
    """Give mapped memory back."""
    try:
        libc.unmap(address, nbytes)
    except OSError as error:
        raise RuntimeError(f"munmap failed: {os.strerror(error.errno or 0)}") from None


def bind(address: int, nbytes: int, node: int) -> None:
    """Bind memory to a NUMA node.

    Raises
    ------
    RuntimeError
        ``mbind failed: ...``
    """
    if node < 0:
        raise RuntimeError(f"mbind failed: node {node} is negative")
    try:
        libc.bind(address, nbytes, node)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        if error.errno in (errno.ENOSYS, errno.EPERM) and (facts.nodes() or [0]) == [node]:
            # The system does not let us ask (containers often do not), and there is no other node to be on.
            _log.info("mbind is not available (%s); the machine has node %d alone", why, node)
            return
        raise RuntimeError(f"mbind failed: {why}") from None


def populate(address: int, nbytes: int) -> None:
    """Back every page, so that what is not to be had fails here.

    Raises
    ------
    RuntimeError
        The memory is not to be had.
    """
    populator = Populator(address, nbytes, threads=populate_threads(), fresh=True, owner=None)
    try:
        populator.wait_for(nbytes)
    except HostMemoryError as error:
        raise RuntimeError(str(error)) from None
    finally:
        populator.stop()


def _shared_path(name: str) -> Path:
    plain = name.lstrip("/")
    if not plain or "/" in plain or plain in (".", "..") or len(plain) > 255:
        raise ValueError(f"shm_name is {name!r}, must be a name without slashes, of 1 to 255 characters")
    return _SHARED / plain


def create_shared(name: str, nbytes: int) -> int:
    """Make a shared segment and map it; a stale one of the same name is unlinked first.

    Raises
    ------
    RuntimeError
        It cannot be made, or there is no room for it; nothing is left behind.
    """
    path = _shared_path(name)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    file = -1
    try:
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            raise RuntimeError(f"shm_open failed: {name!r}, {nbytes} bytes: {os.strerror(error.errno or 0)}") from None
        return map_memory(nbytes, file=file)
    except BaseException:
        if file >= 0:
            unlink_shared(name)
        raise
    finally:
        if file >= 0:
            os.close(file)


def unlink_shared(name: str) -> None:
    """Remove a shared segment's name."""
    with contextlib.suppress(FileNotFoundError):
        _shared_path(name).unlink()
