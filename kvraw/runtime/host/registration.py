"""Host memory registered in place, and the registry of all of it: reference counts, overlaps, boundaries."""

from __future__ import annotations

import bisect
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvraw import config
from kvraw.errors import BoundsError, DriverError
from kvraw.runtime import fork
from kvraw.runtime.closeable import Owner
from kvraw.runtime.context import DeviceScope, FreshScope
from kvraw.runtime.driver import CudaDriver, driver, driver_here, driver_if, usable_here
from kvraw.runtime.known import describe

__all__ = [
    "Registration",
    "boundaries",
    "give_up",
    "is_registered",
    "note_allocation",
    "note_edges",
    "spans",
]

U64 = npt.NDArray[np.uint64]
Piece = tuple[int, int]  # (begin, end)

_EMPTY = np.empty(0, np.uint64)
_MOST_FOREIGN = 4096  # ends that are kept: one that is no more costs a cut, nothing else


class _Entry:
    """One range that was registered, in pieces, for one or more `Registration`."""

    __slots__ = ("begin", "count", "device", "end", "foreign", "owners", "pieces", "shift", "state")

    def __init__(self, begin: int, end: int, device: int) -> None:
        self.begin, self.end, self.device = begin, end, device
        self.pieces: list[Piece] = []
        self.foreign: list[Piece] = []  # what somebody else had pinned already
        self.shift = 0
        self.count = 1
        self.state = "claimed"  # then "live", "leaving"; or "stuck", where the driver would not let go
        self.owners: list[object] = []


class _Book:
    """The entries of one driver, disjoint and sorted; and where copies must be cut, as a vector."""

    def __init__(self) -> None:
        # Re-entrant: the collector may run a finalizer that gives a registration back while this thread holds it.
        self.changed = fork.condition()
        self.entries: list[_Entry] = []
        self.allocations: set[Piece] = set()
        self.foreign: set[int] = set()  # ends of what others registered, as far as copies met them
        self.cuts: U64 = _EMPTY
        self.listed: list[int] = []  # the same

    def publish(self) -> None:
        """Renew the vector of cuts, which is read without the lock."""
        pieces = [piece for entry in self.entries for piece in entry.pieces + entry.foreign] + list(self.allocations)
        cuts = np.array([*(end for piece in pieces for end in piece), *self.foreign], np.uint64)
        self.cuts = np.unique(cuts)
        self.listed = self.cuts.tolist()
        self.changed.notify_all()

    def claim(self, begin: int, end: int, device: int) -> tuple[_Entry, bool]:
        """The live entry of exactly this range, with its count raised; or a new one, and True."""
        with self.changed:
            while True:
                at = bisect.bisect_left(self.entries, begin, key=lambda e: e.begin)
                near = [e for e in self.entries[max(at - 1, 0) : at + 2] if e.begin < end and begin < e.end]
                if not near:
                    entry = _Entry(begin, end, device)
                    bisect.insort(self.entries, entry, key=lambda e: e.begin)  # `at` may be stale: see `changed`
                    return entry, True
                (found, *_) = near
                if (found.begin, found.end) != (begin, end) or found.state == "stuck":
                    raise BoundsError(
                        f"address {begin:#x}, {end - begin} bytes overlaps the registration of {found.begin:#x}, "
                        f"{found.end - found.begin} bytes"
                        + (", which the driver would not undo" if found.state == "stuck" else "")
                    )
                if found.state == "live":
                    found.count += 1
                    return found, False
                self.changed.wait()  # another thread is registering or unregistering just this range

    def drop_context(self, d: CudaDriver, device: int) -> None:
        """Take off what was registered in a context of a device that is gone."""
        with self.changed:
            gone = [entry for entry in self.entries if entry.device == device and entry.state in ("live", "stuck")]
            for entry in gone:
                entry.state = "lost"
                self.entries.remove(entry)
                left = [piece for piece in entry.pieces if d.pointer_number(piece[0])]
                entry.pieces, entry.foreign = left, []
                if left:
                    _undo(d, entry)
            if gone:
                self.publish()

    def remove(self, entry: _Entry, stuck: list[Piece]) -> None:
        """Take an entry off; pieces that the driver would not let go stay, and so does what they keep alive.

        Their memory must stay mapped: its address would be taken for registered memory.
        """
        with self.changed:
            left = [_Entry(begin, end, entry.device) for begin, end in sorted(stuck)]
            for one in left:
                one.state, one.pieces, one.owners = "stuck", [(one.begin, one.end)], entry.owners
            self.entries.remove(entry)
            for one in left:
                bisect.insort(self.entries, one, key=lambda e: e.begin)
            self.publish()


_lock = fork.lock()
_books: weakref.WeakKeyDictionary[CudaDriver, _Book] = weakref.WeakKeyDictionary()


def _book(d: CudaDriver) -> _Book:
    found = _books.get(d)
    if found is None:
        with _lock:
            found = _books.setdefault(d, _Book())
    return found


def _forget() -> None:
    """In a forked child: what is registered is the parent's."""
    global _books
    _books = weakref.WeakKeyDictionary()


fork.in_child(_forget)


def _undo(d: CudaDriver, entry: _Entry) -> tuple[list[Piece], DriverError | None]:
    """Unregister the pieces of an entry in reverse; those that stay, and the first error."""
    failed: DriverError | None = None
    stuck: list[Piece] = []
    try:
        with DeviceScope(entry.device):
            while entry.pieces:
                try:
                    d.host_unregister(entry.pieces[-1][0])
                except DriverError as error:
                    failed = failed or error
                    stuck.append(entry.pieces[-1])
                entry.pieces.pop()
    except DriverError as error:
        failed = failed or error
        stuck += entry.pieces
    return stuck, failed


def _foreign(d: CudaDriver, at: int, end: int) -> Piece | None:
    """The piece from an address on that somebody else pinned; None where nobody did."""
    info = d.pointer_info(at)
    if info is None or info.kind != "host" or not info.device_address or info.base + info.size <= at:
        return None
    return at, min(info.base + info.size, end)


def _register(d: CudaDriver, entry: _Entry, step: int, foreign: bool) -> int:
    """Register an entry in pieces, but for what others pinned; what to add to an address for a GPU's view."""
    at, end = entry.begin, entry.end
    while at < end:
        piece = _foreign(d, at, end) if foreign else None
        if piece is not None:
            entry.foreign.append(piece)
            at = piece[1]
            continue
        stop = min(at + step, end)
        if foreign and (last := d.pointer_info(stop - 1)) is not None and last.base > at:
            stop = last.base
        failed: DriverError | None = None
        try:
            d.host_register(at, stop - at)
        except DriverError as error:
            failed = error.at(None, describe(d, at, stop - at))
        if failed is not None:
            raise failed  # on its own: the other's frames would keep the memory
        entry.pieces.append((at, stop))
        at = stop
    shifts = {d.host_device_address(at) - at for at, _ in entry.pieces + entry.foreign}
    if len(shifts) > 1:
        raise DriverError("CUDA_ERROR_NOT_MAPPED", 211, "cuMemHostGetDevicePointer", "pieces lie apart")
    return shifts.pop()


def _acquire(d: CudaDriver, begin: int, end: int, device: int, step: int, owner: object, foreign: bool) -> _Entry:
    book = _book(d)
    entry, new = book.claim(begin, end, device)
    if new:
        try:
            with FreshScope(device):
                entry.shift = _register(d, entry, step, foreign)
        except BaseException:
            entry.owners.append(owner)
            stuck, _ = _undo(d, entry)
            book.remove(entry, stuck)
            raise
    with book.changed:
        entry.owners.append(owner)
        if new:
            entry.state = "live"
            book.publish()
    return entry


def _release(known: weakref.ref[CudaDriver], entry: _Entry) -> None:
    d = driver_if(known)
    if d is None:
        return
    book = _book(d)
    with book.changed:
        if entry.state == "lost":
            return
        entry.count -= 1
        if entry.count:
            return
        entry.state = "leaving"
    stuck, failed = _undo(d, entry)
    book.remove(entry, stuck)
    if failed is not None:
        raise failed


class Registration(Owner):
    """Host memory pinned in place, in steps, rolled back in reverse where a step fails.

    Registering a range that is registered already counts its users up; the last `close` unregisters it. What somebody
    else pinned, such as another library, is used as it is, and stays theirs: to be kept so until `close`.

    Parameters
    ----------
    address, nbytes : int
        The range. It is borrowed, and must stay mapped until `close`.
    device : int
        A device, in whose context the memory is registered; every device can use it.
    step : int, optional
        Bytes per registration, see `KVRAW_REGISTER_BYTES`.
    owner : object, optional
        Kept alive until the memory is unregistered.
    foreign : bool
        Take what others pinned. False for memory that was mapped just now: what the driver knows there is a
        registration that outlived its memory.

    Raises
    ------
    BoundsError
        The range overlaps one that is registered already, without being the same.
    DriverError
        The driver refused; nothing stays registered.

    Examples
    --------
    >>> memory = np.zeros(1 << 20, np.uint8)
    >>> with kvraw.Registration(memory.ctypes.data, memory.nbytes, device=0, owner=memory) as pinned:
    ...     pinned.closed
    False
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        device: int,
        step: int | None = None,
        owner: object = None,
        *,
        foreign: bool = True,
    ) -> None:
        if nbytes <= 0:
            raise BoundsError(f"nbytes is {nbytes}, must be positive")
        step = config.REGISTER_BYTES.get() if step is None else step
        if step <= 0:
            raise BoundsError(f"step is {step}, must be positive")
        self.address, self.nbytes, self.device = address, nbytes, device
        d = driver()
        entry = _acquire(d, address, address + nbytes, device, step, owner, foreign)
        self._own(_release, weakref.ref(d), entry)
        self.device_address = address + entry.shift
        self.pieces = len(entry.pieces) + len(entry.foreign)

    def context_lost(self) -> None:
        """Registrations end with the context that they were made in."""
        if (d := driver_here()) is not None and not self.closed:
            _book(d).drop_context(d, self.device)
        super().context_lost()


def give_up(registrations: list[Registration]) -> None:
    """Undo registrations in reverse; the first error, once all were tried."""
    failed: DriverError | None = None
    while registrations:
        try:
            registrations.pop().close()
        except DriverError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def note_allocation(d: CudaDriver, address: int, nbytes: int) -> Callable[[], None]:
    """Have `boundaries` know of memory that the driver pinned as it allocated it; returns what forgets it again."""
    book, piece = _book(d), (address, address + nbytes)
    with book.changed:
        book.allocations.add(piece)
        book.publish()

    def forget() -> None:
        with book.changed:
            book.allocations.discard(piece)
            book.publish()

    return forget


def note_edges(d: CudaDriver, edges: set[int]) -> bool:
    """Have `boundaries` know of ends of what others registered; whether any is new."""
    book = _book(d)
    with book.changed:
        new = edges - book.foreign
        if new:
            if len(book.foreign) > _MOST_FOREIGN:
                book.foreign.clear()
            book.foreign |= new
            book.publish()
    return bool(new)


def cut_list(d: CudaDriver) -> Callable[[], list[int]]:
    """A function for the ascending addresses that no copy may span, which takes no lock and asks nothing."""
    book = _book(d)
    return partial(getattr, book, "listed")


def cuts_with(more: Sequence[int] | U64 = ()) -> U64:
    """Ascending addresses that no copy may span: ends of what kvraw registered or allocated, and these."""
    d = driver_here()
    book = None if d is None else _books.get(d)
    cuts = _EMPTY if book is None else book.cuts
    return np.union1d(cuts, np.array(more, np.uint64)) if len(more) else cuts


def boundaries(addresses: U64, nbytes: U64, more: Sequence[int] | U64 = ()) -> tuple[npt.NDArray[np.int64], U64]:
    """Places where copies must be cut so that none spans two registrations.

    Parameters
    ----------
    addresses, nbytes : numpy.ndarray of uint64
        Ranges of host memory, in any order.
    more : sequence of int
        Further addresses to cut at, such as ends of registrations that somebody else made.

    Returns
    -------
    rows : numpy.ndarray of int64
        Which ranges are to be cut, ascending; a range that is to be cut twice is there twice.
    cuts : numpy.ndarray of uint64
        At which address, strictly inside the range; ascending within a range.

    Notes
    -----
    Covers what kvraw registered or allocated with the driver in use; takes no lock. It costs two binary searches per
    range, and nothing where nothing is registered.
    """
    cuts = cuts_with(more)
    if not len(cuts) or not len(addresses):
        return np.empty(0, np.int64), _EMPTY
    first = np.searchsorted(cuts, addresses, "right")
    counts = np.maximum(np.searchsorted(cuts, addresses + nbytes, "left") - first, 0)
    total = int(counts.sum())
    if not total:
        return np.empty(0, np.int64), _EMPTY
    rows = np.repeat(np.arange(len(addresses)), counts)
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, cuts[first[rows] + within]


def spans(begin: int, end: int, more: Sequence[int] = ()) -> bool:
    """True where `boundaries` would cut the one range of these ends: in a tenth of its time."""
    d = driver_here()
    book = None if d is None else _books.get(d)
    if book is not None:
        cuts = book.listed
        at = bisect_right(cuts, begin)
        if at < len(cuts) and cuts[at] < end:
            return True
    return any(begin < edge < end for edge in more)


def is_registered(address: int, nbytes: int) -> bool:
    """True where any part of a range is registered, or stuck in that state."""
    d = driver_here() if usable_here() else None
    book = None if d is None else _books.get(d)
    if book is None:
        return False
    with book.changed:
        return any(e.begin < address + nbytes and address < e.end for e in book.entries)
