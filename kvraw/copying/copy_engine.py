"""The copy-engine engine: a plan as (destination, source, size) descriptors, handed to the driver in few calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvraw import config
from kvraw.arrays import I64, U64
from kvraw.copying.operands import Operands
from kvraw.copying.plan import CopyPlan, Side
from kvraw.errors import DriverError
from kvraw.runtime.compiled import Compiled
from kvraw.runtime.driver import CudaDriver, driver
from kvraw.runtime.host.registration import boundaries, cuts_with, note_edges, spans
from kvraw.runtime.known import describe as describe_range
from kvraw.runtime.known import ends_within
from kvraw.runtime.stream import LEGACY

__all__ = [
    "DescriptorPlan",
    "Descriptors",
    "describe",
    "enqueue",
    "enqueue_anywhere",
    "holder",
    "merge",
    "refused",
    "split",
]

_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Copies: three uint64 vectors of one length."""

    dst: U64
    src: U64
    sizes: U64

    def __len__(self) -> int:
        return len(self.sizes)


class _Items(NamedTuple):
    """Where the items of one side begin: entries of its table, and byte offsets from their bases."""

    entry: I64
    offset: I64
    kept: np.ndarray | None  # which items are not left out; None: all


def _items(side: Side, operands: Operands, first: int, count: int) -> _Items:
    kept = None
    if operands.host_index is not None:
        index = operands.host_index[first : first + count]
        if int(np.minimum.reduce(index)) < 0:
            kept = index >= 0
            index = np.where(kept, index, 0)
    else:
        index = np.arange(first, first + count, dtype=np.int64)
    if side.page == 1:
        entry = index * side.table_outer if side.table_outer else np.zeros(len(index), np.int64)
        return _Items(entry, index * side.outer, kept)
    outer, inner = np.divmod(index, side.page)
    return _Items(outer * side.table_outer, outer * side.outer + inner * side.inner, kept)


def _addresses(plan: CopyPlan, name: str, bases: U64, entry: I64, offset: I64) -> U64:
    """Addresses of all runs of some items, the items along the last axis."""
    tables: I64 = entry
    offsets: I64 = offset
    axes = 1
    for d in plan.dims:  # innermost first; the items stay innermost of all, where ids that follow each other merge
        steps = np.arange(d.size, dtype=np.int64).reshape(-1, *[1] * axes)
        tables = tables + steps * getattr(d, f"{name}_table")
        offsets = offsets + steps * getattr(d, name)
        axes += 1
    found: U64 = bases[tables] + offsets.astype(np.uint64)
    return found


def describe(plan: CopyPlan, src: Operands, dst: Operands, first: int, count: int, *apart: U64) -> Descriptors:
    """The plan's copies for items `first` to `first + count`, those with a negative index left out; neighbours joined.

    Indices are on the host. Items that follow each other on both sides are joined before the plan's dimensions are
    expanded: one comparison for each item, however many layers, planes and heads it has. `apart` as for `merge`.
    """
    none = np.zeros(0, np.uint64)
    if not count:
        return Descriptors(none, none, none)
    s, d = _items(plan.src_flat, src, first, count), _items(plan.dst_flat, dst, first, count)
    ends = [(s.entry, s.offset), (d.entry, d.offset)]
    if s.kept is not None or d.kept is not None:
        kept = d.kept if s.kept is None else s.kept if d.kept is None else s.kept & d.kept
        ends = [(entry[kept], offset[kept]) for entry, offset in ends]
        if not len(ends[0][0]):
            return Descriptors(none, none, none)
    begins = [o.bases[entry] + offset.astype(np.uint64) for o, (entry, offset) in zip((src, dst), ends, strict=True)]
    sizes = np.full(len(begins[0]), plan.run_bytes, np.uint64)
    picked = np.arange(len(sizes))
    # Where a dimension steps through tables, only items of one entry are neighbours in every layer.
    stepped = [any(dim.src_table for dim in plan.dims), any(dim.dst_table for dim in plan.dims)]
    for ascending in (True, False):
        entries = [entry[picked] for (entry, _), steps in zip(ends, stepped, strict=True) if steps]
        found = _join(Descriptors(begins[1][picked], begins[0][picked], sizes), ascending, apart, entries)
        if found is not None:
            picked, sizes = picked[found[0]], found[1]
    source, target = (
        _addresses(plan, name, o.bases, entry[picked], offset[picked])
        for name, o, (entry, offset) in zip(("src", "dst"), (src, dst), ends, strict=True)
    )
    runs = np.broadcast_to(sizes, np.broadcast_shapes(source.shape, target.shape))
    whole = (np.broadcast_to(a, runs.shape).ravel() for a in (target, source, runs))
    return merge(Descriptors(*whole), *apart)


def _join(
    d: Descriptors, ascending: bool, apart: Sequence[U64], entries: Sequence[I64] = ()
) -> tuple[np.ndarray, U64] | None:
    """Which copies remain once neighbours are joined, and their sizes; None: all do.

    `entries` hold one number for each copy: neighbours must agree in them.
    """
    if len(d) < 2:
        return None
    low, high = (slice(None, -1), slice(1, None)) if ascending else (slice(1, None), slice(None, -1))
    joined = (d.dst[low] + d.sizes[low] == d.dst[high]) & (d.src[low] + d.sizes[low] == d.src[high])
    for entry in entries:
        joined &= entry[low] == entry[high]
    if not joined.any():
        return None
    bases = np.unique(np.concatenate(apart)) if apart else ()
    if len(bases):
        at = np.flatnonzero(joined)
        for begin in (d.dst[high][at], d.src[high][at]):
            found = np.minimum(np.searchsorted(bases, begin), len(bases) - 1)
            joined[at[bases[found] == begin]] = False
    starts = np.flatnonzero(np.concatenate([[True], ~joined]))
    lowest = starts if ascending else np.append(starts[1:], len(d)) - 1
    sizes: U64 = np.add.reduceat(d.sizes, starts)
    return lowest, sizes


def merge(d: Descriptors, *apart: U64) -> Descriptors:
    """Join neighbours that follow each other on both sides, in ascending and then in descending order.

    None that begins at one of `apart` is joined to what ends there: such as base addresses of tensors, since neighbours
    in device memory may be allocations of their own, and the driver refuses a copy of both.
    """
    for ascending in (True, False):
        found = _join(d, ascending, apart)
        if found is not None:
            d = Descriptors(d.dst[found[0]], d.src[found[0]], found[1])
    return d


def split(d: Descriptors, edges: Sequence[int] | U64 = ()) -> Descriptors:
    """Cut copies where either side crosses an edge: one copy must not span two host registrations.

    `edges` are addresses to cut at beside those that the registry of registrations knows.
    """
    for side in ("src", "dst"):
        start = getattr(d, side)
        rows, cuts = boundaries(start, d.sizes, edges)
        if not len(rows):
            continue
        owner = np.concatenate([np.arange(len(d)), rows])
        begin = np.concatenate([np.zeros(len(d), np.uint64), cuts - start[rows]])
        order = np.lexsort((begin, owner))
        owner, begin = owner[order], begin[order]
        last = np.append(owner[1:] != owner[:-1], True)
        end = np.where(last, d.sizes[owner], np.append(begin[1:], np.uint64(0)))
        d = Descriptors(d.dst[owner] + begin, d.src[owner] + begin, end - begin)
    return d


def _compile() -> Callable[..., int]:
    from kvraw.copying.descriptors_numba import entry_point

    found: Callable[..., int] = entry_point()
    return found


COMPILED: Compiled[Callable[..., int]] = Compiled("copies of the copy engine are enumerated", _compile)
_NO_VALUES = np.zeros(0, np.int64)
_NO_ADDRESSES = np.zeros(0, np.uint64)


class DescriptorPlan:
    """A copy plan made ready to be enumerated as copies, joined where neighbours are and cut where registrations end.

    A compiled function does it, with the GIL kept; until it is compiled, in the background, numpy does.
    """

    def __init__(self, plan: CopyPlan) -> None:
        self._plan = plan
        sides = (plan.src_flat, plan.dst_flat)
        self._sides: I64 = np.array([(s.outer, s.inner, s.page, s.table_outer, 0) for s in sides], np.int64)
        dims = [(d.size, d.src, d.dst, d.src_table, d.dst_table) for d in reversed(plan.dims)]
        self._dims: I64 = np.array(dims, np.int64).reshape(-1, 5)
        self.runs_per_item = plan.runs_per_item

    def bound(self, src_bases: U64, dst_bases: U64) -> tuple[I64, I64, I64, I64, int]:
        """What the compiled function takes first, for indices on both sides and these bases; and bytes of a run."""
        sides = self._sides.copy()
        sides[:, 4] = 1
        return sides, self._dims, src_bases.view(np.int64), dst_bases.view(np.int64), self._plan.run_bytes

    def __call__(
        self,
        src: Operands,
        dst: Operands,
        first: int,
        count: int,
        *,
        apart: Sequence[U64] = (),
        edges: Sequence[int] = (),
        joints: U64 | None = None,
        cuts: U64 | None = None,
    ) -> Descriptors:
        """The copies for items `first` to `first + count`, as of `split(describe(...), edges)`.

        Parameters
        ----------
        src, dst : Operands
            Both sides; indices are on the host.
        apart : sequence of numpy.ndarray
            Addresses at which no copy grows together with its neighbour, see `merge`.
        edges : sequence of int
            Addresses that no copy spans, beside the ends of registrations that kvraw made.
        joints, cuts : numpy.ndarray, optional
            What `apart`, and what `edges` with those ends come to, ascending and each once, where a caller keeps them.
        """
        plan = self._plan
        if COMPILED.entry is None or not count:
            COMPILED.start()
            more = apart if joints is None else (joints,)
            return split(describe(plan, src, dst, first, count, *more), edges if cuts is None else cuts)
        sides = self._sides.copy()
        sides[0, 4], sides[1, 4] = src.host_index is not None, dst.host_index is not None
        if cuts is None:
            cuts = cuts_with(edges)
        if joints is None:
            joints = np.unique(np.concatenate(apart)) if apart else _NO_ADDRESSES
        capacity = count * plan.runs_per_item + 2 * len(cuts)
        groups: I64 = np.empty((5, count), np.int64)
        out: I64 = np.empty((3, capacity), np.int64)
        while True:
            made = COMPILED.entry(
                sides,
                self._dims,
                src.bases.view(np.int64),
                dst.bases.view(np.int64),
                _NO_VALUES if src.host_index is None else src.host_index,
                _NO_VALUES if dst.host_index is None else dst.host_index,
                joints.view(np.int64),
                cuts.view(np.int64),
                np.array([first, count, plan.run_bytes, capacity], np.int64),
                groups,
                out,
            )
            if made >= 0:
                break
            capacity *= 2
            out = np.empty((3, capacity), np.int64)
        rows = out[:, :made].view(np.uint64)
        return Descriptors(rows[0], rows[1], rows[2])


def enqueue(
    d: Descriptors,
    stream: int,
    *,
    capturing: bool | None = None,
    pageable: bool = False,
    edges: Sequence[int] = (),
    cut: bool = False,
) -> str:
    """Enqueue copies on a stream, in its order and unordered among themselves; returns how.

    No copy spans an end of a registration of ours, or one of `edges`; `cut` says that none does.

    A refused batch's `DriverError.index` is an entry of `d`. The vectors are read during the call. Where the batch call
    cannot be used (drivers before 12.8, captures, the legacy default stream), copies go one by one, regular ones as
    rows of a two-dimensional copy; the order is the same.
    `pageable` says that pageable memory takes part: one by one then, and the call may wait for the copies.
    """
    if not len(d):
        return "nothing"
    given = d
    if not cut:
        d = split(d, edges)
    call = driver()
    if capturing is None:
        capturing = call.stream_capturing(stream)
    if pageable:
        for k, (to, at, n) in enumerate(zip(d.dst.tolist(), d.src.tolist(), d.sizes.tolist(), strict=True)):
            try:
                call.memcpy_async(to, at, n, stream)
            except DriverError as error:
                raise refused(given, d, k, error) from error
        return "copies one by one"
    if stream not in LEGACY and not capturing and call.batch_supported():
        most = config.MAX_BATCH.get()
        for begin in range(0, len(d), most):
            part = slice(begin, begin + most)
            try:
                call.memcpy_batch_async(d.dst[part], d.src[part], d.sizes[part], stream)
            except DriverError as error:
                if error.index is None:
                    raise
                raise refused(given, d, begin + error.index, error) from error
        return "batch"
    _one_by_one(call, given, d, stream, edges)
    return "copies one by one"


def refused(given: Descriptors, made: Descriptors, at: int, error: DriverError) -> DriverError:
    """The error for copy `at` of those made of what was given, with its addresses and what the driver knows of them."""
    d = driver()
    src, dst = (describe_range(d, int(v[at]), int(made.sizes[at])) for v in (made.src, made.dst))
    return error.at(holder(given, made, at), f"{src} to {dst.partition(' at ')[2]}")


def enqueue_anywhere(d: Descriptors, stream: int, *, capturing: bool, pageable: bool = False) -> str:
    """`enqueue` of copies whose memory was not looked up: where others registered it in pieces, it is cut there.

    The driver is asked where pieces end once it refused, and ahead of a capture, which a refusal may end. What it
    answered is kept, so that later copies are cut at once. Destinations must not overlap other copies: some may be
    enqueued twice.
    """
    if not capturing:
        try:
            return enqueue(d, stream, capturing=capturing, pageable=pageable)
        except DriverError as error:
            if error.code != _INVALID_VALUE or not _learn_edges(d):
                raise
    else:
        _learn_edges(d)
    return enqueue(d, stream, capturing=capturing, pageable=pageable)


def _learn_edges(d: Descriptors) -> bool:
    """Have the registry know where what others registered ends inside these copies; whether that is new to it."""
    call = driver()
    found: set[int] = set()
    for side in (d.src, d.dst):
        found |= ends_within(call, zip(side.tolist(), d.sizes.tolist(), strict=True))
    return note_edges(call, found)


def holder(d: Descriptors, made: Descriptors, at: int) -> int | None:
    """Which of some copies begins where copy `at` among those made of them does, or holds its first byte."""
    dst, src = made.dst[at], made.src[at]
    inside = (d.dst <= dst) & (dst - d.dst < d.sizes) & (d.src <= src) & (src - d.src < d.sizes)
    begins = inside & (d.dst == dst) & (d.src == src)
    found = np.flatnonzero(begins if begins.any() else inside)
    return int(found[0]) if len(found) else None


def _in_one(call: CudaDriver, start: int, nbytes: int, edges: Sequence[int]) -> bool:
    """Whether a range lies in one allocation or registration, and spans none of `edges`."""
    info = call.pointer_info(start)
    end = start + nbytes
    return info is not None and end <= info.base + info.size and not spans(start, end, edges)


def _one_by_one(call: CudaDriver, given: Descriptors, d: Descriptors, stream: int, edges: Sequence[int]) -> None:
    count = len(d)
    at = 0
    to, src, sizes = d.dst.astype(np.int64), d.src.astype(np.int64), d.sizes.astype(np.int64)
    steps = np.stack([np.diff(to), np.diff(src), np.diff(sizes)])
    changes = np.flatnonzero((steps[:, 1:] != steps[:, :-1]).any(0)) + 1
    # For each copy, the first behind it to which the step is another one.
    until = np.append(changes, count - 1)[np.searchsorted(changes, np.arange(count), "right")]
    while at < count:
        width = int(sizes[at])
        rows = 1
        if at + 1 < count:
            step = steps[:, at]
            if step[2] == 0 and min(step[0], step[1]) >= width:
                rows = int(until[at]) - at + 1
        if rows >= 3:
            starts, pitches = (int(d.dst[at]), int(d.src[at])), (int(steps[0, at]), int(steps[1, at]))
            reach = pitches[0] * (rows - 1) + width, pitches[1] * (rows - 1) + width
            # Longer pitches are refused; and rows of one copy must lie in one allocation, as a copy's bytes must.
            if max(pitches) < 1 << 31 and all(map(_in_one, (call, call), starts, reach, (edges, edges))):
                call.memcpy_2d_async(starts[0], pitches[0], starts[1], pitches[1], width, rows, stream)
                at += rows
                continue
        for k in range(at, at + rows):
            try:
                call.memcpy_pinned_async(int(to[k]), int(src[k]), width, stream)
            except DriverError as error:
                raise refused(given, d, k, error) from error
        at += rows
