"""The staged engine: a kernel packs into slots of device memory, or unpacks them, and the copy engine moves them.

The kernel works on one slot while the copy engine moves another. Each call is one program of driver commands, which
belongs to the ring of slots: what calls of a kind have in common is a vector of words that are written into it.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvraw import config
from kvraw.arrays import I64, U64, IndexVector
from kvraw.copying import kernel_args as ka
from kvraw.copying.addresses import AddressTable
from kvraw.copying.copy_engine import DescriptorPlan, Descriptors, split
from kvraw.copying.device_state import DeviceState
from kvraw.copying.kernel import BoundLaunch
from kvraw.copying.operands import DeviceTable, Operands
from kvraw.copying.plan import CopyPlan
from kvraw.copying.planner import RateLimit
from kvraw.copying.staged_cuts import ChunkCuts, ItemCuts, Step
from kvraw.copying.staged_program import DST, PARAMS, SlotProgram, slot_program
from kvraw.copying.staging_ring import StagingRing
from kvraw.runtime.completion import Operation

__all__ = ["StagedChunks", "StagedItems"]

_MOST = 64  # kinds of calls, and launches, that are kept
_NO_IDS: I64 = np.zeros(0, np.int64)


def _at(vector: U64 | I64) -> int:
    return int(vector.ctypes.data)


class _Moves(NamedTuple):
    """The copies of all slots of a call between a ring and chunks: step, chunk, place and bytes of each."""

    step: I64
    chunk: I64
    offset: U64  # in the chunk
    inside: U64  # in the slot
    sizes: U64
    begins: list[int]  # of each step, and the end

    @classmethod
    def of(cls, steps: Sequence[Step], chunk_bytes: int, joined: tuple[bool, ...]) -> _Moves:
        """Neighbouring chunks as one."""
        rows, begins = list[tuple[int, ...]](), [0]
        for number, s in enumerate(steps):
            whole, end = s.each == chunk_bytes, s.chunk + s.chunks
            starts = [k for k in range(s.chunk, end) if k == s.chunk or not (whole and joined[k])]
            for k, stop in zip(starts, [*starts[1:], end], strict=True):
                rows.append((number, k, s.offset, (k - s.chunk) * chunk_bytes, (stop - k) * s.each))
            begins.append(len(rows))
        step, chunk, offset, inside, sizes = np.array(rows, np.int64).T.copy()
        return cls(step, chunk, offset.view(np.uint64), inside.view(np.uint64), sizes.view(np.uint64), begins)


class _Kind:
    """What calls of a kind have in common: their launches, and the words of a program that do not change.

    Attributes
    ----------
    width : int
        Bytes of an id on the device; 0: ids are written into the arguments of launches, or there are none.
    upload : tuple of bool
        The ids, and the table of the device's side, go to the device first: arguments have no room for them.
    words : dict
        The words of a program, by the ring's turn and the parts of its batches.
    """

    def __init__(self, lead: Step | None, steps: list[Step], width: int, upload: tuple[bool, bool]) -> None:
        self.lead, self.steps, self.width, self.upload = lead, steps, width, upload
        self.launches: list[BoundLaunch] = []
        self.tables: list[U64] = []
        self.paged: U64 | None = None  # the table of the device's side, where each call writes it
        self.owner: object = None  # whose addresses that has
        self.seen: U64 = np.zeros(0 if lead is None else lead.chunks, np.uint64)
        self.moves: _Moves | None = None
        self.hosts: U64 = np.zeros(0, np.uint64)
        self.parts = 1  # batches of the copies of a slot
        self.words: dict[tuple[int, int], tuple[memoryview[int], U64]] = {}


class _Staged:
    """What both forms of the engine share: how a call's kind is made, and a call enqueued."""

    def __init__(self, store: bool, check: bool) -> None:
        self.store = self._store = store
        self._check = check
        self._flat = int(store)
        self._kinds: dict[tuple[object, ...], _Kind] = {}
        self._launches: dict[tuple[object, ...], BoundLaunch] = {}

    def _new(
        self,
        state: DeviceState,
        key: tuple[object, ...],
        cut: tuple[Step | None, list[Step]],
        index: IndexVector | None,
        table: AddressTable | DeviceTable | None,
        bits: int,
    ) -> _Kind:
        """Make a kind; `table` is None where steps have base addresses of their own, `bits` the chunks' alignment."""
        lead, steps = cut
        every = steps if lead is None else [lead, *steps]
        on_device = isinstance(table, DeviceTable)
        entries = 0 if on_device else len(every[0].bases if table is None else table)  # type: ignore[arg-type]
        inline_table = on_device or entries + max(len(s.table) for s in every) <= ka.WORDS
        width, upload_ids = 0, False
        if index is not None:
            words = max(len(s.table) + s.items for s in every) + (entries if inline_table else 0)
            upload_ids = index.host is not None and words > ka.WORDS
            width = index.width if index.host is None else 8 * upload_ids
        kind = _Kind(lead, steps, width, (upload_ids, not inline_table))
        if table is not None and not on_device and inline_table:
            kind.paged = np.zeros(entries, np.uint64)
        for step in every:
            paged: U64 | DeviceTable | int
            if step.bases is not None:
                paged, given = step.bases, int(np.bitwise_or.reduce(step.bases))
            elif isinstance(table, DeviceTable):
                paged, given = DeviceTable(0, 0), table.bits
            else:
                assert table is not None
                paged, given = entries if inline_table else DeviceTable(0, 0), table.alignment
            kind.launches.append(self._launch(state, kind, step, index is not None, paged, given, bits, step is lead))
        if len(self._kinds) >= _MOST:
            self._kinds.clear()
        self._kinds[key] = kind
        return kind

    def _launch(
        self,
        state: DeviceState,
        kind: _Kind,
        step: Step,
        indexed: bool,
        paged: U64 | DeviceTable | int,
        bits: int,
        chunk_bits: int,
        straight: bool,
    ) -> BoundLaunch:
        """The launch of a step; those with the same arguments share one, into which a program writes the rest."""
        # Ids in the arguments of a launch are its own; elsewhere they are counted as the call counts them.
        own = indexed and not kind.width
        begin = step.first if own else step.origin + step.first
        table = step.table if own or not step.shift else step.table - np.uint64(step.shift)
        kind.tables.append(table)
        if straight:
            offset = int(table[0])
            table = kind.tables[-1] = kind.seen
            bits |= chunk_bits | offset
        else:
            bits |= int(np.bitwise_or.reduce(table))
        given = paged if isinstance(paged, int) else isinstance(paged, DeviceTable) or id(paged)
        skipped = 0 if own else step.skipped
        key = (step.kernel, begin, step.items, len(table), kind.width, given, bits & 15, straight, skipped, own)
        launch = self._launches.get(key)
        if launch is None:
            tables: tuple[U64 | DeviceTable | int, U64 | DeviceTable | int]
            tables = (paged, len(table)) if self._store else (len(table), paged)
            launch = step.kernel.bind(
                state,
                tables,
                (1 - self._flat,) if indexed else (),
                begin,
                step.items,
                bits,
                link=straight,
                width=kind.width,
                skipped=skipped,
            )
            assert launch is not None
            if len(self._launches) >= _MOST:
                self._launches.clear()
            self._launches[key] = launch
        return launch

    def _launch_words(self, kind: _Kind, at: int, step: Step, base: int, table_value: int) -> list[int]:
        """The words of a launch; `table_value` is where a program has the address of the device's side's table."""
        launch, table, paged = kind.launches[at], kind.tables[at], 1 - self._flat
        index_at, own = launch.index_addresses[paged], not kind.width
        where, source, count = launch.table_addresses[paged], 0, 0
        if step.bases is None:
            source, count = (table_value, 1) if kind.paged is None else (_at(kind.paged), len(kind.paged))
        return [
            *(launch.table_addresses[self._flat], _at(table), len(table), base),
            *(index_at, step.items if own and index_at else 0, step.origin + step.first),
            *(index_at, launch.status_address, 0 if own else 1),
            *(where, source, count, launch.kernel, launch.ctas, launch.threads, launch.params),
        ]

    def _words(self, kind: _Kind, ring: StagingRing, made: SlotProgram, cleared: bool) -> tuple[memoryview[int], U64]:
        """The words of a program from the ring's next slot on, and the slots' ends of the copies that are known."""
        table_value = _at(made.program.vector) + 8 * made.table
        words, moves, ahead = [0, 0, 0], kind.moves, 0  # nothing is uploaded
        if kind.lead is not None:
            lead, ahead = kind.lead, 1
            words += self._launch_words(kind, 0, lead, (lead.offset + int(lead.table[0])) % 2**64, table_value)
        else:
            words += [0] * (PARAMS + 1)
        slots = ring.coming(len(kind.steps))
        ends: U64 = np.zeros(0, np.uint64)
        places = (0, 0, 0)
        if moves is not None:
            ends = np.array([slot.address for slot in slots], np.uint64)[moves.step] + moves.inside
            pair = (_at(kind.hosts), _at(ends)) if self._store else (_at(ends), _at(kind.hosts))
            places = (*pair, _at(moves.sizes))
        for number, (step, slot) in enumerate(zip(kind.steps, slots, strict=True)):
            words += self._launch_words(kind, ahead + number, step, slot.address, table_value)
            words += [slot.free, slot.full, step.nbytes if cleared else 0]
            copies = [0] * (made.width - DST)
            if moves is not None:
                begin, end = moves.begins[number], moves.begins[number + 1]
                copies[:3] = [place + 8 * begin for place in places]
                copies[3:] = made.counts(end - begin)
            words += copies
        return memoryview(array("Q", words)), ends

    def _run(
        self,
        state: DeviceState,
        ring: StagingRing,
        operation: Operation,
        kind: _Kind,
        index: IndexVector | None,
        table: AddressTable | DeviceTable | None,
        moved: Callable[[], list[Descriptors]] | None,
        on_error: Callable[[Exception], None] | None,
    ) -> bool:
        """Run the program of a call, whose ring's lock is held; `moved` gives the copies of each slot anew."""
        found = None
        if moved is not None:
            found = moved()
            parts = max(1, -(-max(len(d) for d in found) // config.MAX_BATCH.get()))
        else:
            parts = kind.parts
        key = len(kind.steps), kind.lead is not None, parts
        made = ring.programs.get(key) or slot_program(state, ring, self._store, *key)
        turn = ring.turn, parts
        if turn not in kind.words:
            cleared = self._store and self._check and index is not None and index.host is None
            kind.words[turn] = self._words(kind, ring, made, cleared)
        words, values = kind.words[turn][0], made.program.values
        values[made.upload : made.upload + len(words)] = words
        for number, d in enumerate(found or ()):
            at = made.steps + number * made.width + DST
            values[at], values[at + 1], values[at + 2] = _at(d.dst), _at(d.src), _at(d.sizes)
            for k, count in enumerate(made.counts(len(d))):
                values[at + 3 + k] = count
        ids = _NO_IDS if index is None or index.host is None else index.host
        if kind.width or table is not None:
            self._place(state, operation, kind, made, index, table, on_error)
        values[made.stream], values[made.event] = operation.stream, operation._event  # type: ignore[assignment]
        done = operation.run(made.program, ids, streams=made.streams)
        if done:
            ring.turn = (ring.turn + len(kind.steps)) % len(ring.slots)
        return done

    def _place(
        self,
        state: DeviceState,
        operation: Operation,
        kind: _Kind,
        made: SlotProgram,
        index: IndexVector | None,
        table: AddressTable | DeviceTable | None,
        on_error: Callable[[Exception], None] | None,
    ) -> None:
        """Write where ids and tables lie that are not in the arguments of launches."""
        values = made.program.values
        there = status = 0
        if index is not None and index.host is None:
            there = index.address
            if self._check:
                status = state.status.take(operation, kind.steps[0].kernel, 0, on_error)
        if kind.paged is not None and kind.owner is not table:
            assert isinstance(table, AddressTable)
            kind.paged[:], kind.owner = table.seen, table
        if isinstance(table, DeviceTable):
            values[made.table] = table.address
        if True in kind.upload:
            parts = [np.zeros(0, np.uint64)] * 2
            if kind.upload[0]:
                assert index is not None
                assert index.host is not None
                parts[0] = index.host.view(np.uint64)
            if kind.upload[1]:
                assert isinstance(table, AddressTable)
                parts[1] = table.seen
            ids, bases = parts
            count = len(ids) + len(bases)
            upload = state.take_upload(count)
            operation.on_done(functools.partial(state.give_upload, upload))
            upload.words[: len(ids)], upload.words[len(ids) : count] = ids, bases
            to = upload.device.address
            values[made.upload], values[made.upload + 1], values[made.upload + 2] = to, _at(upload.words), 8 * count
            if kind.upload[0]:
                there = to
            if kind.upload[1]:
                values[made.table] = to + 8 * len(ids)
        values[made.there], values[made.there + 1] = there, status


class StagedChunks(_Staged):
    """A copy plan made ready to go through staging slots, whose host side is a row of chunks that are covered whole.

    Parameters
    ----------
    plan : CopyPlan
        What to copy.
    store : bool
        The chunks are the destination.
    slot_bytes : int
        Bytes of a staging slot.
    bases : numpy.ndarray
        Base addresses of the cache.
    chunk_bytes : int
        Bytes of a chunk.
    ctas : int, optional
        Most thread blocks of the kernels.
    check : bool
        Check indices that lie on the device, in the kernels. A store clears its slots first then: what belongs to a bad
        index becomes zeros.
    names : tuple of str
        What errors call the source's and the destination's index.
    """

    def __init__(
        self,
        plan: CopyPlan,
        store: bool,
        slot_bytes: int,
        bases: U64,
        chunk_bytes: int,
        *,
        ctas: int | None = None,
        check: bool = True,
        names: tuple[str, str] = ("src_index", "dst_index"),
        limit: RateLimit | None = None,
    ) -> None:
        super().__init__(store, check)
        self._cuts = ChunkCuts(plan, store, slot_bytes, ctas, check, names, limit, bases, chunk_bytes)

    def enqueue(
        self,
        state: DeviceState,
        ring: StagingRing,
        operation: Operation,
        index: IndexVector,
        row: tuple[U64, U64, int],
        first_chunk: int,
        chunks: int,
        edges: tuple[int, ...],
        on_error: Callable[[Exception], None] | None = None,
    ) -> bool:
        """Enqueue whole chunks `first_chunk` to `first_chunk + chunks`, and the operation's event behind all of it.

        False where a capture is in progress on its stream, or the context is another device's. `index` is checked where
        it is on the host. `row` are the chunks' addresses as the host and as the device see them and their alignment,
        or-ed together; no copy spans one of `edges`. Where nobody waits for the operation, `on_error` receives what
        kernels find.
        """
        host, seen, bits = row
        nbytes, cuts = self._cuts.chunk_bytes, state.cuts()
        used = host if chunks == len(host) else host[first_chunk : first_chunk + chunks]
        joined, cut = _joined(used, nbytes, cuts, edges)
        width = 0 if index.host is not None else index.width
        key = (first_chunk, chunks, joined, width, bits, state)
        with ring.lock:
            kind = self._kinds.get(key)
            if kind is None:
                kind = self._new(state, key, self._cuts.steps(first_chunk, chunks), index, None, bits)
                kind.moves = _Moves.of(kind.steps, nbytes, (False,) * first_chunk + joined)
                kind.hosts = np.zeros(len(kind.moves.sizes), np.uint64)
                kind.parts = -(-int(np.diff(kind.moves.begins).max()) // config.MAX_BATCH.get())
            moves = kind.moves
            assert moves is not None
            # Written in place: the driver reads both vectors during the call alone.
            host.take(moves.chunk, out=kind.hosts, mode="clip")
            np.add(kind.hosts, moves.offset, out=kind.hosts)
            if kind.lead is not None:
                kind.seen[:] = seen[kind.lead.chunk : kind.lead.chunk + kind.lead.chunks]
            moved = functools.partial(self._cut, kind, ring, edges) if cut else None
            return self._run(state, ring, operation, kind, index, None, moved, on_error)

    def _cut(self, kind: _Kind, ring: StagingRing, edges: tuple[int, ...]) -> list[Descriptors]:
        """The copies of each slot, cut where registrations end."""
        moves, made = kind.moves, list[Descriptors]()
        assert moves is not None
        slots = np.array([slot.address for slot in ring.coming(len(kind.steps))], np.uint64)
        ends = slots[moves.step] + moves.inside
        for begin, end in zip(moves.begins, moves.begins[1:], strict=False):
            host, slot = kind.hosts[begin:end], ends[begin:end]
            dst, src = (host, slot) if self._store else (slot, host)
            made.append(split(Descriptors(dst, src, moves.sizes[begin:end]), edges))
        return made


class StagedItems(_Staged):
    """A copy plan made ready to go through staging slots item by item, whatever the host's side is.

    Where this is a row of chunks that are covered whole, `StagedChunks` does it with fewer and larger copies, known
    ahead of the call; here they are those of a copy plan of their own. Parameters as there.
    """

    def __init__(
        self,
        plan: CopyPlan,
        store: bool,
        slot_bytes: int,
        *,
        ctas: int | None = None,
        check: bool = True,
        names: tuple[str, str] = ("src_index", "dst_index"),
        limit: RateLimit | None = None,
    ) -> None:
        super().__init__(store, check)
        self._cuts = ItemCuts(plan, store, slot_bytes, ctas, check, names, limit)
        self._copies = DescriptorPlan(self._cuts.plan)

    def enqueue(
        self,
        state: DeviceState,
        ring: StagingRing,
        operation: Operation,
        first: int,
        count: int,
        host: Operands,
        index: IndexVector | None,
        table: AddressTable | DeviceTable,
        edges: tuple[int, ...],
        on_error: Callable[[Exception], None] | None = None,
    ) -> bool:
        """Enqueue items `first` to `first + count` between the host's side and the device's, of an index and a table.

        As for `StagedChunks.enqueue`.
        """
        entries = -1 if isinstance(table, DeviceTable) else len(table)
        bits = table.bits if isinstance(table, DeviceTable) else table.alignment
        width = -1 if index is None else 0 if index.host is not None else index.width
        key = (first, count, width, entries, bits, state)
        with ring.lock:
            kind = self._kinds.get(key)
            if kind is None:
                kind = self._new(state, key, self._cuts.steps(first, count), index, table, 0)
            moved = functools.partial(self._moves, kind, ring, host, edges)
            return self._run(state, ring, operation, kind, index, table, moved, on_error)

    def _moves(self, kind: _Kind, ring: StagingRing, host: Operands, edges: tuple[int, ...]) -> list[Descriptors]:
        """The copies of each slot."""
        made = []
        for step, slot in zip(kind.steps, ring.coming(len(kind.steps)), strict=True):
            there = Operands(np.array([(slot.address - step.shift) % 2**64], np.uint64))
            ends = (there, host) if self._store else (host, there)
            made.append(self._copies(*ends, step.origin, step.items, edges=edges))
        return made


def _joined(places: U64, nbytes: int, cuts: list[int], edges: tuple[int, ...]) -> tuple[tuple[bool, ...], bool]:
    """Which chunks begin where the one before ends and may be copied with it; and whether one is to be cut itself.

    No copy spans one of the ascending `cuts` or of `edges`.
    """
    starts = places.tolist()
    low, high = min(starts), max(starts) + nbytes
    joined = (False, *[at == before + nbytes for before, at in itertools.pairwise(starts)])
    at = bisect.bisect_right(cuts, low)
    borders = cuts[at : bisect.bisect_left(cuts, high, at)] if at < len(cuts) and cuts[at] < high else []
    if edges:
        borders = sorted({*borders, *(edge for edge in edges if low < edge < high)})
    if not borders:
        return joined, False
    between = set(borders)
    joined = tuple(one and start not in between for one, start in zip(joined, starts, strict=True))
    for start in starts:
        at = bisect.bisect_right(borders, start)
        if at < len(borders) and borders[at] < start + nbytes:
            return joined, True
    return joined, False
