"""The staged engine: a kernel packs into device slots that hold chunks as the host lays them out, or unpacks them.

Large copies by the copy engine move the slots, while the kernel works on the next.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvraw.arrays import U64, IndexVector
from kvraw.engines import copy_engine
from kvraw.engines.arena import StagingRing
from kvraw.engines.device_state import DeviceState
from kvraw.engines.kernel import KernelPlan
from kvraw.engines.operands import Operands
from kvraw.errors import PlacementError
from kvraw.plan import CopyPlan, Side
from kvraw.runtime.driver import driver
from kvraw.runtime.inflight import Operation
from kvraw.runtime.register import boundaries

__all__ = ["StagedPlan"]

_FEW = 4  # copies that are enqueued one by one sooner than as a batch


@dataclass(frozen=True, slots=True)
class _Slice:
    """Contiguous bytes of a chunk, and the kernel plan that fills them from the cache (or empties them)."""

    kernel: KernelPlan
    offset: int  # of the bytes in the chunk
    nbytes: int
    paged_bases: U64
    base: int  # what to add to the slot's address for the base address of the slot's side
    first: int  # items of the chunk
    count: int


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
    """

    def __init__(
        self, plan: CopyPlan, store: bool, paged_bases: U64, chunk_bytes: int, slot_bytes: int, ctas: int | None = None
    ) -> None:
        self._plan, self._store, self._ctas = plan, store, ctas
        self._paged_bases, self._chunk_bytes = paged_bases, chunk_bytes
        self._per_chunk = self._chunk_side(plan).page
        self.chunks_per_slot = slot_bytes // chunk_bytes
        self._kernels: dict[tuple[int, int], KernelPlan] = {}
        self._slices: list[_Slice] = []
        if self.chunks_per_slot:
            self._slices = [self._slice(0, plan.planes, 0, plan.layers, 0, self._per_chunk)]
        else:
            self._slices = list(self._cut(slot_bytes))

    def _chunk_side(self, plan: CopyPlan) -> Side:
        return plan.dst if self._store else plan.src

    def _paged_side(self, plan: CopyPlan) -> Side:
        return plan.src if self._store else plan.dst

    def _slice(self, plane: int, planes: int, layer: int, layers: int, first: int, count: int) -> _Slice:
        kernel = self._kernels.get((planes, layers))
        if kernel is None:
            part = replace(self._plan, planes=planes, layers=layers)
            kernel = self._kernels[planes, layers] = KernelPlan(part, ctas=self._ctas, check=False)
        paged, chunk = self._paged_side(self._plan), self._chunk_side(self._plan)
        entry = plane * paged.table_plane + layer * paged.table_layer
        bases = self._paged_bases[entry:] + np.uint64(plane * paged.plane + layer * paged.layer)
        offset = plane * chunk.plane + layer * chunk.layer + first * chunk.inner
        share = planes * layers * count
        whole = self._plan.planes * self._plan.layers * self._per_chunk
        return _Slice(kernel, offset, self._chunk_bytes * share // whole, bases, -first * chunk.inner, first, count)

    def _cut(self, slot_bytes: int) -> Iterator[_Slice]:
        """Cut a chunk along its outermost axes into contiguous pieces of at most a slot."""
        p, chunk = self._plan, self._chunk_side(self._plan)
        step = {"plane": chunk.plane, "layer": chunk.layer, "item": chunk.inner}
        size = {"plane": p.planes, "layer": p.layers, "item": self._per_chunk}
        outermost = sorted((a for a in step if size[a] > 1), key=lambda a: -step[a])
        pieces: list[dict[str, tuple[int, int]]] = [{a: (0, n) for a, n in size.items()}]
        for axis in outermost:
            share = np.prod([n for _, n in pieces[0].values()]) / np.prod(list(size.values()))
            if self._chunk_bytes * share <= slot_bytes:
                break
            fit = max(1, slot_bytes // step[axis])
            pieces = [
                {**piece, axis: (at, min(fit, size[axis] - at))} for piece in pieces for at in range(0, size[axis], fit)
            ]
        for piece in pieces:
            made = self._slice(*piece["plane"], *piece["layer"], *piece["item"])
            if made.nbytes > slot_bytes:
                raise PlacementError(
                    f"a row of {made.nbytes} bytes does not fit a staging slot of {slot_bytes} bytes; "
                    f"raise KVRAW_STAGING_SLOT"
                )
            yield made

    def enqueue(
        self,
        state: DeviceState,
        ring: StagingRing,
        operation: Operation,
        index: IndexVector,
        addresses: U64,
        first_chunk: int,
        chunks: int,
        edges: tuple[int, ...],
    ) -> int:
        """Enqueue whole chunks `first_chunk` to `first_chunk + chunks`; returns the slots used.

        The operation's stream waits for all of it. Indices are on the host; `addresses` are the chunks' as the host
        sees them, and no copy spans one of `edges`. The device's context is current.
        """
        stream, copies = operation.stream, ring.copies.handle
        with ring.lock:
            operation.enqueued += [stream, copies]
            if not self._store:
                start = state.books.take_event()
                operation.then(functools.partial(state.books.give_event, start))
                driver().event_record(start, stream)
                driver().stream_wait_event(copies, start)
            steps, slot = 0, None
            places = addresses.tolist()
            low, high = addresses.min(), addresses.max() + np.uint64(self._chunk_bytes)
            plain = not len(boundaries(np.array([low]), np.array([high - low]), edges)[0])
            group = max(1, self.chunks_per_slot)
            for chunk in range(first_chunk, first_chunk + chunks, group):
                many = min(group, first_chunk + chunks - chunk)
                for piece in self._slices:
                    slot = ring.next()
                    steps += 1
                    writer, reader = (stream, copies) if self._store else (copies, stream)
                    slot.acquire(writer)
                    for side in (0, 1) if self._store else (1, 0):
                        if side == 0:
                            self._pack(state, operation, piece, slot.address, index, chunk, many)
                        else:
                            self._move(
                                piece, slot.address, places[chunk : chunk + many], None if plain else edges, copies
                            )
                        if side == (0 if self._store else 1):
                            slot.hand_over(writer, reader)
                    slot.release(reader)
            if self._store and slot is not None:
                driver().stream_wait_event(stream, slot.free)
        return steps

    def _pack(
        self,
        state: DeviceState,
        operation: Operation,
        piece: _Slice,
        slot: int,
        index: IndexVector,
        chunk: int,
        chunks: int,
    ) -> None:
        assert index.host is not None
        begin = chunk * self._per_chunk
        ids = index.host[begin : begin + chunks * self._per_chunk]
        paged = Operands(piece.paged_bases, IndexVector(ids, 0, len(ids)))
        at = slot + piece.base
        bases = np.array([(at + k * self._chunk_bytes) % 2**64 for k in range(chunks)], np.uint64)
        src, dst = (paged, Operands(bases)) if self._store else (Operands(bases), paged)
        count = piece.count if chunks == 1 else chunks * self._per_chunk
        piece.kernel.enqueue(state, operation, src, dst, piece.first, count, link=False)

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
        if edges is None and len(copies) <= _FEW:
            for host, device, nbytes in copies:
                to, source = (host, device) if self._store else (device, host)
                d.memcpy_async(to, source, nbytes, stream)
            return
        host, device, nbytes = np.array(copies, np.uint64).T.copy()
        ends = (host, device) if self._store else (device, host)
        copy_engine.enqueue(copy_engine.Descriptors(*ends, nbytes), stream, capturing=False, edges=edges or ())
