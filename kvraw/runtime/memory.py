"""Device memory and pinned memory; where an address lies."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import CudaDriver, driver, driver_if, driver_or_none
from kvraw.runtime.owner import Owner
from kvraw.runtime.register import Registration as Registration

__all__ = ["DeviceBuffer", "PinnedBuffer", "Registration", "Where", "locate", "locate_all"]


@dataclass(frozen=True, slots=True)
class Where:
    """Where an address range lies.

    Attributes
    ----------
    device : int or None
        The device that holds it; None for host memory.
    device_address : int
        Address at which a GPU sees it; 0 for pageable memory.
    edges : tuple of int
        Addresses inside the range where one registration ends and the next begins, whoever registered it.
    """

    device: int | None
    device_address: int
    edges: tuple[int, ...] = ()


PAGEABLE = Where(None, 0)


def _look(address: int, nbytes: int) -> tuple[Where, range]:
    """Where a range lies, and the allocation that it begins in."""
    d = driver_or_none()
    info = d.pointer_info(address) if d is not None else None
    if d is None or info is None:
        return PAGEABLE, range(0)
    inside = range(info.base, info.base + info.size)
    if info.kind != "host":
        return Where(info.device, address), inside
    # A range over several registrations is one range for a kernel when they are neighbours at one distance.
    end = address + max(nbytes, 1)
    reach, shift = inside.stop, info.device_address - address
    edges = []
    while reach < end:
        edges.append(reach)
        following = d.pointer_info(reach)
        if following is None or following.kind != "host" or following.device_address - reach != shift:
            return PAGEABLE, range(0)
        reach = following.base + following.size
    return Where(None, info.device_address, tuple(edges)), inside


def locate(address: int, nbytes: int) -> Where:
    """Ask the driver where a range lies; a range that is only partly pinned counts as pageable."""
    return _look(address, nbytes)[0]


def locate_all(addresses: Iterable[int], nbytes: int) -> list[Where]:
    """Where ranges of one size lie; the driver is asked once for neighbours in one allocation."""
    out: list[Where] = []
    inside, first, before = range(0), PAGEABLE, 0
    for address in addresses:
        if inside.start <= address and address + nbytes <= inside.stop:
            out.append(Where(first.device, first.device_address + address - before))
        else:
            first, inside = _look(address, nbytes)
            before = address
            out.append(first)
    return out


def _free_device(known: weakref.ref[CudaDriver], device: int, address: int) -> None:
    d = driver_if(known)
    if d is not None:
        with DeviceScope(device):
            d.mem_free(address)


class DeviceBuffer(Owner):
    """`nbytes` of device memory, freed on close (the driver waits for the device then)."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.nbytes, self.device = nbytes, device
        d = driver()
        with DeviceScope(device):
            self.address = d.mem_alloc(max(nbytes, 1))
        self._finalizer = weakref.finalize(self, _free_device, weakref.ref(d), device, self.address)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        self.require_open()
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def _free_pinned(known: weakref.ref[CudaDriver], device: int, address: int) -> None:
    d = driver_if(known)
    if d is not None:
        with DeviceScope(device):
            d.host_free(address)


class PinnedBuffer(Owner):
    """`nbytes` of page-locked host memory from the driver, with the address at which a device sees it."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.nbytes = nbytes
        d = driver()
        with DeviceScope(device):
            self.address = d.host_alloc(max(nbytes, 1))
            self._finalizer = weakref.finalize(self, _free_pinned, weakref.ref(d), device, self.address)
            try:
                self.device_address = d.host_device_address(self.address)
            except BaseException:
                self.close()
                raise
