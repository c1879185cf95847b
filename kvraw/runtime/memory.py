"""Device memory and pinned memory; where an address lies."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvraw.errors import BoundsError, DriverError, PlacementError
from kvraw.runtime.closeable import Owner
from kvraw.runtime.context import DeviceScope, FreshScope, active_device, at_reset
from kvraw.runtime.driver import CudaDriver, driver, driver_here
from kvraw.runtime.host.registration import Registration as Registration

__all__ = [
    "DeviceBuffer",
    "Located",
    "Over",
    "PinnedBuffer",
    "Registration",
    "Where",
    "held_at",
    "held_by",
    "locate",
    "locate_all",
    "pinned_at",
]


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
        Where the allocation, or registrations, that the range lies in end, whoever made them: no copy may span one.
    over : int
        Where device memory ends that the range goes over the end of; 0: it does not.
    """

    device: int | None
    device_address: int
    edges: tuple[int, ...] = ()
    over: int = 0


PAGEABLE = Where(None, 0)


class _Allocation(NamedTuple):
    """An allocation or a registration: its addresses, what to add for a GPU's view, and the device that holds it."""

    start: int
    stop: int
    shift: int
    device: int | None


_MOST_KNOWN = 4096
_known: weakref.WeakKeyDictionary[CudaDriver, dict[int, _Allocation]] = weakref.WeakKeyDictionary()
at_reset(_known.clear)


def _allocation(d: CudaDriver, address: int) -> _Allocation | None:
    """The allocation around an address; None for pageable memory.

    The number that the driver gives each allocation, and never again, costs a fifth of asking for all about it: what
    was asked about pinned memory before is taken as it was found while the number is the same.
    """
    known = _known.get(d)
    if known is None:
        known = _known.setdefault(d, {})
    number = d.pointer_number(address)
    found = known.get(number) if number else None
    if found is not None and found.start <= address < found.stop:
        return found
    # Without a current context the driver does not tell where a GPU sees memory that is pinned.
    other = active_device() if d.context_device() < 0 else None
    if other is None:
        info = d.pointer_info(address)
    else:
        with DeviceScope(other):
            info = d.pointer_info(address)
    if info is None or (info.kind == "host" and not info.device_address):
        return None
    device = None if info.kind == "host" else info.device
    if info.kind == "managed":  # every device may touch it
        current = d.context_device()
        device = current if current >= 0 else info.device if other is None else other
    shift = info.device_address - address if device is None else 0
    found = _Allocation(info.base, info.base + info.size, shift, device)
    if number and device is None:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[number] = found
    return found


def _look(address: int, nbytes: int) -> tuple[Where, range]:
    """Where a range lies, and the allocation that it begins in."""
    d = driver_here()
    found = _allocation(d, address) if d is not None else None
    if d is None or found is None:
        return PAGEABLE, range(0)
    inside = range(found.start, found.stop)
    end, reach = address + max(nbytes, 1), found.stop
    edges = [reach]
    if found.device is not None:
        while reach < end and d.pointer_in_pieces(reach - 1):
            following = _allocation(d, reach)
            if following is None or following.device != found.device or not d.pointer_in_pieces(reach):
                break
            reach = following.stop
            edges.append(reach)
        return Where(found.device, address, tuple(edges), reach if reach < end else 0), inside
    # A range over several registrations is one range for a kernel when they are neighbours at one distance.
    while reach < end:
        following = _allocation(d, reach)
        if following is None or following.device is not None or following.shift != found.shift:
            return PAGEABLE, range(0)
        reach = following.stop
        edges.append(reach)
    return Where(None, address + found.shift, tuple(edges)), inside


def locate(address: int, nbytes: int) -> Where:
    """Ask the driver where a range lies; a range that is only partly pinned counts as pageable."""
    return _look(address, nbytes)[0]


def held_at(address: int, device: int) -> tuple[int, int, int]:
    """Begin and end of the memory of a device around an address, and its number; all 0 where it is none.

    The device's context is current.
    """
    d = driver()
    found = _allocation(d, address)
    return (
        (0, 0, 0) if found is None or found.device != device else (found.start, found.stop, d.pointer_number(address))
    )


def pinned_at(address: int) -> tuple[int, int, int, int]:
    """Begin and end of the pinned memory around an address, what a GPU's view adds, and its number.

    All 0 where it is no pinned memory, or has no number. A device's context is current.
    """
    d = driver()
    found = _allocation(d, address)
    number = d.pointer_number(address)
    return (0, 0, 0, 0) if found is None or found.device is not None else (found.start, found.stop, found.shift, number)


def held_by(address: int) -> int | None:
    """The device that holds an address, as far as the driver answers; None for host memory.

    An earlier error, which a driver in that state gives as every call's answer, is not the business of whoever has
    nothing to do with GPUs.
    """
    try:
        return _look(address, 1)[0].device
    except DriverError:
        return None


class Over(NamedTuple):
    """A range that goes over the end of device memory: its place among those looked up, and where the memory ends."""

    at: int
    address: int
    nbytes: int
    stop: int
    device: int

    def error(self, name: str) -> BoundsError:
        """The error for it."""
        return BoundsError(
            f"{name} is {self.address:#x}, with {self.nbytes} bytes it goes over the end of its memory on device "
            f"{self.device} at {self.stop:#x}"
        )


class Located(NamedTuple):
    """Where ranges lie.

    Attributes
    ----------
    seen : numpy.ndarray of uint64
        Their addresses as a GPU sees them; 0 where a range is pageable.
    devices : numpy.ndarray of int64
        The device that holds each; -1 for host memory.
    edges : tuple of int
        Where allocations and registrations that the ranges lie in end, whoever made them: no copy may span one.
    over : Over or None
        The first range that goes over the end of device memory.
    """

    seen: npt.NDArray[np.uint64]
    devices: npt.NDArray[np.int64]
    edges: tuple[int, ...] = ()
    over: Over | None = None

    @property
    def pageable(self) -> bool:
        """Whether pageable memory is among them."""
        return not self.seen.all()

    @property
    def link(self) -> bool:
        """Whether host memory is among them."""
        return bool((self.devices < 0).any())

    def require(self, device: int, name: str) -> None:
        """Raise where a kernel that touches them faults.

        Raises
        ------
        PlacementError
            Another device holds one.
        BoundsError
            One goes over the end of its memory.
        """
        apart = (self.devices >= 0) & (self.devices != device)
        if apart.any():
            at = int(np.argmax(apart))
            raise PlacementError(
                f"{name}: {int(self.seen[at]):#x} is memory of device {self.devices[at]}, must be of device {device} "
                f"or the host's"
            )
        if self.over is not None:
            raise self.over.error(f"{name}[{self.over.at}]")


_ONE_BY_ONE = 64


def _locate_few(addresses: list[int], nbytes: int) -> Located:
    """`locate_all` for so few that a loop over them costs less than vectors do."""
    seen, devices = [0] * len(addresses), [-1] * len(addresses)
    edges: list[int] = []
    inside, shift, device = range(0), 0, -1
    over: Over | None = None
    for at, address in enumerate(addresses):
        if address not in inside or address + nbytes > inside.stop:
            where, inside = _look(address, nbytes)
            if not where.device_address:
                break
            edges += where.edges
            shift, device = where.device_address - address, -1 if where.device is None else where.device
            if where.over and over is None:
                over = Over(at, address, nbytes, where.over, device)
        seen[at], devices[at] = address + shift, device
    return Located(np.array(seen, np.uint64), np.array(devices, np.int64), tuple(edges), over)


def locate_all(addresses: npt.NDArray[np.uint64], nbytes: int = 1) -> Located:
    """`locate` for many ranges of one size, with one question to the driver per allocation.

    Behind the first pageable range others may count as pageable too: nothing tells where pageable memory ends.
    """
    if len(addresses) <= _ONE_BY_ONE:
        return _locate_few(addresses.tolist(), nbytes)
    seen, devices = np.zeros_like(addresses), np.full(len(addresses), -1, np.int64)
    edges: list[int] = []
    over: Over | None = None
    left = np.arange(len(addresses))
    while len(left):
        first = int(addresses[left[0]])
        where, allocation = _look(first, 1)
        if not where.device_address:
            break
        at = addresses[left]
        if first not in allocation:
            allocation = range(first, first + 1)
        end = np.uint64(allocation.stop)
        inside = (at >= np.uint64(allocation.start)) & (at < end)
        mine, at = left[inside], at[inside]
        seen[mine] = at + np.uint64((where.device_address - first) % 2**64)
        edges += where.edges
        if where.device is not None:
            devices[mine] = where.device
        for k in mine[at + np.uint64(nbytes) > end]:  # over the end: of a registration, and another may follow
            whole = locate(int(addresses[k]), nbytes)
            seen[k] = whole.device_address
            edges += whole.edges
            if whole.over and whole.device is not None:
                over = Over(int(k), int(addresses[k]), nbytes, whole.over, whole.device)
                break
        left = left[~inside]
    return Located(seen, devices, tuple(edges), over)


class DeviceBuffer(Owner):
    """Device memory, freed on close (the driver waits for the device then). Libraries take it as an array of bytes.

    Parameters
    ----------
    nbytes : int
        Bytes.
    device : int
        Where.

    Raises
    ------
    DriverNotFoundError, DriverError
        There is no such device, or not as much memory.

    Examples
    --------
    >>> with kvraw.DeviceBuffer(1 << 20, device=0) as memory:
    ...     memory.nbytes
    1048576
    """

    def __init__(self, nbytes: int, device: int) -> None:
        self.nbytes, self.device = nbytes, device
        d = driver()
        with FreshScope(device):
            self.address = d.mem_alloc(max(nbytes, 1))
        self._own_handle(device, "mem_free", self.address)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        self.require_open()
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


class PinnedBuffer(Owner):
    """`nbytes` of page-locked host memory from the driver, with the address at which a device sees it."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.nbytes, self.device = nbytes, device
        d = driver()
        with FreshScope(device):
            self.address = d.host_alloc(max(nbytes, 1))
            self._own_handle(device, "host_free", self.address)
            try:
                self.device_address = d.host_device_address(self.address)
            except BaseException:
                self.close()
                raise
