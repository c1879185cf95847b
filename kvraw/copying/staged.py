"""The staged engine: a kernel packs into device slots that hold chunks as the host lays them out, or unpacks them.

Large copies by the copy engine move the slots, while the kernel works on the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvraw.arrays import U64, IndexVector
from kvraw.copying import copy_engine
from kvraw.copying.bound import BoundCall, IdCheck, StagedStep, bind_staged
from kvraw.copying.call import Call
from kvraw.copying.device_state import DeviceState
from kvraw.copying.kernel import KernelPlan
from kvraw.copying.operands import Operands
from kvraw.copying.plan import CopyPlan, Side
from kvraw.copying.staging_ring import StagingRing, StagingSlot
from kvraw.errors import PlacementError
from kvraw.runtime.completion import Operation
from kvraw.runtime.driver import driver
from kvraw.runtime.host.registration import spans

__all__ = ["StagedPlan"]

_MOST = 256  # calls of other counts, and rows in slots, that are kept
_FEW = 4  # copies that are enqueued one by one sooner than as a batch
# A share of a slot. So much of a store goes straight to the chunks while the first slot is packed, for the link not to
# wait. The last slot of a load, whose unpacking nothing overlaps, holds no more. Nothing of a load goes straight: on a
# busy GPU its kernels would wait for multiprocessors twice, one behind the other (benchmarks/README.md).
_SMALL_SHARE = 16

_Box = dict[str, tuple[int, int]]  # first and count along each axis of a chunk


@dataclass(frozen=True, slots=True)
class _Slice:
    """Contiguous bytes of a chunk, and the kernel plan that fills them from the cache (or empties them)."""

    kernel: KernelPlan
    offset: int  # of the bytes in the chunk
    nbytes: int
    paged_bases: U64
    bits: int  # the alignment of these, or-ed together
    base: int  # what to add to the slot's address for the base address of the slot's side
    first: int  # items of the chunk
    count: int
    box: _Box


class _Step(NamedTuple):
    """What goes through a slot at a time: a slice of each of some chunks."""

    piece: _Slice
    chunk: int
    chunks: int


class StagedPlan:
    """A copy plan made ready for the staged engine.

    Parameters
    ----------
    plan : CopyPlan
        What to copy; one side is a row of chunks (one base per chunk).
    store : bool
        The chunks are the destination.
    paged_bases : numpy.ndarray
        Base addresses of the cache.
    chunk_bytes : int
        Bytes of a chunk, all of which the plan covers.
    slot_bytes : int
        Bytes of a staging slot.
    ctas : int, optional
        Most thread blocks of the kernels.
    check : bool
        Check indices that lie on the device, in the kernels.
    names : tuple of str
        What errors call the source's and the destination's index.
    """

    def __init__(
        self,
        plan: CopyPlan,
        store: bool,
        paged_bases: U64,
        chunk_bytes: int,
        slot_bytes: int,
        *,
        ctas: int | None = None,
        check: bool = True,
        names: tuple[str, str] = ("src_index", "dst_index"),
    ) -> None:
        self._plan, self._store, self._ctas, self._check, self._names = plan, store, ctas, check, names
        self._paged_bases, self._chunk_bytes = paged_bases, chunk_bytes
        self._per_chunk = self._chunk_side(plan).page
        self.chunks_per_slot = slot_bytes // chunk_bytes
        self._kernels: dict[tuple[int, int], KernelPlan] = {}
        self._small = slot_bytes // _SMALL_SHARE
        self._step = self._axis_steps()
        whole = self._slice({"plane": (0, plan.planes), "layer": (0, plan.layers), "item": (0, self._per_chunk)})
        self._slices = [whole] if self.chunks_per_slot else list(self._cut(whole, slot_bytes))
        self._split: dict[tuple[int, bool], tuple[_Slice, _Slice]] = {}
        self._made: dict[tuple[int, int], tuple[_Step | None, list[_Step]]] = {}
        self._rows: dict[tuple[int, int, int], Operands] = {}  # of chunks in slots

    def _chunk_side(self, plan: CopyPlan) -> Side:
        return plan.dst if self._store else plan.src

    def _paged_side(self, plan: CopyPlan) -> Side:
        return plan.src if self._store else plan.dst

    def _axis_steps(self) -> dict[str, int]:
        """Bytes from one to the next along each axis of a chunk, outermost first."""
        chunk = self._chunk_side(self._plan)
        step = {"plane": chunk.plane, "layer": chunk.layer, "item": chunk.inner}
        # What lies inside a token or a head that steps further cannot be cut: it would not be contiguous.
        around = ((chunk.token, self._plan.tokens), (chunk.head, self._plan.heads))
        self._least = max((stride for stride, count in around if count > 1), default=0)
        return dict(sorted(step.items(), key=lambda x: -x[1]))

    def _slice(self, box: _Box) -> _Slice:
        (plane, planes), (layer, layers), (first, count) = box["plane"], box["layer"], box["item"]
        kernel = self._kernels.get((planes, layers))
        if kernel is None:
            part = replace(self._plan, planes=planes, layers=layers)
            kernel = self._kernels[planes, layers] = KernelPlan(
                part, ctas=self._ctas, check=self._check, names=self._names
            )
        paged, chunk = self._paged_side(self._plan), self._chunk_side(self._plan)
        entry = plane * paged.table_plane + layer * paged.table_layer
        bases = self._paged_bases[entry:] + np.uint64(plane * paged.plane + layer * paged.layer)
        offset = plane * chunk.plane + layer * chunk.layer + first * chunk.inner
        share = planes * layers * count
        whole = self._plan.planes * self._plan.layers * self._per_chunk
        nbytes, bits = self._chunk_bytes * share // whole, int(np.bitwise_or.reduce(bases))
        return _Slice(kernel, offset, nbytes, bases, bits, -first * chunk.inner, first, count, box)

    def _outermost(self, piece: _Slice) -> str | None:
        """The outermost axis along which a slice is longer than one; None where there is none that it can be cut at."""
        axis = next((a for a in self._step if piece.box[a][1] > 1), None)
        return None if axis is None or self._step[axis] < self._least else axis

    def _cut(self, piece: _Slice, slot_bytes: int) -> Iterator[_Slice]:
        """Cut a slice along its outermost axes into contiguous ones of at most a slot."""
        if piece.nbytes <= slot_bytes:
            yield piece
            return
        axis = self._outermost(piece)
        if axis is None:
            raise PlacementError(
                f"a row of {piece.nbytes} bytes does not fit a staging slot of {slot_bytes} bytes; "
                f"raise KVRAW_STAGING_SLOT"
            )
        first, count = piece.box[axis]
        fit = max(1, slot_bytes // (piece.nbytes // count))
        for at in range(first, first + count, fit):
            part = self._slice({**piece.box, axis: (at, min(fit, first + count - at))})
            yield from self._cut(part, slot_bytes)

    def _halves(self, at: int, front: bool) -> tuple[_Slice, _Slice] | None:
        """A slice as two contiguous ones, the first of them (or the last) small; None: it is small, or one row."""
        piece = self._slices[at]
        axis = self._outermost(piece)
        if axis is None or piece.nbytes < 2 * self._small:
            return None
        if (at, front) not in self._split:
            first, count = piece.box[axis]
            few = max(1, self._small // (piece.nbytes // count))
            middle = few if front else count - few
            self._split[at, front] = (
                self._slice({**piece.box, axis: (first, middle)}),
                self._slice({**piece.box, axis: (first + middle, count - middle)}),
            )
        return self._split[at, front]

    def _part(self, steps: list[_Step], front: bool) -> None:
        """Part a small step from the first (or the last) of these."""
        at = 0 if front else len(steps) - 1
        piece, chunk, many = steps[at]
        if many > 1:
            if many * piece.nbytes < 2 * self._small:
                return
            few = max(1, self._small // piece.nbytes)
            middle = few if front else many - few
            steps[at : at + 1] = [_Step(piece, chunk, middle), _Step(piece, chunk + middle, many - middle)]
            at = 0 if front else len(steps) - 1
            piece, chunk, many = steps[at]
        halves = self._halves(0 if front else -1, front) if many == 1 else None
        if halves:
            steps[at : at + 1] = [_Step(half, chunk, 1) for half in halves]

    def _steps(self, first_chunk: int, chunks: int) -> tuple[_Step | None, list[_Step]]:
        """What goes straight, and what goes through the slots one after the other."""
        found = self._made.get((first_chunk, chunks))
        if found is None:
            if len(self._made) >= _MOST:
                self._made.clear()
            found = self._made[first_chunk, chunks] = self._divide(first_chunk, chunks)
        return found

    def _divide(self, first_chunk: int, chunks: int) -> tuple[_Step | None, list[_Step]]:
        group = max(1, self.chunks_per_slot)
        end = first_chunk + chunks
        steps = [
            _Step(piece, chunk, min(group, end - chunk))
            for chunk in range(first_chunk, end, group)
            for piece in self._slices
        ]
        if not self._store:
            self._part(steps, False)
            return None, steps
        self._part(steps, True)
        lead = None
        if len(steps) > 1 and steps[0].piece.nbytes * steps[0].chunks <= 2 * self._small:
            lead = steps.pop(0)
        return lead, steps

    def enqueue(
        self,
        state: DeviceState,
        ring: StagingRing,
        operation: Operation,
        index: IndexVector,
        addresses: U64,
        seen: U64,
        first_chunk: int,
        chunks: int,
        edges: tuple[int, ...],
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        """Enqueue whole chunks `first_chunk` to `first_chunk + chunks`.

        The operation's stream waits for all of it. Where the kernel is to check indices on the device, a store
        clears the slots first: what belongs to a bad index becomes zeros. `addresses` are the chunks' as the host
        sees them, `seen` as the device does, and no copy spans one of `edges`. Where nobody waits for the operation,
        `on_error` receives what kernels find. The device's context is current.
        """
        stream, copies, packs = operation.stream, ring.copies.handle, ring.packs.handle
        writer = packs if self._store else copies
        d, completions = state.owner, state.completions
        with ring.lock:
            operation.enqueued += [stream, copies, packs]
            start = completions.take_event()
            operation.on_done(functools.partial(completions.give_event, start))
            d.event_record(start, stream)
            d.stream_wait_event(writer, start)
            lead, steps = self._steps(first_chunk, chunks)
            if lead is not None:
                straight = seen[lead.chunk : lead.chunk + lead.chunks]
                row = Operands(straight + np.uint64((lead.piece.offset + lead.piece.base) % 2**64))
                self._kernel(state, operation, lead, row, index, stream, link=True, on_error=on_error)
            places = addresses.tolist()
            plain = not spans(min(places), max(places) + self._chunk_bytes, edges)

            def pack(at: int, slot: StagingSlot, on: int) -> None:
                step = steps[at]
                if self._store and index.host is None and self._check:
                    nbytes = step.chunks * self._chunk_bytes if step.chunks > 1 else step.piece.nbytes
                    d.memset_async(slot.address, 0, nbytes, on)
                row = self._row(slot.address, step.chunks, step.piece.base)
                self._kernel(state, operation, step, row, index, on, link=False, on_error=on_error)

            def move(at: int, slot: StagingSlot) -> None:
                piece, chunk, many = steps[at]
                self._move(piece, slot.address, places[chunk : chunk + many], None if plain else edges, copies)

            ring.enqueue(stream, self._store, len(steps), pack, move)

    def bind(
        self,
        state: DeviceState,
        ring: StagingRing,
        checks: tuple[IdCheck, IdCheck],
        call: Call,
        bits: int,
        joined: tuple[bool, ...],
        width: int = 0,
    ) -> BoundCall | None:
        """The program of calls like this one, of whole chunks, from the ring's next slot on.

        None where it must be enqueued step by step. The device's context is current, and the ring's lock held. `bits`
        is the alignment of the chunks' addresses as the device sees them, `joined` and `width` as for `bind_staged`.
        """
        lead, steps = self._steps(0, len(joined))
        slots = ring.coming(len(steps))
        if not steps or not all(slot.used for slot in slots):
            return None
        first = None if lead is None else self._bound_step(state, lead, None, bits, width)
        made = [
            self._bound_step(state, step, slot.address, bits, width) for step, slot in zip(steps, slots, strict=True)
        ]
        if None in made or (lead is not None and first is None):
            return None
        ready = [step for step in made if step is not None]
        cleared = width > 0 and self._check and self._store
        ends = self._store, self._chunk_bytes, joined
        return bind_staged(state, ring, ready, first, checks, call, *ends, width, cleared)

    def _bound_step(
        self, state: DeviceState, step: _Step, slot: int | None, bits: int, width: int
    ) -> StagedStep | None:
        """A step with its launch bound: to a slot, or straight to the chunks."""
        piece, chunk, chunks = step
        first, count = (piece.first, piece.count) if chunks == 1 else (0, chunks * self._per_chunk)
        row: U64 | int = chunks
        offset = 0
        if slot is None:
            offset = (piece.offset + piece.base) % 2**64
            bits |= offset
        else:
            row = self._row(slot, chunks, piece.base).bases
            bits = int(np.bitwise_or.reduce(row))
        tables = (piece.paged_bases, row) if self._store else (row, piece.paged_bases)
        # Ids on the device are counted as the call counts them, and so are the positions that kernels report.
        begin = chunk * self._per_chunk if width else 0
        launch = piece.kernel.bind(
            state,
            tables,
            (0 if self._store else 1,),
            begin + first,
            count,
            bits | piece.bits,
            link=slot is None,
            width=width,
            skipped=chunk if width else 0,
        )
        if launch is None:
            return None
        launch.table_offset = offset
        return StagedStep(launch, chunk * self._per_chunk + first, chunk, chunks, piece.offset, piece.nbytes)

    def _row(self, slot: int, many: int, base: int) -> Operands:
        """The row of so many chunks that lie in a slot."""
        found = self._rows.get((slot, many, base))
        if found is None:
            if len(self._rows) >= _MOST:
                self._rows.clear()
            at = [(slot + base + k * self._chunk_bytes) % 2**64 for k in range(many)]
            row = np.array(at, np.uint64)
            found = self._rows[slot, many, base] = Operands(row, None, None, int(np.bitwise_or.reduce(row)))
        return found

    def _kernel(
        self,
        state: DeviceState,
        operation: Operation,
        step: _Step,
        row: Operands,
        index: IndexVector,
        stream: int,
        *,
        link: bool,
        on_error: Callable[[Exception], None] | None,
    ) -> None:
        """Enqueue the copy of a step between the cache and the row of its chunks."""
        piece, chunk, chunks = step
        begin, count = chunk * self._per_chunk, chunks * self._per_chunk
        if index.host is not None:
            part = IndexVector(index.host[begin : begin + count], 0, count)
        else:
            part = IndexVector(None, index.address + begin * index.width, count, index.width, index.device)
        paged = Operands(piece.paged_bases, part, None, piece.bits)
        src, dst = (paged, row) if self._store else (row, paged)
        if chunks == 1:
            count = piece.count
        piece.kernel.enqueue(
            state, operation, src, dst, piece.first, count, link=link, stream=stream, origin=begin, on_error=on_error
        )

    def _move(self, piece: _Slice, slot: int, addresses: list[int], edges: tuple[int, ...] | None, stream: int) -> None:
        """Enqueue the large copies of one slot, neighbours as one; `edges` None: nothing is to be cut."""
        d, size = driver(), piece.nbytes
        at, count = 0, len(addresses)
        copies = []
        while at < count:
            end = at + 1
            while end < count and addresses[end] == addresses[end - 1] + size:
                end += 1
            copies.append((addresses[at] + piece.offset, slot + at * self._chunk_bytes, (end - at) * size))
            at = end
        if len(copies) <= _FEW and (edges is None or not any(spans(at, at + n, edges) for at, _, n in copies)):
            for host, device, nbytes in copies:
                to, source = (host, device) if self._store else (device, host)
                d.memcpy_pinned_async(to, source, nbytes, stream)
            return
        host, device, nbytes = np.array(copies, np.uint64).T.copy()
        ends = (host, device) if self._store else (device, host)
        copy_engine.enqueue(copy_engine.Descriptors(*ends, nbytes), stream, capturing=False, edges=edges or ())
