"""How the items of a call are divided into steps, each of which goes through a staging slot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvraw.arrays import U64
from kvraw.copying.kernel import KernelPlan
from kvraw.copying.kernel_args import WORDS
from kvraw.copying.plan import CopyPlan, Side
from kvraw.copying.planner import RateLimit
from kvraw.errors import PlacementError

__all__ = ["MOST_BASES", "ChunkCuts", "ItemCuts", "Step", "packed_side"]

_MOST_CHUNKS = 128  # in a slot: their addresses lie in an argument block, beside those of the cache
MOST_BASES = WORDS - _MOST_CHUNKS  # of the cache
# A share of a slot. So much of a store goes straight to the chunks while the first slot is packed, for the link not to
# wait. The last slot of a load, whose unpacking nothing overlaps, holds no more. Nothing of a load goes straight: on a
# busy GPU its kernels would wait for multiprocessors twice, one behind the other (benchmarks/README.md).
_SMALL_SHARE = 16

_Box = dict[str, tuple[int, int]]  # first and count along each axis of a chunk


class Step(NamedTuple):
    """What goes through a slot at a time.

    Attributes
    ----------
    kernel : KernelPlan
        Copies it between the device's side and the slot.
    bases : numpy.ndarray or None
        Base addresses of the device's side; None: those of the call.
    table : numpy.ndarray
        Base addresses of the slot's side, from where the slot begins.
    origin : int
        The item that `table` begins with.
    first, items : int
        The first item, counted from the origin, and how many.
    shift, skipped : int
        What the table lacks where items are counted from the call's own first instead: bytes to take away from its
        entries, and leading entries.
    nbytes : int
        How much of the slot is used.
    chunk, chunks, offset, each : int
        Of a row of chunks which these are, and the bytes of each.
    """

    kernel: KernelPlan
    bases: U64 | None
    table: U64
    origin: int
    first: int
    items: int
    nbytes: int
    shift: int = 0
    skipped: int = 0
    chunk: int = 0
    chunks: int = 0
    offset: int = 0
    each: int = 0


def packed_side(plan: CopyPlan, host: Side, items: int) -> Side:
    """A side for `items` items without gaps, in the order in which the host's side has them."""
    axes = [
        ("layer", plan.layers, host.table_layer, host.layer),
        ("plane", plan.planes, host.table_plane, host.plane),
        ("token", plan.tokens, 0, host.token),
        ("head", plan.heads, 0, host.head),
        ("outer", items, host.table_outer if host.page == 1 else 0, host.inner if host.page > 1 else host.outer),
    ]
    step = plan.run
    strides: dict[str, int] = {}
    for name, count, _, _ in sorted(axes, key=lambda axis: axis[2:]):
        strides[name] = step
        step *= count
    return Side(**strides)  # type: ignore[arg-type]  # these are numbers


class ItemCuts:
    """Steps of any plan: items lie in a slot as densely as the order of the host's bytes allows.

    Attributes
    ----------
    plan : CopyPlan
        The copy between a slot and the host.
    stride : int
        Bytes from one item to the next in a slot.
    """

    def __init__(
        self,
        plan: CopyPlan,
        store: bool,
        slot_bytes: int,
        ctas: int | None,
        check: bool,
        names: tuple[str, str],
        limit: RateLimit | None,
    ) -> None:
        self._store, self._items, self._item_bytes = store, slot_bytes // plan.item_bytes, plan.item_bytes
        slot = packed_side(plan, plan.dst if store else plan.src, self._items)
        self.stride = slot.outer
        self.plan = replace(plan, src=slot) if store else replace(plan, dst=slot)
        packs = replace(plan, dst=slot) if store else replace(plan, src=slot)
        self._kernel = KernelPlan(packs, ctas=ctas, check=check, names=names, limit=limit)
        self._begin: U64 = np.zeros(1, np.uint64)

    def steps(self, first: int, count: int) -> tuple[Step | None, list[Step]]:
        """What goes straight (nothing), and the steps through slots, for some items."""
        end, few = first + count, max(1, self._items // _SMALL_SHARE)
        parts = [(at, min(self._items, end - at)) for at in range(first, end, self._items)]
        at = 0 if self._store else len(parts) - 1
        begin, many = parts[at]
        if many >= 2 * few:
            middle = few if self._store else many - few
            parts[at : at + 1] = [(begin, middle), (begin + middle, many - middle)]
        return None, [
            # All of a slot counts: where items are outside of other axes, gaps lie behind the last.
            Step(self._kernel, None, self._begin, at, 0, n, self._items * self._item_bytes, at * self.stride)
            for at, n in parts
        ]


@dataclass(frozen=True, slots=True)
class _Slice:
    """Contiguous bytes of a chunk, and the kernel plan that fills them from the cache (or empties them)."""

    kernel: KernelPlan
    bases: U64
    offset: int  # of the bytes in the chunk
    nbytes: int
    base: int  # what to add to the slot's address for the base address of the slot's side
    first: int  # items of the chunk
    count: int
    box: _Box


class _Part(NamedTuple):
    """A slice of each of some chunks."""

    piece: _Slice
    chunk: int
    chunks: int

    @property
    def nbytes(self) -> int:
        return self.piece.nbytes * self.chunks


class ChunkCuts:
    """Steps of a plan whose host side is a row of chunks that are covered whole.

    Chunks lie in a slot as they do in host memory, or, where they are larger than it, contiguous parts of one: so there
    are few and large copies, known ahead of a call.

    Raises
    ------
    PlacementError
        A row does not fit a slot.
    """

    def __init__(
        self,
        plan: CopyPlan,
        store: bool,
        slot_bytes: int,
        ctas: int | None,
        check: bool,
        names: tuple[str, str],
        limit: RateLimit | None,
        bases: U64,
        chunk_bytes: int,
    ) -> None:
        self._plan, self._store, self._ctas, self._check, self._names = plan, store, ctas, check, names
        self._limit = limit
        self._paged, self._chunk = (plan.src, plan.dst) if store else (plan.dst, plan.src)
        self._bases, self.chunk_bytes, self.per_chunk = bases, chunk_bytes, self._chunk.page
        self._group = min(slot_bytes // chunk_bytes, _MOST_CHUNKS)
        self._kernels: dict[tuple[int, int], KernelPlan] = {}
        self._small = slot_bytes // _SMALL_SHARE
        # Bytes from one to the next along each axis of a chunk, outermost first.
        steps = {"plane": self._chunk.plane, "layer": self._chunk.layer, "item": self._chunk.inner}
        self._steps = dict(sorted(steps.items(), key=lambda x: -x[1]))
        # What lies inside a token or a head that steps further cannot be cut: it would not be contiguous.
        around = ((self._chunk.token, plan.tokens), (self._chunk.head, plan.heads))
        self._least = max((stride for stride, count in around if count > 1), default=0)
        whole = self._slice({"plane": (0, plan.planes), "layer": (0, plan.layers), "item": (0, self.per_chunk)})
        self._slices = [whole] if self._group else list(self._cut(whole, slot_bytes))
        self._split: dict[tuple[int, bool], tuple[_Slice, _Slice]] = {}

    def _slice(self, box: _Box) -> _Slice:
        (plane, planes), (layer, layers), (first, count) = box["plane"], box["layer"], box["item"]
        kernel = self._kernels.get((planes, layers))
        if kernel is None:
            part = replace(self._plan, planes=planes, layers=layers)
            kernel = KernelPlan(part, ctas=self._ctas, check=self._check, names=self._names, limit=self._limit)
            self._kernels[planes, layers] = kernel
        paged, chunk = self._paged, self._chunk
        entry = plane * paged.table_plane + layer * paged.table_layer
        bases = self._bases[entry:] + np.uint64(plane * paged.plane + layer * paged.layer)
        offset = plane * chunk.plane + layer * chunk.layer + first * chunk.inner
        whole = self._plan.planes * self._plan.layers * self.per_chunk
        nbytes = self.chunk_bytes * planes * layers * count // whole
        return _Slice(kernel, bases, offset, nbytes, -first * chunk.inner, first, count, box)

    def _outermost(self, piece: _Slice) -> str | None:
        """The outermost axis along which a slice is longer than one; None where there is none that it can be cut at."""
        axis = next((a for a in self._steps if piece.box[a][1] > 1), None)
        return None if axis is None or self._steps[axis] < self._least else axis

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

    def _part(self, parts: list[_Part], front: bool) -> None:
        """Part a small step from the first (or the last) of these."""
        at = 0 if front else -1
        piece, chunk, many = parts.pop(at)
        made = [_Part(piece, chunk, many)]
        if many > 1 and many * piece.nbytes >= 2 * self._small:
            few = max(1, self._small // piece.nbytes)
            middle = few if front else many - few
            made = [_Part(piece, chunk, middle), _Part(piece, chunk + middle, many - middle)]
        last = made[at]
        if last.chunks == 1 and (halves := self._halves(at, front)):
            made[at : at + 1 or None] = [_Part(half, last.chunk, 1) for half in halves]
        parts[:] = made + parts if front else parts + made

    def steps(self, first_chunk: int, chunks: int) -> tuple[Step | None, list[Step]]:
        """What goes straight, and what goes through the slots one after the other."""
        group = max(1, self._group)
        end = first_chunk + chunks
        parts = [
            _Part(piece, chunk, min(group, end - chunk))
            for chunk in range(first_chunk, end, group)
            for piece in self._slices
        ]
        self._part(parts, self._store)
        lead = None
        if self._store and len(parts) > 1 and parts[0].nbytes <= 2 * self._small:
            lead = self._step(parts.pop(0))
        return lead, [self._step(part) for part in parts]

    def _step(self, part: _Part) -> Step:
        piece, chunk, chunks = part
        table = np.array([(piece.base + k * self.chunk_bytes) % 2**64 for k in range(chunks)], np.uint64)
        first, count = (piece.first, piece.count) if chunks == 1 else (0, chunks * self.per_chunk)
        used = chunks * self.chunk_bytes if chunks > 1 else piece.nbytes
        origin = chunk * self.per_chunk
        return Step(
            *(piece.kernel, piece.bases, table, origin, first, count, used),
            skipped=chunk,
            chunk=chunk,
            chunks=chunks,
            offset=piece.offset,
            each=piece.nbytes,
        )
