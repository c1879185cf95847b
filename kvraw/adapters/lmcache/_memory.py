"""Host memory by address: every kind of allocation with its counterpart, and what is live."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from kvraw.adapters.lmcache import _host
from kvraw.adapters.lmcache._place import this_device
from kvraw.copying import device_state
from kvraw.errors import BoundsError, DriverError, KvrawError
from kvraw.runtime import fork
from kvraw.runtime.driver import driver_or_none, usable_here
from kvraw.runtime.host.mapping import HostOptions
from kvraw.runtime.host.pool import HostPool
from kvraw.runtime.host.registration import is_registered
from kvraw.runtime.memory import Registration

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


@dataclass(frozen=True, slots=True)
class _Block:
    kind: str
    nbytes: int
    release: Callable[[], None]
    pinned: bool = True


_lock = fork.lock()
_live: dict[int, _Block] = {}


def _size(size: int) -> int:
    if size <= 0:
        raise BoundsError(f"size is {size}, must be positive")
    return int(size)


def _keep(address: int, block: _Block) -> int:
    with _lock:
        _live[address] = block
    return address


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
    if block.pinned and usable_here():
        try:
            device_state.drain()  # transfers may still use it
        except BaseException:
            with _lock:
                _live[ptr] = block
            raise
    block.release()


def _pin(address: int, nbytes: int, owner: object = None) -> Registration | None:
    """Register memory; None where there is no driver to register it with."""
    return None if driver_or_none() is None else Registration(address, nbytes, this_device(), owner=owner)


def _unmap_unregistered(address: int, nbytes: int) -> None:
    """Give memory back that could not be pinned; what the driver would not unregister stays mapped."""
    if not is_registered(address, nbytes):
        with contextlib.suppress(RuntimeError):
            _host.unmap(address, nbytes)


def alloc_pinned_ptr(size: int, flags: int = 0, *, device_id: int | None = None) -> int:
    """Pinned, mapped, zeroed memory, page-aligned; without a CUDA driver it is pageable.

    `flags` and `device_id` are accepted and change nothing: the memory is pinned for every device.
    """
    device = None if driver_or_none() is None else this_device()
    pool = HostPool(_size(size), device=device, options=HostOptions(populate=True))
    return _keep(pool.address, _Block("pinned", size, pool.close))


def free_pinned_ptr(ptr: int) -> None:
    """Give back what `alloc_pinned_ptr` gave."""
    _free("pinned", ptr, None)


def _mapped(kind: str, size: int, *, node: int | None, huge: bool, pin: bool) -> int:
    nbytes = _size(size)
    length = -(-nbytes // _host.HUGE_PAGE) * _host.HUGE_PAGE if huge else nbytes
    address = _host.map_memory(length, huge=huge)
    try:
        if node is not None:
            _host.bind(address, length, node)
        _host.populate(address, length, huge=huge)
        registration = _pin(address, length) if pin else None
    except BaseException:
        _unmap_unregistered(address, length)
        raise

    def release() -> None:
        if registration is not None:
            registration.close()
        _host.unmap(address, length)

    return _keep(address, _Block(kind, nbytes, release, pin))


def alloc_numa_ptr(size: int, numa_id: int = 0) -> int:
    """Pageable memory on a NUMA node."""
    return _mapped("numa", size, node=numa_id, huge=False, pin=False)


def free_numa_ptr(ptr: int, size: int | None = None) -> None:
    """Give back what `alloc_numa_ptr` gave."""
    _free("numa", ptr, size)


def alloc_pinned_numa_ptr(size: int, numa_id: int = 0) -> int:
    """Memory on a NUMA node, pinned where there is a CUDA driver."""
    return _mapped("pinned_numa", size, node=numa_id, huge=False, pin=True)


def free_pinned_numa_ptr(ptr: int, size: int | None = None) -> None:
    """Give back what `alloc_pinned_numa_ptr` gave."""
    _free("pinned_numa", ptr, size)


def alloc_hugepage_pinned_ptr(size: int, flags: int = 0, *, device_id: int | None = None) -> int:
    """Memory of 2 MiB pages out of the system's pool, pinned where there is a CUDA driver."""
    return _mapped("hugepage_pinned", size, node=None, huge=True, pin=True)


def free_hugepage_pinned_ptr(ptr: int, size: int = 0) -> None:
    """Give back what `alloc_hugepage_pinned_ptr` gave."""
    _free("hugepage_pinned", ptr, size)


def alloc_hugepage_pinned_numa_ptr(size: int, numa_id: int = 0) -> int:
    """Memory of 2 MiB pages on a NUMA node, pinned where there is a CUDA driver."""
    return _mapped("hugepage_pinned_numa", size, node=numa_id, huge=True, pin=True)


def free_hugepage_pinned_numa_ptr(ptr: int, size: int = 0) -> None:
    """Give back what `alloc_hugepage_pinned_numa_ptr` gave."""
    _free("hugepage_pinned_numa", ptr, size)


def alloc_shm_pinned_ptr(size: int, shm_name: str = "") -> int:
    """A shared segment of this name (one is made up if empty), pinned where there is a CUDA driver.

    A segment of the same name is stale, and is unlinked first. The segment is unlinked when the process exits; what
    one that was killed left is swept by the next one that allocates shared memory.
    """
    nbytes = _size(size)
    segment = _host.create_shared(shm_name, nbytes)
    address = segment.address
    try:
        registration = _pin(address, nbytes)
    except BaseException:
        segment.unlink()
        _unmap_unregistered(address, nbytes)
        raise

    def release() -> None:
        segment.unlink()  # by its inode: another process may have made the name anew
        if registration is not None:
            registration.close()
        _host.unmap(address, nbytes)

    return _keep(address, _Block("shm_pinned", nbytes, release))


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
