"""Copies of the copy engine bound: plans between addresses that stay, of which a call names the items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvraw.arrays import I64, U64, IndexVector
from kvraw.engines import aside, copy_engine
from kvraw.engines.copy_engine import DescriptorPlan, Descriptors
from kvraw.engines.device_state import DeviceState
from kvraw.engines.operands import Operands
from kvraw.errors import DriverError
from kvraw.plan import CopyPlan
from kvraw.runtime import fork
from kvraw.runtime.driver import driver, driver_or_none
from kvraw.runtime.inflight import Completion
from kvraw.runtime.memory import locate
from kvraw.runtime.register import cuts_with

__all__ = ["BoundCopies", "HostRanges", "ends_around"]


def ends_around(address: int, nbytes: int) -> list[int]:
    """Where pinned memory begins and ends in a range that counts as pageable, but for islands inside it."""
    call = driver_or_none()
    if call is None:
        return []
    found = [call.pointer_info(at) for at in (address, address + nbytes - 1)]
    return [edge for info in found if info is not None for edge in (info.base, info.base + info.size)]


class HostRanges:
    """Ranges of host memory that copies lie in: whether it is pinned, and where they must be cut.

    Both may change at any time. The numbers that the driver gives to what is pinned say cheaply that they did not.

    Parameters
    ----------
    spans : iterable of (int, int)
        Addresses and bytes.

    Attributes
    ----------
    pageable : bool
        Pageable memory is among them.
    edges : tuple of int
        Where pinned memory ends that they lie in, whoever pinned it.
    cuts : numpy.ndarray
        The same with the ends of all that kvraw pinned, ascending.
    """

    __slots__ = ("_numbers", "_ours", "_spans", "cuts", "edges", "pageable")

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self._spans = sorted(set(spans))
        self._numbers: list[tuple[int, int]] = []
        self._ours: U64 | None = None

    def look(self) -> None:
        """Learn what is so now; the device's context is current."""
        ours = cuts_with()
        if self._ours is ours:
            d = driver()
            for address, number in self._numbers:
                if d.pointer_number(address) != number:
                    break
            else:
                return
        self._look_anew(ours)

    def _look_anew(self, ours: U64) -> None:
        number = driver().pointer_number
        self.pageable, self._ours, self._numbers = False, ours, list[tuple[int, int]]()
        edges, stop = list[int](), 0
        for address, nbytes in self._spans:
            if address + nbytes <= stop:  # one question for all that begin in an allocation
                continue
            where = locate(address, nbytes)
            edges += where.edges if where.device_address else ends_around(address, nbytes)
            self.pageable = self.pageable or not where.device_address
            stop = where.edges[-1] if where.edges else 0
            starts = [address, *(e for e in where.edges if e < address + nbytes)]
            self._numbers += [(at, number(at)) for at in starts]
        if self.pageable or not all(n for _, n in self._numbers):
            self._ours = None  # nothing says cheaply when it changes
        self.edges = tuple(dict.fromkeys(edges))
        self.cuts = cuts_with(self.edges)


class _Group(NamedTuple):
    plan: DescriptorPlan
    src: U64
    dst: U64
    joints: U64


class BoundCopies:
    """Copies between memory that stays where it is: a call names items, and all groups copy them.

    Parameters
    ----------
    spans : iterable of (int, int)
        The host memory that the copies lie in: addresses and bytes.
    """

    __slots__ = ("_address", "_groups", "_lock", "_out", "_rooms", "ranges")

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self.ranges, self._groups, self._lock = HostRanges(spans), list[_Group](), fork.lock()
        self._rooms: I64 = np.empty((5, 0), np.int64)
        self._out: I64 = np.empty((3, 0), np.int64)
        self._address = 0

    def add(self, plan: CopyPlan, src: Sequence[int], dst: Sequence[int]) -> None:
        """Add copies of a plan between base addresses."""
        bases = np.array(src, np.uint64), np.array(dst, np.uint64)
        # Neighbours may be allocations of their own, which the driver does not take as one.
        self._groups.append(_Group(DescriptorPlan(plan), *bases, np.unique(np.concatenate(bases))))

    def __len__(self) -> int:
        return len(self._groups)

    def describe(self, src_index: I64, dst_index: I64, cuts: U64) -> Descriptors:
        """The copies for these items, at least one."""
        count = len(src_index)
        src, dst = IndexVector(src_index, 0, count), IndexVector(dst_index, 0, count)
        made = [
            g.plan(Operands(g.src, src), Operands(g.dst, dst), 0, count, joints=g.joints, cuts=cuts)
            for g in self._groups
        ]
        if len(made) == 1:
            return made[0]
        return Descriptors(*(np.concatenate([getattr(d, name) for d in made]) for name in ("dst", "src", "sizes")))

    def enqueue(
        self, state: DeviceState, stream: int, src_index: I64, dst_index: I64, refs: object
    ) -> Completion | None:
        """Enqueue the copies of some items, at least one, in a stream's order; None where there is nothing to copy.

        The device's context is current. `refs` are kept until the copies are over.

        Raises
        ------
        DriverError
            The driver refused; `index` is the failing copy, where it told. Copies before it may have been enqueued.
        """
        with self._lock:
            ranges = self.ranges
            ranges.look()
            made = -1
            if len(self._groups) == 1 and copy_engine.COMPILED.entry is not None:
                made = self._enumerate(src_index, dst_index, ranges.cuts)
            if made > 0 and not ranges.pageable and aside.fits(state, stream, made):
                done = self._submit(state, stream, made, refs)
                if done is not None:
                    return done
            d = self._rows(made) if made >= 0 else self.describe(src_index, dst_index, ranges.cuts)
            if not len(d):
                return None
            return aside.submit(state, stream, d, pageable=ranges.pageable, edges=ranges.edges, refs=refs)

    def _enumerate(self, src_index: I64, dst_index: I64, cuts: U64) -> int:
        """Write the copies of the one group to the room for them; how many, or -1 where it is too small."""
        g, count = self._groups[0], len(src_index)
        room = count * g.plan.runs_per_item + 2 * len(cuts)
        if room > self._out.shape[1] or count > self._rooms.shape[1]:
            self._rooms = np.empty((5, 2 * count), np.int64)
            self._out = np.empty((3, 2 * room), np.int64)
            self._address = int(self._out.ctypes.data)
        return g.plan.write((g.src, g.dst), (src_index, dst_index), g.joints, cuts, self._rooms, self._out)

    def _submit(self, state: DeviceState, stream: int, count: int, refs: object) -> Completion | None:
        step, start = 8 * self._out.shape[1], self._address
        try:
            return aside.submit_short(state, stream, (start, start + step, start + 2 * step), count, refs)
        except DriverError as error:
            if error.index is None:
                raise
            d = self._rows(count)
            raise copy_engine.refused(d, d, error.index, error) from error

    def _rows(self, count: int) -> Descriptors:
        rows = self._out.view(np.uint64)
        return Descriptors(rows[0, :count], rows[1, :count], rows[2, :count])
