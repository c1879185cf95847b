"""Host memory by address: every kind of allocation with its counterpart, and what is live."""

from __future__ import annotations

import os
from typing import NamedTuple

from kvraw.adapters.lmcache._place import this_device
from kvraw.copying import device_state
from kvraw.errors import BoundsError, DriverError, HostMemoryError, KvrawError
from kvraw.runtime import fork
from kvraw.runtime.driver import driver_or_none, usable_here
from kvraw.runtime.host import backing
from kvraw.runtime.host.buffer import HostBuffer
from kvraw.runtime.host.mapping import HostOptions

__all__ = [
    "alloc_hugepage_pinned_numa_ptr",
    "alloc_hugepage_pinned_ptr",
    "alloc_numa_ptr",
    "alloc_pinned_numa_ptr",
    "alloc_pinned_ptr",
    "alloc_shm_pinned_ptr",
    "free_hugepage_pinned_numa_ptr",
    "free_hugepage_pinned_ptr",
    "free_numa_ptr",
    "free_pinned_numa_ptr",
    "free_pinned_ptr",
    "free_shm_pinned_ptr",
    "get_gpu_pci_bus_id",
]


class FreeError(KvrawError, RuntimeError, ValueError):
    """An address that was not handed out, or not by this kind of allocation, or with another size."""


class _Block(NamedTuple):
    kind: str
    nbytes: int
    buffer: HostBuffer


_lock = fork.lock()
_live: dict[int, _Block] = {}


def _size(size: int) -> int:
    if size <= 0:
        raise BoundsError(f"size is {size}, must be positive")
    return int(size)


def _allocate(kind: str, size: int, options: HostOptions, *, pin: bool = True) -> int:
    """Memory that is backed, and pinned where there is a CUDA driver; it is known by its address until it is freed."""
    nbytes = _size(size)
    device = this_device() if pin and driver_or_none() is not None else None
    buffer = HostBuffer(nbytes, device=device, pin=None if device is not None else False, options=options)
    with _lock:
        _live[buffer.address] = _Block(kind, nbytes, buffer)
    return buffer.address


def _system(kind: str, size: int, *, node: int | None = None, huge: bool = False, pin: bool = True) -> int:
    """The same, with the errors of system calls as LMCache's callers read them."""
    if node is not None and node < 0:
        raise RuntimeError(f"mbind failed: node {node} is negative")
    # The only node that there is needs no binding, which containers often do not allow.
    bound = None if node is None or (backing.nodes() or [0]) == [node] else node
    _size(size)
    try:
        options = HostOptions("huge-2MiB" if huge else "anonymous", node=bound, strict=True, populate=True)
        return _allocate(kind, size, options, pin=pin)
    except BoundsError as error:
        raise RuntimeError(f"mbind failed: Invalid argument: {error}") from None
    except HostMemoryError as error:
        why = error.__cause__ or error.__context__
        if not isinstance(why, OSError):
            raise RuntimeError(str(error)) from None
        call = "mbind" if "NUMA binding" in str(error) else "mmap"
        raise RuntimeError(f"{call} failed: {os.strerror(why.errno or 0)}") from error


def _free(kind: str, ptr: int, size: int | None) -> None:
    if not ptr:
        return
    with _lock:
        block = _live.get(ptr)
        if block is None or block.kind != kind:
            found = "unknown" if block is None else f"of alloc_{block.kind}_ptr"
            raise FreeError(f"free_{kind}_ptr: address {ptr:#x} is {found}")
        if size and size != block.nbytes:
            raise FreeError(f"free_{kind}_ptr: size is {size}, address {ptr:#x} has {block.nbytes} bytes")
        del _live[ptr]
    if block.buffer.pinned and usable_here():
        try:
            device_state.drain()  # transfers may still use it
        except BaseException:
            with _lock:
                _live[ptr] = block
            raise
    block.buffer.close()


def alloc_pinned_ptr(size: int, flags: int = 0, *, device_id: int | None = None) -> int:
    """Pinned, mapped, zeroed memory, page-aligned; without a CUDA driver it is pageable.

    `flags` and `device_id` are accepted and change nothing: the memory is pinned for every device.
    """
    return _allocate("pinned", size, HostOptions(populate=True))


def free_pinned_ptr(ptr: int) -> None:
    """Give back what `alloc_pinned_ptr` gave."""
    _free("pinned", ptr, None)


def alloc_numa_ptr(size: int, numa_id: int = 0) -> int:
    """Pageable memory on a NUMA node."""
    return _system("numa", size, node=numa_id, pin=False)


def free_numa_ptr(ptr: int, size: int | None = None) -> None:
    """Give back what `alloc_numa_ptr` gave."""
    _free("numa", ptr, size)


def alloc_pinned_numa_ptr(size: int, numa_id: int = 0) -> int:
    """Memory on a NUMA node, pinned where there is a CUDA driver."""
    return _system("pinned_numa", size, node=numa_id)


def free_pinned_numa_ptr(ptr: int, size: int | None = None) -> None:
    """Give back what `alloc_pinned_numa_ptr` gave."""
    _free("pinned_numa", ptr, size)


def alloc_hugepage_pinned_ptr(size: int, flags: int = 0, *, device_id: int | None = None) -> int:
    """Memory of 2 MiB pages out of the system's pool, pinned where there is a CUDA driver."""
    return _system("hugepage_pinned", size, huge=True)


def free_hugepage_pinned_ptr(ptr: int, size: int = 0) -> None:
    """Give back what `alloc_hugepage_pinned_ptr` gave."""
    _free("hugepage_pinned", ptr, size)


def alloc_hugepage_pinned_numa_ptr(size: int, numa_id: int = 0) -> int:
    """Memory of 2 MiB pages on a NUMA node, pinned where there is a CUDA driver."""
    return _system("hugepage_pinned_numa", size, node=numa_id, huge=True)


def free_hugepage_pinned_numa_ptr(ptr: int, size: int = 0) -> None:
    """Give back what `alloc_hugepage_pinned_numa_ptr` gave."""
    _free("hugepage_pinned_numa", ptr, size)


def alloc_shm_pinned_ptr(size: int, shm_name: str = "") -> int:
    """A shared segment of this name (one is made up if empty), pinned where there is a CUDA driver.

    A segment of the same name is stale, and is unlinked first. The segment is unlinked when the process exits; what
    one that was killed left is swept by the next one that allocates shared memory.
    """
    plain = shm_name.lstrip("/") if shm_name else None
    if plain is not None and (not plain or "/" in plain or plain in (".", "..") or len(plain) > 255):
        raise ValueError(f"shm_name is {shm_name!r}, must be a name without slashes, of 1 to 255 characters")
    try:
        return _allocate("shm_pinned", size, HostOptions("shared", name=plain, replace=True, populate=True))
    except (HostMemoryError, FileExistsError) as error:
        raise RuntimeError(f"shm_open failed: {shm_name!r}, {size} bytes: {error}") from None


def free_shm_pinned_ptr(ptr: int, size: int = 0, shm_name: str = "") -> None:
    """Give back what `alloc_shm_pinned_ptr` gave, and remove its name."""
    _free("shm_pinned", ptr, size)


def get_gpu_pci_bus_id(device_id: int = 0) -> str | None:
    """PCI address of a device, such as ``0000:29:00.0``; None without a CUDA driver.

    Raises
    ------
    DriverError
        There is no such device.
    """
    found = driver_or_none()
    if found is None:
        return None
    if device_id < 0:
        raise DriverError("CUDA_ERROR_INVALID_DEVICE", 101, "cuDeviceGetPCIBusId", f"device {device_id}")
    return found.device_pci_address(device_id).upper()
