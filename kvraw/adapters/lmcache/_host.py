"""Host memory from the system: huge pages, NUMA nodes, shared segments; callers read the texts of its errors."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import platform
from pathlib import Path

__all__ = ["HUGE_PAGE", "bind", "create_shared", "map_memory", "populate", "unlink_shared", "unmap"]

HUGE_PAGE = 2 << 20
_log = logging.getLogger("kvraw")
_HUGETLB, _HUGE_2MB, _ANONYMOUS = 0x40000, 21 << 26, 0x20
_BIND, _STRICT_MOVE = 2, 1 | 2  # MPOL_BIND; MPOL_MF_STRICT | MPOL_MF_MOVE
_MBIND = {"x86_64": 237, "aarch64": 235}
_POPULATE_WRITE = 23  # Linux 5.14
_SHARED = Path("/dev/shm")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long


def map_memory(nbytes: int, *, huge: bool = False, file: int = -1) -> int:
    """Map zeroed memory, anonymous or of a file; the address.

    Raises
    ------
    RuntimeError
        ``mmap failed: ...``
    """
    flags = mmap.MAP_SHARED if file >= 0 else mmap.MAP_PRIVATE | _ANONYMOUS
    if huge:
        flags |= _HUGETLB | _HUGE_2MB
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise RuntimeError(f"mmap failed: {os.strerror(ctypes.get_errno())}")
    return int(address)


def unmap(address: int, nbytes: int) -> None:
    """Give mapped memory back."""
    if _libc.munmap(address, nbytes):
        raise RuntimeError(f"munmap failed: {os.strerror(ctypes.get_errno())}")


def _only_node(node: int) -> bool:
    try:
        return Path("/sys/devices/system/node/online").read_text().strip() == str(node)
    except OSError:
        return node == 0


def bind(address: int, nbytes: int, node: int) -> None:
    """Bind memory to a NUMA node.

    Raises
    ------
    RuntimeError
        ``mbind failed: ...``
    """
    if node < 0:
        raise RuntimeError(f"mbind failed: node {node} is negative")
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(_BIND), words)
    number = _MBIND.get(platform.machine())
    code = errno.ENOSYS
    if number is not None:
        most = ctypes.c_ulong(64 * len(words) + 1)
        if not _libc.syscall(ctypes.c_long(number), *arguments, most, ctypes.c_uint(_STRICT_MOVE)):
            return
        code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EPERM) and _only_node(node):
        # The system does not let us ask (containers often do not), and there is no other node to be on.
        _log.info("mbind is not available (%s); the machine has node %d alone", os.strerror(code), node)
        return
    raise RuntimeError(f"mbind failed: {os.strerror(code)}")


def populate(address: int, nbytes: int) -> None:
    """Touch every page, so that what is not to be had fails here.

    Raises
    ------
    RuntimeError
        The memory is not to be had.
    """
    if not _libc.madvise(address, nbytes, _POPULATE_WRITE):
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:  # EINVAL: an older system; the pages come as they are used
        raise RuntimeError(f"populating {nbytes} bytes of host memory failed: {os.strerror(code)}")


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
