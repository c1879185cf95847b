"""What a plan is given at each call, and the checks that need no driver."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvraw.arrays import ASK_DRIVER, I64, U64, IndexVector
from kvraw.copying.plan import Side
from kvraw.errors import BoundsError, PlacementError
from kvraw.runtime.memory import locate

__all__ = ["DeviceTable", "Operands", "check_distinct", "check_entries", "check_host_index", "require_index"]


class DeviceTable(NamedTuple):
    """A table of base addresses that only the kernel reads, where it lies.

    Attributes
    ----------
    address, entries : int
        Where it lies, as the device sees it, and its length.
    bits : int
        The alignment of what it holds: all bases or-ed together, or the smallest power of two that divides them all; 0
        means that all are multiples of 16.
    owner : object
        Kept alive until the copy is over.

    Examples
    --------
    >>> kvraw.DeviceTable(address=0x7F0000000000, entries=32, bits=0).entries
    32
    """

    address: int
    entries: int
    bits: int = 8
    owner: object = None

    # As of an `AddressTable`: what it holds is device memory, as far as anybody knows.
    @property
    def link(self) -> bool:
        """Host memory is among what it reaches."""
        return False

    @property
    def pageable(self) -> bool:
        """Pageable memory is."""
        return False

    @property
    def edges(self) -> tuple[int, ...]:
        """What no copy may span."""
        return ()


class Operands(NamedTuple):
    """Base addresses and index of one side, for one call.

    Attributes
    ----------
    bases : numpy.ndarray of uint64
        The side's table, as addresses that the engine can use.
    index : IndexVector or None
        Index of each item; None: the item is its own index.
    table : DeviceTable or None
        Stands for `bases` where the table is known to the device alone (kernel engine only).
    bits : int
        The alignment of `bases`, all or-ed together or less; -1: not known.
    """

    bases: U64
    index: IndexVector | None = None  # type: ignore[assignment]  # not a tuple's search, here
    table: DeviceTable | None = None
    bits: int = -1

    @property
    def host_index(self) -> I64 | None:
        """The index values where they are on the host."""
        return None if self.index is None else self.index.host


def require_index(name: str, index: IndexVector, device: int | None) -> None:
    """Raise `PlacementError` where an index lies neither on the host nor where kernels of this device reach it."""
    where = index.device
    if where == device or where is None or not index.count:
        return
    if where == ASK_DRIVER:
        found = locate(index.address, 1)
        if found.device_address and found.device in (None, device):
            return
        where = found.device
    there = "in pageable host memory" if where is None else f"on device {where}"
    raise PlacementError(f"{name} lies {there}, must lie on device {device} or the host")


def check_host_index(name: str, index: I64, side: Side, first: int) -> None:
    """Check the index values behind `first` against the side's limit.

    Raises
    ------
    BoundsError
        Names the argument, the position, the value and the bound.
    """
    used = index[first:] if first else index
    # As unsigned numbers, negative ones are above every limit: one pass tells for both ends.
    if used.size == 0 or int(np.maximum.reduce(used.view(np.uint64))) < side.limit:
        return
    bad = (used >= side.limit) | ((used < 0) & (not side.skip_negative))
    if bad.any():
        at = int(np.argmax(bad))
        negative = " (or negative: left out)" if side.skip_negative else ""
        raise BoundsError(f"{name}[{first + at}] is {used[at]}, must be in [0, {side.limit}){negative}")


def check_distinct(name: str, index: I64, first: int) -> None:
    """Check that no index value behind `first` stands twice; negative ones do not count.

    Raises
    ------
    BoundsError
        Names the argument and the value.
    """
    used = np.sort(index[first:])
    twice = used[1:] == used[:-1]
    if np.count_nonzero(twice):
        values = used[1:][twice & (used[1:] >= 0)]
        if values.size:
            raise BoundsError(f"{name} has {values[0]} more than once; each is written once")


def check_entries(name: str, entries: int, side: Side, end: int) -> None:
    """Check that a table of this length holds every base that items below `end` reach.

    Raises
    ------
    BoundsError
        The table is too short; names both lengths.
    """
    need = -(-end // side.page) * side.table_outer if side.table_outer else side.entries
    if entries < need:
        raise BoundsError(f"{name} has {entries} base addresses, must have at least {need}")
