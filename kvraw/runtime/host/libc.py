"""The calls of Linux that Python's `os` and `mmap` modules lack or bind too loosely; all release the GIL.

Every failure is an `OSError` that names the call.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform

__all__ = ["advise", "bind", "map_anonymous", "map_file", "mapped", "unmap"]

PAGE = mmap.PAGESIZE
DONTFORK, DOFORK, HUGEPAGE, POPULATE_WRITE = 10, 11, 14, 23  # advice; the last from Linux 5.14 on

_PRIVATE, _SHARED, _ANONYMOUS, _HUGETLB = 0x02, 0x01, 0x20, 0x40000
_HUGE_SHIFT = 26  # where MAP_HUGETLB takes the base-2 logarithm of the page size
_READ_WRITE = 3
_ASYNC = 1  # MS_ASYNC
_MBIND = {"x86_64": 237, "aarch64": 235}  # libc does not wrap it
_MPOL_BIND = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long


def _failed(call: str, number: int) -> OSError:
    return OSError(number, f"{call}: {os.strerror(number)}")


def _map(nbytes: int, flags: int, file: int) -> int:
    if nbytes >= 1 << 63:  # ctypes would cut it down to what fits
        raise _failed("mmap", errno.ENOMEM)
    address = _libc.mmap(None, nbytes, _READ_WRITE, flags, file, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise _failed("mmap", ctypes.get_errno())
    return int(address)


def map_anonymous(nbytes: int, *, align: int = PAGE, huge_page: int = 0) -> int:
    """Private memory of a whole number of pages; zero, and not backed before it is touched.

    Parameters
    ----------
    align : int
        Bytes; transparent huge pages want an address that is a multiple of theirs.
    huge_page : int
        Bytes of an explicit huge page, whose pages are reserved by this call; 0: none.
    """
    flags = _PRIVATE | _ANONYMOUS
    if huge_page:
        return _map(nbytes, flags | _HUGETLB | (huge_page.bit_length() - 1) << _HUGE_SHIFT, -1)
    if align <= PAGE:
        return _map(nbytes, flags, -1)
    around = _map(nbytes + align, flags, -1)
    address = around + -around % align
    for start, end in ((around, address), (address + nbytes, around + nbytes + align)):
        if end > start:
            unmap(start, end - start)
    return address


def map_file(file: int, nbytes: int) -> int:
    """Map the beginning of a file, shared."""
    return _map(nbytes, _SHARED, file)


def unmap(address: int, nbytes: int) -> None:
    """Give a mapping back."""
    if _libc.munmap(address, nbytes):
        raise _failed("munmap", ctypes.get_errno())


def mapped(address: int, nbytes: int) -> bool:
    """True where all pages of a range are mapped in this process, backed or not, or the kernel does not tell."""
    start = address // PAGE * PAGE
    # On Linux an asynchronous msync does nothing but walk the mappings.
    return not _libc.msync(start, address + nbytes - start, _ASYNC) or ctypes.get_errno() != errno.ENOMEM


def advise(address: int, nbytes: int, advice: int) -> None:
    """Call madvise."""
    while _libc.madvise(address, nbytes, advice):
        number = ctypes.get_errno()
        if number not in (errno.EINTR, errno.EAGAIN) or advice != POPULATE_WRITE:
            raise _failed(f"madvise({advice})", number)


def bind(address: int, nbytes: int, node: int) -> None:
    """Have the pages of a range come from one NUMA node, and from no other."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise _failed(f"mbind on {platform.machine()}", errno.ENOSYS)
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    arguments = (number, address, nbytes, _MPOL_BIND, ctypes.addressof(mask), len(mask) * 64 + 1, 0)
    if _libc.syscall(*(ctypes.c_long(x) for x in arguments)):
        raise _failed(f"mbind to node {node}", ctypes.get_errno())
