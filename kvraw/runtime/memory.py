"""Device memory, pinned memory, and host memory registered in place."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
import weakref
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvraw.errors import BoundsError, ClosedError, DriverError
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import CudaDriver, driver, driver_if, driver_or_none

__all__ = ["DeviceBuffer", "PinnedBuffer", "Registration", "Where", "boundaries", "locate", "locate_all"]

REGISTER_STEP = 64 << 30  # one registration of 512 GiB or more fails on r580; stay well below


@dataclass(frozen=True, slots=True)
class Where:
    """Where an address range lies.

    Attributes
    ----------
    device : int or None
        The device that holds it; None for host memory.
    device_address : int
        Address at which a GPU sees it; 0 for pageable memory.
    """

    device: int | None
    device_address: int


PAGEABLE = Where(None, 0)


def locate(address: int, nbytes: int) -> Where:
    """Ask the driver where a range lies; a range that is only partly pinned counts as pageable."""
    d = driver_or_none()
    info = d.pointer_info(address) if d is not None else None
    if d is None or info is None:
        return PAGEABLE
    if info.kind != "host":
        return Where(info.device, address)
    # A range over several registrations is one range for a kernel when they are neighbours at one distance.
    end = address + max(nbytes, 1)
    reach, shift = info.base + info.size, info.device_address - address
    while reach < end:
        following = d.pointer_info(reach)
        if following is None or following.kind != "host" or following.device_address - reach != shift:
            return PAGEABLE
        reach = following.base + following.size
    return Where(None, info.device_address)


def locate_all(addresses: npt.NDArray[np.uint64], nbytes: int = 1) -> tuple[npt.NDArray[np.uint64], set[int | None]]:
    """`locate` for many ranges of one size, with one question to the driver per allocation.

    Returns the addresses as a GPU sees them, and the devices that hold them (None: the host). An address is 0 where the
    range is pageable; behind the first such one, they all are: nothing tells where pageable memory ends.
    """
    seen = np.zeros_like(addresses)
    devices: set[int | None] = set()
    d = driver_or_none()
    left = np.arange(len(addresses))
    while len(left) and d is not None:
        first = int(addresses[left[0]])
        info = d.pointer_info(first)
        if info is None:
            break
        host = info.kind == "host"
        known = info.base <= first < info.base + info.size
        base, end = (np.uint64(x) for x in ((info.base, info.base + info.size) if known else (first, first + 1)))
        at = addresses[left]
        inside = (at >= base) & (at < end)
        over = np.flatnonzero(inside & (at + np.uint64(nbytes) > end)) if host else ()
        for k in over:  # over the end of a registration: another may follow
            if not locate(int(at[k]), nbytes).device_address:
                return seen, devices | {None}
        shift = np.uint64((info.device_address - first) % 2**64) if host else np.uint64(0)
        seen[left[inside]] = at[inside] + shift
        devices.add(None if host else info.device)
        left = left[~inside]
    return seen, devices | ({None} if len(left) else set())


class _Owner:
    """What has an address, a size and a finalizer; closing is idempotent."""

    address: int
    nbytes: int
    _finalizer: weakref.finalize  # type: ignore[type-arg]

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Give it back. Idempotent."""
        self._finalizer()

    def require_open(self) -> None:
        """Raise `ClosedError` where it was closed."""
        if self.closed:
            raise ClosedError(f"the {type(self).__name__} at {self.address:#x} is closed")

    def __enter__(self) -> _Owner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _free_device(known: weakref.ref[CudaDriver], device: int, address: int) -> None:
    d = driver_if(known)
    if d is not None:
        with DeviceScope(device):
            d.mem_free(address)


class DeviceBuffer(_Owner):
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


class PinnedBuffer(_Owner):
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


_lock = threading.Lock()
# What kvraw registered with each driver: (address, end), sorted.
_ranges: weakref.WeakKeyDictionary[CudaDriver, list[tuple[int, int]]] = weakref.WeakKeyDictionary()
_stuck: list[tuple[list[tuple[int, int]], object]] = []


def _unregister(
    known: weakref.ref[CudaDriver], device: int, pieces: list[tuple[int, int]], owner: object = None
) -> None:
    mine = tuple(pieces)
    d = driver_if(known)
    failed: Exception | None = None
    left: list[tuple[int, int]] = []
    if d is not None:
        try:
            with DeviceScope(device):
                while pieces:
                    try:
                        d.host_unregister(pieces[-1][0])
                    except DriverError as error:
                        failed = failed or error
                        left.append(pieces[-1])
                    pieces.pop()
        except DriverError as error:
            failed = error
            left += pieces
    with _lock:
        # A range that the driver would not let go must stay mapped: its address would be taken for registered memory.
        if left:
            _stuck.append((left, owner))
        if d is not None:
            gone = {piece for piece in mine if piece not in left}
            _ranges[d] = [r for r in _ranges.get(d, []) if r not in gone]
    if failed is not None:
        raise failed


def _register(d: CudaDriver, piece: tuple[int, int], pieces: list[tuple[int, int]]) -> None:
    begin, end = piece
    with _lock:
        ranges = _ranges.setdefault(d, [])
        near = bisect.bisect_left(ranges, piece)
        for other in ranges[max(near - 1, 0) : near + 1]:
            if other[0] < end and begin < other[1]:
                raise BoundsError(
                    f"address {begin:#x}, {end - begin} bytes overlaps the registration of {other[0]:#x}, "
                    f"{other[1] - other[0]} bytes"
                )
        d.host_register(begin, end - begin)
        bisect.insort(ranges, piece)
        pieces.append(piece)


def boundaries() -> npt.NDArray[np.uint64]:
    """Addresses, ascending, where one registration of ours ends and the next begins: no copy may span them."""
    d = driver()
    with _lock:
        ranges = _ranges.get(d, [])
        return np.array([a[1] for a, b in itertools.pairwise(ranges) if a[1] == b[0]], np.uint64)


class Registration(_Owner):
    """Host memory pinned in place, in steps, rolled back whole where a step fails.

    Parameters
    ----------
    address, nbytes : int
        The range. It is borrowed, and must stay mapped until `close`.
    device : int
        A device, in whose context the memory is registered; every device can use it.
    step : int
        Bytes per registration.
    owner : object, optional
        Kept alive until the memory is unregistered.

    Raises
    ------
    BoundsError
        The range overlaps one that is registered already.
    DriverError
        The driver refused; nothing stays registered.
    """

    def __init__(self, address: int, nbytes: int, device: int, step: int = REGISTER_STEP, owner: object = None) -> None:
        if nbytes <= 0:
            raise BoundsError(f"nbytes is {nbytes}, must be positive")
        self.address, self.nbytes, self.device = address, nbytes, device
        pieces: list[tuple[int, int]] = []
        d = driver()
        self._finalizer = weakref.finalize(self, _unregister, weakref.ref(d), device, pieces, owner)
        try:
            with DeviceScope(device):
                for at in range(address, address + nbytes, step):
                    _register(d, (at, min(at + step, address + nbytes)), pieces)
                shifts = {d.host_device_address(at) - at for at, _ in pieces}
                if len(shifts) > 1:
                    raise DriverError("CUDA_ERROR_NOT_MAPPED", 211, "cuMemHostGetDevicePointer", "pieces lie apart")
        except BaseException:
            with contextlib.suppress(DriverError):
                self.close()
            raise
        self.device_address = address + shifts.pop()
