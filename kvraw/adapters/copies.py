"""Copies by the copy engine on torch's current stream, for the adapters: what they plan ahead or are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvraw.adapters import tensors
from kvraw.adapters.found import pending, raise_found
from kvraw.arrays import I64, U64, IndexVector
from kvraw.batch import memcpy_batch
from kvraw.engines.aside import submit
from kvraw.engines.copy_engine import DescriptorPlan, Descriptors
from kvraw.engines.device_state import device_state
from kvraw.engines.operands import Operands
from kvraw.plan import CopyPlan
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import locate
from kvraw.runtime.register import cuts_with

__all__ = ["HostRanges", "PlannedCopies", "send"]


class HostRanges:
    """Ranges of host memory that copies lie in: whether it is pinned, and where they must be cut.

    Both may change at any time. The numbers that the driver gives to what is pinned say cheaply that they did not.

    Parameters
    ----------
    group : iterable
        Tensors; those on a device are left out.

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

    def __init__(self, group: Iterable[Any]) -> None:
        self._spans = sorted({tensors.span(t) for t in group if not t.is_cuda})
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
        self.pageable, self._ours, self._numbers = False, ours, []
        edges, stop = list[int](), 0
        for address, nbytes in self._spans:
            if address + nbytes <= stop:  # one question for all that begin in an allocation
                continue
            where = locate(address, nbytes)
            edges += where.edges if where.device_address else tensors.ends_around(address, nbytes)
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


class PlannedCopies:
    """Copies between tensors that stay where they are: a call names items, and all groups copy them.

    Parameters
    ----------
    device : int or None
        The GPU that takes part; None: the host alone.
    group : iterable
        The tensors.
    """

    __slots__ = ("_groups", "_ranges", "device")

    def __init__(self, device: int | None, group: Iterable[Any]) -> None:
        self.device, self._groups = device, list[_Group]()
        self._ranges = HostRanges(group)

    def add(self, plan: CopyPlan, src: Sequence[int], dst: Sequence[int]) -> None:
        """Add copies of a plan between base addresses."""
        bases = np.array(src, np.uint64), np.array(dst, np.uint64)
        # Neighbours may be allocations of their own, which the driver does not take as one.
        self._groups.append(_Group(DescriptorPlan(plan), *bases, np.unique(np.concatenate(bases))))

    def __len__(self) -> int:
        return len(self._groups)

    def _describe(self, src_index: I64, dst_index: I64, cuts: U64) -> Descriptors:
        count = len(src_index)
        src, dst = IndexVector(src_index, 0, count), IndexVector(dst_index, 0, count)
        made = [
            g.plan(Operands(g.src, src), Operands(g.dst, dst), 0, count, joints=g.joints, cuts=cuts)
            for g in self._groups
        ]
        if len(made) == 1:
            return made[0]
        return Descriptors(*(np.concatenate([getattr(d, name) for d in made]) for name in ("dst", "src", "sizes")))

    def __call__(self, src_index: I64, dst_index: I64, refs: object, *, raising: bool = True) -> None:
        """Enqueue the copies of some items, at least one, on the current stream; on the host, do them."""
        if self.device is None:
            d = self._describe(src_index, dst_index, cuts_with())
            memcpy_batch(d.dst, d.src, d.sizes)
            return
        ranges = self._ranges
        send(self.device, ranges, lambda: self._describe(src_index, dst_index, ranges.cuts), refs, raising=raising)


def send(
    device: int, ranges: HostRanges, describe: Callable[[], Descriptors], refs: object, *, raising: bool = True
) -> None:
    """Enqueue copies, described once it is known where they must be cut, on a device's current stream.

    What kernels of earlier operations on the device found is raised first, unless the caller did (`raising`).

    Raises
    ------
    BoundsError
        A kernel of an earlier operation found it.
    DriverError
        The driver refused; copies before it may have been enqueued.
    """
    stream, state = tensors.current_stream(device), device_state(device)
    if raising and pending(state):
        raise_found(device, stream)
    with DeviceScope(device):
        ranges.look()
        d = describe()
        if len(d):
            submit(state, stream, d, pageable=ranges.pageable, edges=ranges.edges, refs=refs)
