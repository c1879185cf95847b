"""Where ranges of memory lie that callers name anew at each call: allocations that were asked about are kept."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np

from kvraw.arrays import U64
from kvraw.copying.bound_copies import ends_around
from kvraw.copying.given import first_uncovered
from kvraw.runtime import fork
from kvraw.runtime.context import at_reset
from kvraw.runtime.driver import CudaDriver, driver_or_none
from kvraw.runtime.memory import Over, locate_all

__all__ = ["Ranges", "find_ranges"]

_MOST = 1024


class Ranges(NamedTuple):
    """Where ranges of memory lie.

    Attributes
    ----------
    seen : numpy.ndarray of uint64
        Their addresses as a GPU sees them; 0 where a range is pageable.
    devices : frozenset of int
        The devices that hold some of them.
    link, pageable : bool
        Host memory is among them; pageable memory is.
    edges : tuple of int
        Where allocations and registrations that they lie in end: copies of neighbours must not grow over one.
    over : Over or None
        A range that goes over the end of device memory.
    """

    seen: U64
    devices: frozenset[int]
    link: bool = False
    pageable: bool = False
    edges: tuple[int, ...] = ()
    over: Over | None = None


class _Allocation(NamedTuple):
    """Device memory, or pinned host memory (device -1) and what to add for a GPU's view; the driver's number of it."""

    start: int
    stop: int
    device: int
    shift: int
    number: int


class _Places:
    """Allocations that do not overlap, by ascending addresses."""

    def __init__(self) -> None:
        self.lock = fork.lock()
        self.known: list[_Allocation] = []
        self._arrange()

    def _arrange(self) -> None:
        self.known.sort()
        self.starts, self.stops = (np.array([a[k] for a in self.known], np.uint64) for k in (0, 1))

    def forget(self) -> None:
        """Ask anew about everything."""
        self.known.clear()
        self._arrange()

    def learn(self, d: CudaDriver, address: int) -> bool:
        """Ask about the allocation around an address; False where it is not to be kept."""
        info, number = d.pointer_info(address), d.pointer_number(address)
        if info is None or not number or info.kind == "managed" or number != d.pointer_number(info.base):
            return False
        host = info.kind == "host"
        if host and not info.device_address:
            return False
        shift = info.device_address - address if host else 0
        made = _Allocation(info.base, info.base + info.size, -1 if host else info.device, shift, number)
        apart = [a for a in self.known if a.stop <= made.start or made.stop <= a.start]
        self.known = [*(apart if len(apart) < _MOST else ()), made]
        self._arrange()
        return True

    def find(self, d: CudaDriver, addresses: U64, sizes: U64) -> Ranges | None:
        """Where ranges lie, each within one allocation; None where some does not."""
        begin, learnt = 0, True
        while learnt:
            met, learnt = np.zeros(len(self.known), np.uint8), False
            at = first_uncovered(addresses, sizes, begin, self.starts, self.stops, met)
            if at >= 0:
                address, size = int(addresses[at]), int(sizes[at if len(sizes) > 1 else 0])
                if not self.learn(d, address) or not any(a.start <= address <= a.stop - size for a in self.known):
                    return None
                begin, learnt = at, True
            elif begin:  # what lies ahead of what was learnt is to be marked as well
                begin, learnt = 0, True
        used = [self.known[k] for k in met.nonzero()[0].tolist()]
        if any(d.pointer_number(a.start) != a.number for a in used):
            return None
        seen = addresses
        if any(a.shift for a in used):
            place = np.maximum(np.searchsorted(self.starts, addresses, "right").astype(np.int64) - 1, 0)
            seen = addresses + np.array([a.shift % 2**64 for a in self.known], np.uint64)[place]
        devices = frozenset(a.device for a in used if a.device >= 0)
        return Ranges(seen, devices, any(a.device < 0 for a in used), edges=tuple(a.stop for a in used))


_places: weakref.WeakKeyDictionary[CudaDriver, _Places] = weakref.WeakKeyDictionary()
at_reset(_places.clear)


def find_ranges(addresses: U64, nbytes: int | U64) -> Ranges:
    """Where ranges lie, of one size or one each, at least one; those of no bytes may lie anywhere.

    The driver is asked for a number, once for each allocation, and for more where that is not as it was.
    """
    d = driver_or_none()
    if d is None:
        return _find_slowly(addresses, nbytes)
    places = _places.get(d)
    if places is None:
        places = _places.setdefault(d, _Places())
    sizes = np.array([nbytes], np.uint64) if isinstance(nbytes, int) else nbytes
    with places.lock:
        for _ in range(2):
            found = places.find(d, addresses, sizes)
            if found is not None:
                return found
            places.forget()  # something was freed, or pinned otherwise
    return _find_slowly(addresses, nbytes)


def _find_slowly(addresses: U64, nbytes: int | U64) -> Ranges:
    seen, devices, edges = np.zeros_like(addresses), np.full(len(addresses), -1, np.int64), list[int]()
    over: Over | None = None
    sizes = [nbytes] if isinstance(nbytes, int) else np.unique(nbytes).tolist()
    for size in sizes:
        mine = slice(None) if isinstance(nbytes, int) else nbytes == size
        found = locate_all(addresses[mine], size)
        seen[mine], devices[mine] = found.seen, found.devices
        edges += found.edges
        if found.over is not None:
            at = found.over.at if isinstance(nbytes, int) else int(np.flatnonzero(nbytes == size)[found.over.at])
            if over is None or at < over.at:
                over = found.over._replace(at=at)
        if found.pageable:
            for address in addresses[mine][found.seen == 0].tolist():
                edges += ends_around(address, size)
    held = frozenset(d for d in np.unique(devices).tolist() if d >= 0)
    return Ranges(seen, held, bool((devices < 0).any()), not seen.all(), tuple(set(edges)), over)
