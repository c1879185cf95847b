"""Device memory and pinned memory; where an address lies."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvraw.errors import BoundsError, DriverError
from kvraw.runtime import fork
from kvraw.runtime.closeable import Owner
from kvraw.runtime.context import DeviceScope, FreshScope, active_device, at_reset
from kvraw.runtime.driver import CudaDriver, driver, driver_here
from kvraw.runtime.host.registration import Registration as Registration
from kvraw.runtime.program import Commands, Program

__all__ = [
    *("Allocation", "DeviceBuffer", "KnownMemory", "Over", "PinnedBuffer", "Registration", "Where"),
    *("allocation", "held_at", "held_by", "known_memory", "locate", "look", "pinned_at"),
]

U64 = npt.NDArray[np.uint64]


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


PAGEABLE = Where(None, 0)


class Allocation(NamedTuple):
    """An allocation or a registration: its addresses, and what is known of it.

    Attributes
    ----------
    start, stop : int
        Its addresses.
    shift : int
        What to add to an address for a GPU's view.
    device : int or None
        The device that holds it; None for pinned host memory.
    number : int
        The driver's number of it, which no other ever gets; 0: nothing says cheaply when it is gone.
    """

    start: int
    stop: int
    shift: int
    device: int | None
    number: int


_MOST_KNOWN, _MOST_PROGRAMS = 4096, 64


class KnownMemory:
    """Allocations of one driver that were asked about, disjoint, by ascending addresses.

    Any may have been freed since: each is as it was while its first address has the number that it had. To ask for the
    number costs a fifth of asking for all about it.

    Attributes
    ----------
    table : tuple of list
        Where the allocations begin, and the allocations: replaced as a whole, to be read without a lock.
    tables : dict
        What `kvraw.copying.addresses` keeps of ranges that lie in them.
    """

    def __init__(self) -> None:
        self.lock = fork.lock()
        self.table: tuple[list[int], list[Allocation]] = ([], [])
        self.tables: dict[tuple[int, ...], Any] = {}
        self._vectors: tuple[object, U64, U64] | None = None
        self._programs: dict[tuple[int, ...], Program | None] = {}

    def keep(self, made: Allocation) -> None:
        """Add an allocation, in place of all that lie where it does."""
        with self.lock:
            apart = [a for a in self.table[1] if a.stop <= made.start or made.stop <= a.start]
            self._publish([*(apart if len(apart) < _MOST_KNOWN else ()), made])

    def drop(self, gone: Iterable[Allocation]) -> None:
        """Forget allocations."""
        with self.lock:
            numbers = {a.number for a in gone}
            self._publish([a for a in self.table[1] if a.number not in numbers])
            self.tables.clear()
            self._programs.clear()

    def _publish(self, known: list[Allocation]) -> None:
        known.sort()
        self.table = [a.start for a in known], known

    def around(self, d: CudaDriver, address: int) -> Allocation | None:
        """The allocation around an address, if it is still there."""
        starts, known = self.table
        found = known[bisect_right(starts, address) - 1] if starts else None
        if found is None or not found.start <= address < found.stop:
            return None
        if self.same(d, [found]):
            return found
        self.drop([found])
        return None

    def vectors(self) -> tuple[list[Allocation], U64, U64]:
        """The allocations, and where they begin and end."""
        starts, known = table = self.table
        made = self._vectors
        if made is None or made[0] is not table:
            made = table, np.array(starts, np.uint64), np.array([a.stop for a in known], np.uint64)
            self._vectors = made
        return known, made[1], made[2]

    @staticmethod
    def same(d: CudaDriver, used: Collection[Allocation]) -> bool:
        """Whether all of these are still there."""
        return [d.pointer_number(a.start) for a in used] == [a.number for a in used]

    def program(self, d: CudaDriver, used: Collection[Allocation]) -> Program | None:
        """The same as a program, to be run under the lock; None at the first time."""
        key = tuple([a.number for a in used])
        with self.lock:
            program = self._programs.get(key)
            if program is None:
                again = key in self._programs
                if len(self._programs) >= _MOST_PROGRAMS:
                    self._programs.clear()
                if again:
                    c = Commands()
                    for a in used:
                        c.same_memory(a.start, a.number)
                    program = Program(c, d)
                self._programs[key] = program
        return program


_known: weakref.WeakKeyDictionary[CudaDriver, KnownMemory] = weakref.WeakKeyDictionary()


def _forget() -> None:
    for known in list(_known.values()):
        known.drop(known.table[1])


at_reset(_forget)


def known_memory(d: CudaDriver) -> KnownMemory:
    """What was asked about of a driver's memory."""
    found = _known.get(d)
    return _known.setdefault(d, KnownMemory()) if found is None else found


def allocation(d: CudaDriver, address: int) -> Allocation | None:
    """The allocation around an address; None for pageable memory."""
    known = known_memory(d)
    found = known.around(d, address)
    if found is not None:
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
    device, number = None if info.kind == "host" else info.device, d.pointer_number(address)
    if info.kind == "managed":  # every device may touch it
        current = d.context_device()
        device, number = current if current >= 0 else info.device if other is None else other, 0
    shift = info.device_address - address if device is None else 0
    if number and d.pointer_number(info.base) != number:
        number = 0
    found = Allocation(info.base, info.base + info.size, shift, device, number)
    if number:
        known.keep(found)
    return found


def look(address: int, nbytes: int) -> tuple[Where, range]:
    """Where a range lies, and the allocation that it begins in."""
    d = driver_here()
    found = allocation(d, address) if d is not None else None
    if d is None or found is None:
        return PAGEABLE, range(0)
    inside = range(found.start, found.stop)
    end, reach = address + max(nbytes, 1), found.stop
    edges = [reach]
    if found.device is not None:
        while reach < end and d.pointer_in_pieces(reach - 1):
            following = allocation(d, reach)
            if following is None or following.device != found.device or not d.pointer_in_pieces(reach):
                break
            reach = following.stop
            edges.append(reach)
        return Where(found.device, address, tuple(edges), reach if reach < end else 0), inside
    # A range over several registrations is one range for a kernel when they are neighbours at one distance.
    while reach < end:
        following = allocation(d, reach)
        if following is None or following.device is not None or following.shift != found.shift:
            return PAGEABLE, range(0)
        reach = following.stop
        edges.append(reach)
    return Where(None, address + found.shift, tuple(edges)), inside


def locate(address: int, nbytes: int) -> Where:
    """Ask the driver where a range lies; a range that is only partly pinned counts as pageable."""
    return look(address, nbytes)[0]


def held_at(address: int, device: int) -> tuple[int, int, int]:
    """Begin and end of the memory of a device around an address, and its number; all 0 where it is none.

    The device's context is current.
    """
    found = allocation(driver(), address)
    return (0, 0, 0) if found is None or found.device != device else (found.start, found.stop, found.number)


def pinned_at(address: int) -> tuple[int, int, int, int]:
    """Begin and end of the pinned memory around an address, what a GPU's view adds, and its number.

    All 0 where it is no pinned memory. A device's context is current.
    """
    found = allocation(driver(), address)
    if found is None or found.device is not None:
        return 0, 0, 0, 0
    return found.start, found.stop, found.shift, found.number


def held_by(address: int) -> int | None:
    """The device that holds an address, as far as the driver answers; None for host memory.

    An earlier error, which a driver in that state gives as every call's answer, is not the business of whoever has
    nothing to do with GPUs.
    """
    try:
        return look(address, 1)[0].device
    except DriverError:
        return None


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
