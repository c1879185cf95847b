"""Host memory from the system: huge pages, NUMA nodes, shared segments; callers read the texts of its errors."""

from __future__ import annotations

import contextlib
import errno
import logging
import os

from kvraw.errors import HostMemoryError
from kvraw.runtime.host import backing, libc, shm
from kvraw.runtime.host.populate import Populator, populate_threads

__all__ = ["HUGE_PAGE", "bind", "create_shared", "map_memory", "populate", "unmap"]

HUGE_PAGE = 2 << 20
_log = logging.getLogger("kvraw")


def map_memory(nbytes: int, *, huge: bool = False) -> int:
    """Map zeroed memory; the address.

    Raises
    ------
    RuntimeError
        ``mmap failed: ...``
    """
    size = -(-nbytes // libc.PAGE) * libc.PAGE
    try:
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
        if error.errno in (errno.ENOSYS, errno.EPERM) and (backing.nodes() or [0]) == [node]:
            # The system does not let us ask (containers often do not), and there is no other node to be on.
            _log.info("mbind is not available (%s); the machine has node %d alone", why, node)
            return
        raise RuntimeError(f"mbind failed: {why}") from None


def populate(address: int, nbytes: int, *, huge: bool) -> None:
    """Back every page, so that what is not to be had fails here.

    Raises
    ------
    RuntimeError
        The memory is not to be had.
    """
    try:
        if not huge:
            backing.require_memory(nbytes)
        populator = Populator(address, nbytes, threads=populate_threads(), fresh=True, owner=None)
        try:
            populator.wait_for(nbytes)
        finally:
            populator.stop()
    except HostMemoryError as error:
        raise RuntimeError(str(error)) from None


def create_shared(name: str, nbytes: int) -> shm.Segment:
    """Make a shared segment, of a name of its own if `name` is empty; what else has the name is unlinked first.

    Raises
    ------
    RuntimeError
        It cannot be made, or there is no room for it; nothing is left behind.
    """
    plain = name.lstrip("/") if name else None
    if plain is not None and (not plain or "/" in plain or plain in (".", "..") or len(plain) > 255):
        raise ValueError(f"shm_name is {name!r}, must be a name without slashes, of 1 to 255 characters")
    try:
        return shm.create_segment(nbytes, plain, replace=True)
    except (HostMemoryError, FileExistsError) as error:
        raise RuntimeError(f"shm_open failed: {name!r}, {nbytes} bytes: {error}") from None
