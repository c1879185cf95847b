"""Base addresses of one side of a copy, and where the memory behind them lies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvraw.arrays import U64
from kvraw.copying.given import first_uncovered
from kvraw.errors import PlacementError
from kvraw.runtime.driver import CudaDriver, driver_here
from kvraw.runtime.memory import Allocation, KnownMemory, Over, allocation, known_memory, locate, look
from kvraw.runtime.program import Program

__all__ = ["AddressTable", "Remembered", "ends_around", "remembered", "resolve"]

_MOST_TABLES = 256
_FEW = 64  # so many that a loop over them costs less than vectors do


@dataclass(frozen=True, slots=True, eq=False)
class AddressTable:
    """Base addresses that were resolved: the driver is not asked about them again. Not changed once made.

    Attributes
    ----------
    host, seen : numpy.ndarray of uint64
        As the host and as the device know them.
    link : bool
        Host memory is among them.
    edges : tuple of int
        Where registrations that they lie in end, whoever made them: no copy may span one.
    pageable : bool
        Pageable host memory is among them, which `seen` has as 0: for the copy engine alone.
    bits : int
        The alignment of `seen`, all or-ed together or less; -1: not known.
    devices : frozenset of int
        The devices that hold some of them, as far as it was asked.
    over : Over or None
        The first that goes over the end of device memory.

    Examples
    --------
    >>> memory = np.zeros(64, np.uint8)
    >>> bases = np.array([memory.ctypes.data], np.uint64)
    >>> len(kvraw.Reached(bases, bases, link=True))
    1
    """

    host: U64
    seen: U64
    link: bool
    edges: tuple[int, ...] = ()
    pageable: bool = False
    bits: int = -1
    devices: frozenset[int] = frozenset()
    over: Over | None = None

    def __len__(self) -> int:
        return len(self.host)

    @property
    def alignment(self) -> int:
        """`bits`, worked out once."""
        bits = self.bits
        if bits < 0:
            bits = int(np.bitwise_or.reduce(self.seen)) & 15 if len(self.seen) else 0
            object.__setattr__(self, "bits", bits)
        return bits

    def plus(self, nbytes: int) -> AddressTable:
        """Step behind each address.

        Parameters
        ----------
        nbytes : int
            How far.

        Returns
        -------
        AddressTable
            Of the addresses there, in the same memory.
        """
        if not nbytes:
            return self
        step = np.uint64(nbytes)
        return AddressTable(self.host + step, self.seen + step, self.link, self.edges)

    def require(
        self, device: int, name: str, places: Sequence[int] | None = None, *, pageable: bool = False, hint: str = ""
    ) -> None:
        """Raise where a kernel of a device that touches them faults.

        Parameters
        ----------
        device : int
            The device.
        name : str
            What errors call the addresses.
        places : sequence of int, optional
            What errors call their positions.
        pageable : bool
            Pageable memory is the caller's to know.
        hint : str
            What an error about that ends with.

        Raises
        ------
        PlacementError
            Another device holds one, or it is pageable.
        BoundsError
            One goes over the end of its memory.
        """
        if self.devices - {device}:
            at, held = next((k, w) for k, a in enumerate(self.host.tolist()) if (w := locate(a, 1).device) != device)
            raise PlacementError(
                f"{name}: {int(self.host[at]):#x} is memory of device {held}, must be of device {device} or the host's"
            )
        if self.over is not None:
            raise self.over.error(f"{name}[{places[self.over.at] if places else self.over.at}]")
        if self.pageable and not pageable:
            at = int(np.argmin(self.seen != 0))
            raise PlacementError(
                f"{name}[{places[at] if places else at}] at {int(self.host[at]):#x} is pageable host memory; kernels "
                f"take pinned, host-registered or device memory{hint}"
            )


class Remembered:
    """Where ranges lie, while the allocations that they lie in are there.

    Attributes
    ----------
    table : AddressTable
        Where.
    used : list of Allocation
        The allocations.
    """

    __slots__ = ("_known", "_program", "table", "used")

    def __init__(self, known: KnownMemory, table: AddressTable, used: list[Allocation]) -> None:
        self._known, self.table, self.used = known, table, used
        self._program: Program | None = None

    def holds(self, d: CudaDriver) -> bool:
        """Whether all are still there: one question to the driver for each, by one compiled function where several."""
        used = self.used
        if len(used) == 1:
            return d.pointer_number(used[0].start) == used[0].number
        program = self._program
        if program is None:
            program = self._program = self._known.program(d, used)
            if program is None:
                return self._known.same(d, used)
        with self._known.lock:
            return program.run()


def resolve(addresses: U64, nbytes: int | U64 = 1, *, ends: bool = False) -> AddressTable:
    """Where ranges lie, of one size or one each; those of no bytes may lie anywhere.

    The driver is asked for a number, once for each allocation that was asked about before, and for more where that is
    not as it was. Behind the first pageable range others may count as pageable too: nothing tells where pageable memory
    ends. With `ends` the `edges` have where pinned memory begins and ends in pageable ranges, but for islands inside.
    """
    d = driver_here()
    if d is not None:
        if isinstance(nbytes, int):
            if 0 < len(addresses) <= _FEW:
                known = known_memory(d)
                kept = remembered(known, addresses.tolist(), nbytes)
                if kept is not None:
                    if kept.holds(d):
                        return kept.table
                    known.tables.clear()  # something was freed, or pinned otherwise
            sizes = np.array([nbytes], np.uint64)
        else:
            sizes = nbytes
        found = _covered(d, addresses, sizes)
        if found is not None:
            return found
    return _one_by_one(d, addresses, nbytes, ends)


def remembered(known: KnownMemory, places: Sequence[int], nbytes: int) -> Remembered | None:
    """Where a few ranges of one size lie, at least one, if all memory there was asked about before; else None.

    It is right if `Remembered.holds` says so.
    """
    key = (nbytes, *places)
    found: Remembered | None = known.tables.get(key)
    if found is not None:
        return found
    starts, allocations = known.table
    used: dict[int, Allocation] = {}
    last: Allocation | None = None
    for address in places:
        if last is None or not last.start <= address <= last.stop - nbytes:
            at = bisect_right(starts, address) - 1
            if at < 0 or address > allocations[at].stop - nbytes:
                return None
            last = allocations[at]
            used[last.start] = last
    kept = list(used.values())
    found = Remembered(known, _table(np.array(places, np.uint64), kept), kept)
    if len(known.tables) >= _MOST_TABLES:
        known.tables.clear()
    known.tables[key] = found
    return found


def _table(host: U64, used: list[Allocation]) -> AddressTable:
    """Ranges that lie within these allocations."""
    seen, held = host, {a.device for a in used}
    shift = used[0].shift if used else 0
    if len(used) > 1 and {a.shift for a in used} != {shift}:
        used.sort()
        at = np.searchsorted(np.array([a.start for a in used], np.uint64), host, "right").astype(np.int64) - 1
        seen = host + np.array([a.shift % 2**64 for a in used], np.uint64)[np.maximum(at, 0)]
    elif shift:
        seen = host + np.uint64(shift % 2**64)
    devices = frozenset([device for device in held if device is not None])
    return AddressTable(host, seen, None in held, tuple([a.stop for a in used]), devices=devices)


def _covered(d: CudaDriver, addresses: U64, sizes: U64) -> AddressTable | None:
    """Where ranges lie that are each within one allocation that is kept; None where some is not, or was freed."""
    known = known_memory(d)
    begin, learnt, new = 0, True, 0
    while learnt:
        allocations, starts, stops = known.vectors()
        met, learnt = np.zeros(len(starts), np.uint8), False
        at = first_uncovered(addresses, sizes, begin, starts, stops, met)
        if at >= 0:
            address, size = int(addresses[at]), int(sizes[at if len(sizes) > 1 else 0])
            made = allocation(d, address)
            if made is None or not made.number or not made.start <= address <= made.stop - size:
                return None
            begin, learnt, new = at, True, new + 1
            if len(known.table[0]) < new:  # more than are kept, or another thread has them asked about anew
                return None
        elif begin:  # what lies ahead of what was learnt is to be marked as well
            begin, learnt = 0, True
    used = [allocations[k] for k in met.nonzero()[0].tolist()]
    if known.same(d, used):
        return _table(addresses, used)
    known.drop([a for a in used if not known.same(d, [a])])  # freed, or pinned otherwise
    return _covered(d, addresses, sizes)


def _one_by_one(d: CudaDriver | None, addresses: U64, nbytes: int | U64, ends: bool) -> AddressTable:
    count = len(addresses)
    sizes = [nbytes] * count if isinstance(nbytes, int) else nbytes.tolist()
    seen, edges, devices = [0] * count, list[int](), set[int]()
    inside, shift, over, link, pageable = range(0), 0, None, False, False
    for at, (address, size) in enumerate(zip(addresses.tolist(), sizes, strict=True)):
        if pageable or address not in inside or address + size > inside.stop:
            where, inside = look(address, size) if not pageable or ends else (None, range(0))
            if where is None or not where.device_address:
                pageable = link = True
                if ends and d is not None:
                    edges += ends_around(d, address, size)
                continue
            edges += where.edges
            shift = where.device_address - address
            if where.device is None:
                link = True
            else:
                devices.add(where.device)
                if where.over and over is None:
                    over = Over(at, address, size, where.over, where.device)
        seen[at] = address + shift
    return AddressTable(
        addresses, np.array(seen, np.uint64), link, tuple(dict.fromkeys(edges)), pageable, -1, frozenset(devices), over
    )


def ends_around(d: CudaDriver, address: int, nbytes: int) -> list[int]:
    """Where pinned memory begins and ends in a range that counts as pageable, but for islands inside it."""
    found = [d.pointer_info(at) for at in (address, address + nbytes - 1)]
    return [edge for info in found if info is not None for edge in (info.base, info.base + info.size)]
