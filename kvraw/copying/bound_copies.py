"""Copies of the copy engine bound: plans between addresses that stay, of which a call names the items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvraw.arrays import I64, U64, IndexVector
from kvraw.copying import copy_engine, submission
from kvraw.copying.addresses import ends_around
from kvraw.copying.copy_engine import DescriptorPlan, Descriptors
from kvraw.copying.device_state import DeviceState
from kvraw.copying.operands import Operands
from kvraw.copying.plan import CopyPlan
from kvraw.copying.submission import Batch
from kvraw.errors import DriverError
from kvraw.runtime import fork
from kvraw.runtime.completion import Completion
from kvraw.runtime.context import DeviceScope, note_error
from kvraw.runtime.driver import CudaDriver
from kvraw.runtime.host.registration import cut_list, cuts_with
from kvraw.runtime.memory import locate

__all__ = ["BoundCopies", "HostRanges"]


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
        The same with the ends of all that kvraw pinned, ascending; `words` is the same array as int64.
    numbers : list of (int, int)
        Addresses and the driver's numbers of what lies there.
    """

    __slots__ = ("_listed", "_ours", "_spans", "cuts", "edges", "numbers", "pageable", "words")

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self._spans = sorted(set(spans))
        self.numbers: list[tuple[int, int]] = []
        self._listed: Callable[[], object] | None = None
        self._ours: object = None

    def unchanged(self) -> bool:
        """Whether all is as it was, if the driver's numbers are; asks the driver nothing."""
        return self._listed is not None and self._ours is self._listed()

    def look(self, d: CudaDriver) -> None:
        """Learn what is so now; the device's context is current."""
        if self._listed is None:
            self._listed = cut_list(d)
        ours = self._listed()
        if self._ours is ours:
            for address, number in self.numbers:
                if d.pointer_number(address) != number:
                    break
            else:
                return
        self._look_anew(d, ours)

    def _look_anew(self, d: CudaDriver, ours: object) -> None:
        self.pageable, self._ours, self.numbers = False, ours, list[tuple[int, int]]()
        edges, stop = list[int](), 0
        for address, nbytes in self._spans:
            if address + nbytes <= stop:  # one question for all that begin in an allocation
                continue
            where = locate(address, nbytes)
            edges += where.edges if where.device_address else ends_around(d, address, nbytes)
            self.pageable = self.pageable or not where.device_address
            stop = where.edges[-1] if where.edges else 0
            starts = [address, *(e for e in where.edges if e < address + nbytes)]
            self.numbers += [(at, d.pointer_number(at)) for at in starts]
        if self.pageable or not all(n for _, n in self.numbers):
            self._ours = None  # nothing says cheaply when it changes
        self.edges = tuple(dict.fromkeys(edges))
        self.cuts = cuts_with(self.edges)
        self.words: I64 = self.cuts.view(np.int64)


class _Group(NamedTuple):
    plan: DescriptorPlan
    src: U64
    dst: U64
    joints: U64
    arguments: tuple[I64, ...]  # of the compiled function, the first four
    run: int


class BoundCopies:
    """Copies between memory that stays where it is: a call names items, and all groups copy them.

    Parameters
    ----------
    spans : iterable of (int, int)
        The host memory that the copies lie in: addresses and bytes.
    """

    __slots__ = ("_address", "_again", "_batch", "_groups", "_lock", "_out", "_parameters", "_room", "_rooms", "ranges")

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self.ranges, self._groups, self._lock = HostRanges(spans), list[_Group](), fork.lock()
        self._rooms: I64 = np.empty((5, 0), np.int64)
        self._out: I64 = np.empty((3, 0), np.int64)
        self._parameters: I64 = np.empty(4, np.int64)
        self._room = self._address = 0
        self._again = False
        self._batch: Batch | None = None  # of memory that the driver gives numbers

    def add(self, plan: CopyPlan, src: Sequence[int], dst: Sequence[int]) -> None:
        """Add copies of a plan between base addresses."""
        bases = np.array(src, np.uint64), np.array(dst, np.uint64)
        # Neighbours may be allocations of their own, which the driver does not take as one.
        described = DescriptorPlan(plan)
        *arguments, run = described.bound(*bases)
        joints = np.unique(np.concatenate(bases))
        self._groups.append(_Group(described, *bases, joints, (*arguments,), run))

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

    def look(self, state: DeviceState) -> object:
        """Learn how host memory lies now; the same object as before where nothing has changed.

        The device's context is current.
        """
        with self._lock:
            self.ranges.look(state.owner)
            return self.ranges.words

    def enqueue(
        self, state: DeviceState, stream: int, src_index: I64, dst_index: I64, refs: object
    ) -> Completion | None:
        """Enqueue the copies of some items, at least one, in a stream's order; None where there is nothing to copy.

        `refs` are kept until the copies are over.

        Raises
        ------
        DriverError
            The driver refused; `index` is the failing copy, where it told. Copies before it may have been enqueued.
        """
        if state.owner.context_device() != state.device:
            with DeviceScope(state.device):
                return self.enqueue(state, stream, src_index, dst_index, refs)
        try:
            with self._lock:
                return self._enqueue(state, stream, src_index, dst_index, refs)
        except DriverError as error:
            note_error(error, state.device)
            raise

    def _enqueue(
        self, state: DeviceState, stream: int, src_index: I64, dst_index: I64, refs: object
    ) -> Completion | None:
        ranges, made, batch = self.ranges, -1, self._batch
        bound = batch is not None and batch.state is state and ranges.unchanged()
        if not bound:
            ranges.look(state.owner)
        if len(self._groups) == 1 and copy_engine.COMPILED.entry is not None:
            made = self._enumerate(src_index, dst_index, ranges.words)
        if made > 0 and not ranges.pageable and submission.fits(state, stream):
            if not bound:  # the first call takes less time without a program of its own
                again = self._again and ranges.unchanged()
                batch, self._again = Batch(state, ranges.numbers) if again else None, True
                self._batch = batch
            step, start = 8 * self._room, self._address
            try:
                addresses = start, start + step, start + 2 * step
                done = submission.submit_short(state, stream, addresses, made, refs, batch)
            except DriverError as error:
                if error.index is None:
                    raise
                d = self._rows(made)
                raise copy_engine.refused(d, d, error.index, error) from error
            if done is not None:
                return done
        if bound:  # what the program would have found out, or did
            words, self._batch = ranges.words, None
            ranges.look(state.owner)
            if ranges.words is not words:
                return self._enqueue(state, stream, src_index, dst_index, refs)
        d = self._rows(made) if made >= 0 else self.describe(src_index, dst_index, ranges.cuts)
        if not len(d):
            return None
        return submission.submit(state, stream, d, pageable=ranges.pageable, edges=ranges.edges, refs=refs)

    def _enumerate(self, src_index: I64, dst_index: I64, cuts: I64) -> int:
        """Write the copies of the one group to the room for them; how many, or -1 where it is too small."""
        g, count, p = self._groups[0], len(src_index), self._parameters
        room = count * g.plan.runs_per_item + 2 * len(cuts)
        if room > self._room or count > self._rooms.shape[1]:
            self._rooms = np.empty((5, 2 * count), np.int64)
            self._room = 2 * room
            self._out = np.empty((3, self._room), np.int64)
            self._address = int(self._out.ctypes.data)
        p[0], p[1], p[2], p[3] = 0, count, g.run, self._room
        function = copy_engine.COMPILED.entry
        assert function is not None
        joints = g.joints.view(np.int64)
        return function(*g.arguments, src_index, dst_index, joints, cuts, p, self._rooms, self._out)

    def _rows(self, count: int) -> Descriptors:
        rows = self._out.view(np.uint64)
        return Descriptors(rows[0, :count], rows[1, :count], rows[2, :count])
