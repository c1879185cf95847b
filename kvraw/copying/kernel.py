"""The kernel engine: one launch of a shipped PTX kernel carries out a whole plan."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvraw import config
from kvraw.arrays import U64
from kvraw.copying import kernel_args as ka
from kvraw.copying.device_state import DeviceState, Upload
from kvraw.copying.operands import DeviceTable, Operands
from kvraw.copying.pace import CREDIT, OTHER_WAY, SLACK, both_ways, in_the_long_run, require_rate
from kvraw.copying.plan import CopyPlan
from kvraw.copying.planner import RateLimit, profile_for
from kvraw.errors import BoundsError, UnsupportedDriverError
from kvraw.ptx.loader import read_ptx
from kvraw.runtime import fork
from kvraw.runtime.completion import Operation
from kvraw.runtime.driver import CudaDriver
from kvraw.runtime.module import ArgumentBlock, Kernel

__all__ = ["KernelPlan", "copy_kernel", "kernels_barred", "launch_shape"]

THREADS = 1024
_KINDS = 64  # kinds of calls of a plan whose arrangement is kept
# These reach any rate worth keeping to, and more of them are worse neighbours at the same rate: where thread blocks
# take a multiprocessor's registers, other work finds no room on it.
PACED_CTAS = 2
PACED_THREADS = {"store": 768, "load": 1024, "copy": 1024}
LINK_CTAS = 16  # saturates PCIe 5 x16 on an H200 with margin (benchmarks/README.md)
_SIDES = ("src", "dst")

_log = logging.getLogger("kvraw")
_barred: weakref.WeakKeyDictionary[CudaDriver, str] = weakref.WeakKeyDictionary()


@functools.cache
def copy_kernel(width: int, paced: bool = False) -> Kernel:
    """The copy kernel for accesses of `width` bytes; `paced`: the one that can keep to a rate."""
    name = f"copy{'_paced' * paced}_v{width}"
    return Kernel(read_ptx(f"{name}.ptx"), f"kvraw_{name}")


def kernels_barred(d: CudaDriver, width: int) -> str:
    """Why no kernel can run, where the driver compiles none; empty where they can. A device's context is current.

    Found out once per driver, with the copy kernel for accesses of `width` bytes.
    """
    why = _barred.get(d)
    if why is None:
        why = ""
        try:
            copy_kernel(width).handle_for(d)
        except UnsupportedDriverError as error:
            why = str(error)
            _log.warning("copies go by the copy engine alone: %s", why)
        _barred[d] = why
    return why


def launch_shape(segments: int, most: int, most_threads: int = THREADS) -> tuple[int, int]:
    """Thread blocks and threads of a launch: at most `most` blocks, no more warps than groups of 32 segments."""
    groups = -(-segments // 32)
    warps = max(min(most_threads // 32, -(-groups // most)), 1)
    return min(most, -(-groups // warps)), warps * 32


class _Piece(NamedTuple):
    """A table or a host index of one side, and where it goes: into the block's words, or through an upload."""

    side: int
    is_index: bool
    at: int  # in words
    inline: bool


@functools.lru_cache(1024)
def _arrangement(lengths: tuple[int, int, int, int]) -> tuple[list[_Piece], int]:
    """Where tables of source and destination, then their host indices (-1: none) go, and the words of an upload."""
    room, inline = ka.WORDS, set()
    for k in sorted(range(4), key=lambda k: lengths[k]):  # the longest leave the block first
        if 0 <= lengths[k] <= room:
            room -= lengths[k]
            inline.add(k)
    pieces: list[_Piece] = []
    ends = [0, 0]  # words of the upload, words of the block
    for k, length in enumerate(lengths):
        if length >= 0:
            fits = k in inline
            pieces.append(_Piece(k % 2, k >= 2, ends[fits], fits))
            ends[fits] += length
    return pieces, ends[0]


class BoundLaunch:
    """A launch of the copy kernel whose arguments lie ready, all but ids and addresses: these are written into them.

    Attributes
    ----------
    block : ArgumentBlock
        The arguments.
    kernel, ctas, threads, params : int
        What the driver takes.
    index_addresses : list of int
        Where the ids of source and destination are to be written, as 64-bit words, or their address, where they lie on
        the device; 0: there are none.
    status_address : int
        Where the address of the status words is to be written.
    table_addresses : list of int
        Where the tables of source and destination are to be written, for those that were not given; or the address of
        one that the device has.
    count : int
        Ids.
    """

    __slots__ = (
        *("block", "count", "ctas", "index_addresses", "kernel", "params"),
        *("status_address", "table_addresses", "threads"),
    )

    def __init__(
        self,
        block: ArgumentBlock,
        kernel: int,
        grid: tuple[int, int],
        indices: list[int],
        tables: list[int],
        count: int,
    ) -> None:
        self.block, self.kernel, self.params, self.count = block, kernel, block.address, count
        self.ctas, self.threads = grid
        self.index_addresses, self.table_addresses = indices, tables
        self.status_address = block.start + 8 * ka.STATUS


class KernelPlan:
    """A copy plan made ready for the kernel engine: a packed argument block, changed and launched at each call.

    Parameters
    ----------
    plan : CopyPlan
        What to copy.
    ctas : int, optional
        Most thread blocks of a launch; default: 16 where host memory takes part, else two per multiprocessor.
    threads : int
        Most threads of a block: a multiple of 32, at most 1024.
    check : bool
        Check indices that lie on the device, in the kernel.
    names : tuple of str
        What errors call the source's and the destination's index.
    limit : RateLimit, optional
        What launches that cross the link keep to; default: that of `KVRAW_NEIGHBOUR`.
    """

    def __init__(
        self,
        plan: CopyPlan,
        *,
        ctas: int | None = None,
        threads: int = THREADS,
        check: bool = True,
        names: tuple[str, str] = ("src_index", "dst_index"),
        limit: RateLimit | None = None,
    ) -> None:
        self.limit = RateLimit.of(None) if limit is None else limit
        if not 32 <= threads <= THREADS or threads % 32:
            raise BoundsError(f"threads is {threads}, must be a multiple of 32 in [32, {THREADS}]")
        self.threads = threads
        self.plan, self.ctas, self.check, self.names = plan, ctas or config.CTAS.get(), check, names
        self._block = ArgumentBlock(ka.ARGS)
        self._params = self._block.address
        self._long = self._block.words
        self._short = self._block.words.view(np.uint32)
        # To write one word through this takes half as long as through the array.
        self._words: memoryview[int] = memoryview(self._block.words.view("u1").data).cast("B").cast("Q")
        self._lock = fork.lock()
        self._kind: tuple[object, ...] = ()
        self._kinds: dict[tuple[object, ...], tuple[list[_Piece], int, list[int]]] = {}
        self._templates: dict[int, tuple[U64, int]] = {}  # of bound launches, by the width of their accesses
        self._pieces: list[_Piece] = []
        self._upload_words = self._segments = 0
        self._last_bits = -1
        self._pace: object = 0.0  # what the words of the pace are for
        self._kernel = copy_kernel(16)
        self._grid, self._shaped = (0, 0), (0, False, 0.0, "")
        self._written: list[U64 | None] = [None, None]  # tables that stand in the words already
        self._bits: list[int] = [0, 0]
        ka.fill_plan(self._block.record, plan)

    def most_ctas(self, link: bool, multiprocessors: int, paced: bool = False) -> int:
        """Most thread blocks of a launch; `link` says that host memory takes part, `paced` that it keeps to a rate."""
        return self.ctas or (PACED_CTAS if paced else LINK_CTAS if link else 2 * multiprocessors)

    def most_threads(self, rate: float, way: str) -> int:
        """Most threads of a block of a launch that keeps to a rate."""
        return min(self.threads, PACED_THREADS[way or "store"]) if rate else self.threads

    def _set_pace(self, block: ArgumentBlock, width: int, state: DeviceState, rate: float, way: str) -> Kernel:
        """Write a rate into a block whose width is written; the kernel for it."""
        require_rate(rate)
        if rate:
            way, mean, both = way or "store", rate, rate
            if self.limit.busy and way in OTHER_WAY:
                paced = profile_for(state.device).paced[way] * 1e9
                mean, both = min(rate, in_the_long_run(way, paced)), min(rate, both_ways(way, paced))
            cost, longer, slower = (ka.pace_cost(block.record, width, r) for r in (rate, mean, both))
            words = block.words
            words[ka.PACE], words[ka.PACE_OTHER] = (state.paces.address(w) for w in (way, OTHER_WAY.get(way, way)))
            words[ka.PACE_SLACK], words[ka.PACE_COST], words[ka.PACE_EXTRA] = SLACK * ka.TICKS, cost, slower - cost
            words[ka.PACE_CREDIT], words[ka.PACE_MEAN] = CREDIT * ka.TICKS, longer * (longer > cost)
        return copy_kernel(width, rate > 0)

    def enqueue(
        self,
        state: DeviceState,
        operation: Operation,
        src: Operands,
        dst: Operands,
        first: int,
        count: int,
        *,
        link: bool,
        stream: int | None = None,
        origin: int = 0,
        on_error: Callable[[Exception], None] | None = None,
        rate: float | None = None,
        way: str = "",
    ) -> None:
        """Enqueue the plan for items `first` to `first + count` on the operation's stream, or on another.

        Bases and host indices are read during the call; a table that is the same object as in the call before is taken
        as unchanged. Indices on the device are the caller's to keep. The device's context is current. The operation's
        error is a `BoundsError` where the kernel met a bad index; it counts indices from `origin`. Where nobody waits
        for the operation, `on_error` receives it.

        The launch keeps to `rate` bytes a second, which it shares with all launches on the device that keep to one the
        same `way`, "store", "load" or "copy"; 0: to none; default: as the plan's limit has it.
        """
        if rate is None:
            rate = self.limit.rate(state.device, way) if link else 0.0
        stream = operation.stream if stream is None else stream
        src_index, dst_index = src.index, dst.index
        src_kind = 0 if src_index is None else 1 if src_index.host is not None else src_index.width
        dst_kind = 0 if dst_index is None else 1 if dst_index.host is not None else dst_index.width
        kind = (
            -1 if src.table is not None else len(src.bases),
            -1 if dst.table is not None else len(dst.bases),
            src_kind,
            dst_kind,
            count if src_kind == 1 or dst_kind == 1 else 0,
        )
        with self._lock:
            if kind != self._kind:
                self._arrange(src, dst, count, kind)
            words = self._words
            upload: Upload | None = None
            if self._upload_words:
                upload = state.take_upload(self._upload_words)
                operation.on_done(functools.partial(state.give_upload, upload))
            status = 0
            if self.check and (src_kind > 1 or dst_kind > 1):
                status = state.status.take(operation, self, origin, on_error)
            self._write((src, dst), first, count, upload)
            bits = self._bits[0] | self._bits[1]
            pace = rate and (rate, way, state)
            if bits != self._last_bits or pace != self._pace:
                self._set_width(self.plan.width(bits), state, rate, way)
                self._last_bits, self._pace = bits, pace
            segments = count * self._segments
            words[ka.SEGMENTS], words[ka.FIRST_ITEM], words[ka.STATUS] = segments, first, status
            shape = (segments, link, rate, way)
            if shape != self._shaped:
                most = self.most_ctas(link, state.multiprocessors, rate > 0)
                self._grid = launch_shape(segments, most, self.most_threads(rate, way))
                self._shaped = shape
            if upload is not None:
                operation.enqueued.append(stream)
                upload.send(self._upload_words, stream)
            d = state.owner
            ctas, threads = self._grid
            d.launch(self._kernel.handle_for(d), ctas, threads, stream, self._params)
            operation.enqueued.append(stream)

    def bind(
        self,
        state: DeviceState,
        tables: tuple[U64 | DeviceTable | int, U64 | DeviceTable | int],
        indexed: Sequence[int],
        first: int,
        count: int,
        bits: int,
        *,
        link: bool,
        width: int | tuple[int, int] = 0,
        skipped: int = 0,
        rate: float | None = None,
        way: str = "",
    ) -> BoundLaunch | None:
        """A launch for items `first` to `first + count`; None where ids and tables do not fit the argument block.

        The device's context is current.

        Parameters
        ----------
        tables : tuple
            Base addresses of source and destination, or how many will be written at each call; or where the device has
            them.
        indexed : sequence of int
            The sides, 0 and 1, that have ids; others have none.
        bits : int
            The alignment of all base addresses, or-ed together.
        link : bool
            Host memory takes part.
        width : int, or two
            Bytes of an id on the device, of either side or of each; 0: ids are the host's.
        skipped : int
            Leading entries that the tables of sides without ids are short of: those of items before `first`.
        rate, way : float, str
            As of `enqueue`; a launch with a rate can take another one later.
        """
        if rate is None:
            rate = self.limit.rate(state.device, way) if link else 0.0
        plan = self.plan
        lengths = [t if isinstance(t, int) else 0 if isinstance(t, DeviceTable) else len(t) for t in tables]
        widths = (width, width) if isinstance(width, int) else width
        if sum(lengths) + count * sum(not widths[k] for k in indexed) > ka.WORDS:
            return None
        kinds = {0: ka.INDEX_INLINE, 8: ka.INDEX_I64 | ka.CHECK * self.check, 4: ka.INDEX_I32 | ka.CHECK * self.check}
        vector = plan.width(bits)
        block = ArgumentBlock(ka.ARGS)
        template = self._templates.get(vector)
        if template is None:
            filled = ArgumentBlock(ka.ARGS)
            filled.words[: ka.WORDS_AT] = self._long[: ka.WORDS_AT]  # as the plan filled it; the rest is written below
            filled.words[[ka.PACE, ka.PACE_COST, ka.PACE_MEAN, ka.PACE_EXTRA]] = 0
            template = self._templates[vector] = filled.words[:-1], ka.fill_width(filled.record, plan, vector)
        block.words[:-1] = template[0]
        segments = count * plan.runs_per_item * template[1]
        words, flags = block.words, block.words.view(np.uint32)
        start, at = block.start, 0
        places = []
        for k, (table, side) in enumerate(zip(tables, (plan.src_flat, plan.dst_flat), strict=True)):
            flags[ka.FLAGS[k]] = ka.SKIP_NEGATIVE * side.skip_negative | kinds[widths[k]] * (k in indexed)
            if isinstance(table, DeviceTable):
                words[ka.TABLE[k]] = table.address
                places.append(start + 8 * ka.TABLE[k])
                continue
            flags[ka.FLAGS[k]] |= ka.TABLE_INLINE
            words[ka.TABLE[k]] = np.uint64((at - skipped * (k not in indexed)) % 2**64)
            place = ka.WORDS_AT + at
            places.append(start + 8 * place)
            if not isinstance(table, int):
                words[place : place + len(table)] = table
            at += lengths[k]
        indices = [0, 0]
        for k in indexed:
            words[ka.INDEX[k]] = np.uint64((at - first) % 2**64)
            indices[k] = start + 8 * (ka.INDEX[k] if widths[k] else ka.WORDS_AT + at)
            at += count
        words[ka.SEGMENTS], words[ka.FIRST_ITEM], words[ka.STATUS] = segments, first, 0
        most = self.most_ctas(link, state.multiprocessors, rate > 0)
        grid = launch_shape(segments, most, self.most_threads(rate, way))
        kernel = self._set_pace(block, vector, state, rate, way).handle_for(state.owner)
        return BoundLaunch(block, kernel, grid, indices, places, count)

    def _set_width(self, width: int, state: DeviceState, rate: float, way: str) -> None:
        """Take the kernel for accesses of `width` bytes that keeps to a rate."""
        self._last_bits = -1  # where it fails
        split = ka.fill_width(self._block.record, self.plan, width)
        self._kernel = self._set_pace(self._block, width, state, rate, way)
        self._segments = self.plan.runs_per_item * split

    def _arrange(self, src: Operands, dst: Operands, count: int, kind: tuple[object, ...]) -> None:
        """Decide where tables and indices go, as for the last call of this kind, and write the flags that say so."""
        found = self._kinds.get(kind)
        if found is None:
            if len(self._kinds) >= _KINDS:
                self._kinds.clear()
            found = self._kinds[kind] = self._decide(src, dst, count)
        self._pieces, self._upload_words, flags = found
        for k in (0, 1):
            self._short[ka.FLAGS[k]] = flags[k]
        self._written = [None, None]
        self._kind = kind

    def _decide(self, src: Operands, dst: Operands, count: int) -> tuple[list[_Piece], int, list[int]]:
        src_count, dst_count = (count if o.host_index is not None else -1 for o in (src, dst))
        pieces, upload_words = _arrangement((_bases(src), _bases(dst), src_count, dst_count))
        out = []
        for k, (side, operands) in enumerate(((self.plan.src_flat, src), (self.plan.dst_flat, dst))):
            flags = ka.SKIP_NEGATIVE if side.skip_negative else 0
            if operands.index is not None:
                flags |= ka.INDEX_I64 if operands.index.width == 8 else ka.INDEX_I32
                if operands.index.host is None and self.check:
                    flags |= ka.CHECK
            for piece in pieces:
                if piece.side == k and piece.inline:
                    flags = flags & ~ka.INDEX_I64 | ka.INDEX_INLINE if piece.is_index else flags | ka.TABLE_INLINE
            out.append(flags)
        return pieces, upload_words, out

    def _write(self, sides: tuple[Operands, Operands], first: int, count: int, upload: Upload | None) -> None:
        """Write tables and indices of one call into the block's words or into the upload."""
        words = self._words
        for k, is_index, at, inline in self._pieces:
            operands = sides[k]
            if is_index:
                ids = operands.host_index
                assert ids is not None
                if first or len(ids) != count:
                    ids = ids[first : first + count]
                values, field, skipped = ids.view(np.uint64), ka.INDEX[k], first
            else:
                values, field, skipped = operands.bases, ka.TABLE[k], 0
                if self._written[k] is values and inline:
                    continue
                self._written[k] = values
                self._bits[k] = operands.bits if operands.bits >= 0 else int(np.bitwise_or.reduce(values))
            if inline:
                start = ka.WORDS_AT + at
                self._long[start : start + len(values)] = values
                words[field] = (at - skipped) % 2**64
            else:
                assert upload is not None
                upload.words[at : at + len(values)] = values
                words[field] = (upload.device.address + (at - skipped) * 8) % 2**64
        for k, (_, index, table, _) in enumerate(sides):
            if index is not None and index.host is None:
                words[ka.INDEX[k]] = index.address
            if table is not None:
                words[ka.TABLE[k]], self._bits[k] = table.address, table.bits

    def describe_fault(self, where: int, value: int, origin: int) -> Exception:
        """The error for what the kernel wrote."""
        which, signed = where & 1, value - 2**64 if value >= 2**63 else value
        side = (self.plan.src_flat, self.plan.dst_flat)[which]
        return BoundsError(
            f"{self.names[which]}[{origin + (where >> 1) - 1}] is {signed}, must be in [0, {side.limit}); "
            f"the kernel left out every such entry"
        )


def _bases(operands: Operands) -> int:
    """Length of the table that the host writes; -1 where the device has it."""
    return len(operands.bases) if operands.table is None else -1
