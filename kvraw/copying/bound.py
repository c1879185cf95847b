"""Calls bound to programs: all but the ids, addresses, stream and event of a call is written ahead of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvraw.arrays import I64, U64
from kvraw.copying.addresses import AddressTable
from kvraw.copying.call import Call
from kvraw.copying.copy_engine import Descriptors
from kvraw.copying.device_state import DeviceState
from kvraw.copying.kernel import BoundLaunch
from kvraw.copying.plan import Side
from kvraw.copying.staging_ring import StagingRing, StagingSlot
from kvraw.runtime.program import IDS, Commands, Program, Value

__all__ = ["BoundCall", "CallKind", "IdCheck", "ItemStep", "StagedStep", "bind_items", "bind_kernel", "bind_staged"]

_FEW = 4  # copies that are enqueued one by one sooner than as a batch


class IdCheck(NamedTuple):
    """What ids are checked for ahead of everything else; `side` None: nothing."""

    name: str
    side: Side | None
    distinct: bool


class StagedStep(NamedTuple):
    """What goes through a staging slot at a time: a launch, and contiguous bytes of each of some chunks.

    Attributes
    ----------
    launch : BoundLaunch
        Packs them into the slot or unpacks them.
    index_first : int
        The first of its ids, of those of the call.
    chunk, chunks : int
        Which chunks of the call's.
    offset, nbytes : int
        The bytes in each chunk.
    """

    launch: BoundLaunch
    index_first: int
    chunk: int
    chunks: int
    offset: int
    nbytes: int


class ItemStep(NamedTuple):
    """Items that go through a staging slot at a time: a launch, and where in the call's they begin."""

    launch: BoundLaunch
    first: int


class _Places(NamedTuple):
    """The values and vectors that a call writes.

    Attributes
    ----------
    stream, event : Value
        Its stream and event.
    other_ids : Value
        Where the ids of the destination lie, where both sides have some; else its ids are the program's `IDS`.
    seen : tuple of numpy.ndarray of uint64
        Its tables of source and destination, as the device sees them.
    host : numpy.ndarray of uint64
        Its chunks, as the host sees them.
    single : dict of int to Value
        The address, as the host sees it, of some chunks.
    moves : list of Value
        Of each slot the vectors of its copies (destination, source, bytes), and their number.
    there : Value
        The address of ids on the device, and behind it that of the status words.
    """

    stream: Value
    event: Value
    other_ids: Value
    seen: tuple[U64, U64]
    host: U64
    single: dict[int, Value]
    moves: list[Value]
    there: Value


def _at(vector: U64, entry: int = 0) -> int:
    """Where an entry of a vector lies."""
    return int(vector.ctypes.data) + 8 * entry


class BoundCall:
    """A program for calls of one kind, run by one thread at a time.

    Attributes
    ----------
    streams : tuple of int
        What it enqueues on beside the call's stream.
    steps : int
        Staging slots that it uses.
    """

    __slots__ = ("_event", "_flat", "_places", "_refs", "_stream", "_tables", "program", "steps", "streams")

    def __init__(
        self,
        program: Program,
        places: _Places,
        call: Call,
        flat: int,
        refs: object,
        streams: tuple[int, ...] = (),
        steps: int = 0,
    ) -> None:
        self.program, self._places, self.streams, self.steps = program, places, streams, steps
        self._stream, self._event = places.stream.index, places.event.index
        self._refs = refs  # argument blocks and vectors that its rows name
        self._flat = flat  # the side of the chunks
        self._tables: list[object] = [None, None]  # whose addresses the vectors hold
        self._write_tables(call)

    def _write_tables(self, call: Call) -> None:
        for k, table in enumerate(call.tables):
            if table is not self._tables[k]:
                assert isinstance(table, AddressTable)
                self._places.seen[k][:] = table.seen
                self._tables[k] = table

    def run(
        self, stream: int, event: int, ids: I64, seen: U64, host: U64, there: tuple[int, int] | None = None
    ) -> bool:
        """Enqueue a call that differs from the one before in its ids and chunks, and whose chunks have no ids.

        The event is recorded behind all of it. `ids` are those of the call, without gaps, and `seen` and `host` the
        addresses of its chunks as the device and as the host see them. False where its stream is being captured, or
        the context is another device's. `there` are the addresses of ids on the device and of the status words.

        Raises
        ------
        BoundsError
            An id is bad; nothing was enqueued.
        DriverError
            A driver call failed; what came before it was enqueued.
        """
        program, places = self.program, self._places
        values = program.values
        values[self._stream] = stream
        values[self._event] = event
        places.seen[self._flat][:] = seen
        self._tables[self._flat] = None
        if there is not None:
            at = places.there.index
            values[at], values[at + 1] = there
        if self.steps:
            places.host[:] = host
            for chunk, value in places.single.items():
                values[value.index] = host.item(chunk)
        return program.run(ids)

    def run_call(self, stream: int, event: int, call: Call, moves: Sequence[Descriptors] = ()) -> bool:
        """The same for any call of its kind; `moves` are the copies of each slot, where they are not always the same.

        Chunks of staged calls are not taken here.
        """
        program, places = self.program, self._places
        values = program.values
        values[self._stream] = stream
        values[self._event] = event
        self._write_tables(call)
        for value, move in zip(places.moves, moves, strict=True):
            at = (move.dst.ctypes.data, move.src.ctypes.data, move.sizes.ctypes.data)
            for k, word in enumerate((*at, len(move))):
                values[value.index + k] = word
        index, other = call.src_index, call.dst_index
        if index is None:
            index, other = other, None
        if other is not None:
            assert other.host is not None
            values[places.other_ids.index] = other.host.ctypes.data
        return program.run() if index is None or index.host is None else program.run(index.host)


@dataclass(frozen=True, slots=True)
class CallKind:
    """What all calls of a program share.

    Attributes
    ----------
    checks : tuple of IdCheck
        Of the ids of source and destination.
    indexed : tuple of int
        The sides that have ids.
    first, count : int
        Items.
    """

    checks: tuple[IdCheck, IdCheck]
    indexed: tuple[int, ...]
    first: int
    count: int

    def ids(self, places: _Places, side: int) -> Value:
        """Where the ids of a side lie."""
        return IDS if side == self.indexed[0] else places.other_ids

    def begin(self, c: Commands, device: int, call: Call, chunks: int = 0) -> _Places:
        """The checks ahead of everything else; `chunks` is how many addresses the host must know."""
        stream, event, other = (c.value() for _ in range(3))
        tables = [np.zeros(len(t) if isinstance(t, AddressTable) else 0, np.uint64) for t in call.tables]
        places = _Places(stream, event, other, (tables[0], tables[1]), np.zeros(chunks, np.uint64), {}, [], c.value(2))
        c.on_device(device)
        c.uncaptured(stream)
        for k in self.indexed:
            check = self.checks[k]
            side = check.side
            if side is not None:
                c.check(
                    check.name,
                    self.ids(places, k) + 8 * self.first,
                    self.count,
                    side.limit,
                    skip_negative=side.skip_negative,
                    distinct=check.distinct,
                    first=self.first,
                )
        return places

    def write_ids(self, c: Commands, places: _Places, launch: BoundLaunch, first: int) -> None:
        """Write the ids of a launch, from `first` of the call's on."""
        for k in self.indexed:
            if launch.index_addresses[k]:
                c.write(launch.index_addresses[k], self.ids(places, k) + 8 * first, launch.count)


def bind_kernel(state: DeviceState, launch: BoundLaunch, kind: CallKind, call: Call) -> BoundCall:
    """The call that is one launch."""
    c = Commands()
    places = kind.begin(c, state.device, call)
    kind.write_ids(c, places, launch, kind.first)
    for table, seen in zip(launch.table_addresses, places.seen, strict=True):
        c.write(table, _at(seen), len(seen))
    c.launch(launch.kernel, launch.ctas, launch.threads, places.stream, launch.params)
    c.record(places.event, places.stream)
    return BoundCall(Program(c, state.owner), places, call, int(call.dst_index is None), launch)


def _through_slots(
    c: Commands,
    ring: StagingRing,
    store: bool,
    stream: Value,
    steps: int,
    pack: Callable[[int, Value | int], None],
    move: Callable[[int, StagingSlot], None],
) -> None:
    """`StagingRing.enqueue` as commands."""
    copies, packs = ring.copies.handle, ring.packs.handle
    writer: Value | int = packs if store else copies
    reader: Value | int = copies if store else stream
    slots = ring.coming(steps)
    for step, slot in enumerate(slots):
        c.wait(writer, slot.free)
        if store:
            pack(step, packs)
        else:
            move(step, slot)
        c.record(slot.full, writer)
        c.wait(reader, slot.full)
        if store:
            move(step, slot)
        else:
            pack(step, stream)
        c.record(slot.free, reader)
    if store:
        c.wait(stream, slots[-1].free)


def bind_staged(
    state: DeviceState,
    ring: StagingRing,
    steps: list[StagedStep],
    lead: StagedStep | None,
    checks: tuple[IdCheck, IdCheck],
    call: Call,
    store: bool,
    chunk_bytes: int,
    joined: tuple[bool, ...],
    width: int = 0,
    cleared: bool = False,
) -> BoundCall:
    """The call that goes through a ring's slots, from the next one on, between a cache and a row of chunks.

    Parameters
    ----------
    steps, lead : StagedStep
        What goes through the slots one after the other, and what goes straight to the chunks ahead of that.
    joined : tuple of bool
        Which chunks begin where the one before ends, in host memory.
    width : int
        Bytes of an id on the device; 0: ids are the host's.
    cleared : bool
        Slots are cleared ahead of what is packed into them.
    """
    c = Commands()
    flat = int(store)
    kind = CallKind(checks, (1 - flat,), 0, call.count)
    places, refs = kind.begin(c, state.device, call, len(joined)), list[object]()
    copies, packs = ring.copies.handle, ring.packs.handle
    c.record(ring.start, places.stream)
    c.wait(packs if store else copies, ring.start)

    def launch(step: StagedStep, stream: Value | int) -> None:
        if width:
            c.write(step.launch.index_addresses[1 - flat], places.there.address, 1)
            c.write(step.launch.status_address, Value(places.there.index + 1).address, 1)
        else:
            kind.write_ids(c, places, step.launch, step.index_first)
        c.launch(step.launch.kernel, step.launch.ctas, step.launch.threads, stream, step.launch.params)
        refs.append(step.launch)

    if lead is not None:
        table = lead.launch.table_addresses[flat]
        c.write(table, _at(places.seen[flat], lead.chunk), lead.chunks, add=lead.launch.table_offset)
        launch(lead, places.stream)

    def move(at: int, slot: StagingSlot) -> None:
        _move(c, state, steps[at], slot.address, places, store, chunk_bytes, joined, copies, refs)

    def pack(at: int, stream: Value | int) -> None:
        step = steps[at]
        if cleared:
            slot = ring.coming(len(steps))[at].address
            c.memset(slot, 0, step.chunks * chunk_bytes if step.chunks > 1 else step.nbytes, stream)
        launch(step, stream)

    _through_slots(c, ring, store, places.stream, len(steps), pack, move)
    c.record(places.event, places.stream)
    return BoundCall(Program(c, state.owner), places, call, flat, refs, (copies, packs), len(steps))


def bind_items(
    state: DeviceState, ring: StagingRing, steps: list[ItemStep], kind: CallKind, call: Call, store: bool
) -> BoundCall:
    """The call whose items go through a ring's slots, from the next one on; the copies of each slot come with it.

    The launches take the ids of the device's side.
    """
    c = Commands()
    paged = 1 - int(store)
    places = kind.begin(c, state.device, call)
    copies, packs = ring.copies.handle, ring.packs.handle
    c.record(ring.start, places.stream)
    c.wait(packs if store else copies, ring.start)

    def pack(at: int, stream: Value | int) -> None:
        launch, first = steps[at]
        kind.write_ids(c, places, launch, first)
        c.write(launch.table_addresses[paged], _at(places.seen[paged]), len(places.seen[paged]))
        c.launch(launch.kernel, launch.ctas, launch.threads, stream, launch.params)

    def move(at: int, slot: StagingSlot) -> None:
        vectors = c.value(4)
        places.moves.append(vectors)
        dst, src, sizes, number = (Value(vectors.index + k) for k in range(4))
        c.copy_batch(dst, src, sizes, number, copies)

    _through_slots(c, ring, store, places.stream, len(steps), pack, move)
    c.record(places.event, places.stream)
    return BoundCall(Program(c, state.owner), places, call, int(store), steps, (copies, packs), len(steps))


def _move(
    c: Commands,
    state: DeviceState,
    step: StagedStep,
    slot: int,
    places: _Places,
    store: bool,
    chunk_bytes: int,
    joined: tuple[bool, ...],
    stream: int,
    refs: list[object],
) -> None:
    """The large copies of one slot: neighbours as one."""
    whole = step.nbytes == chunk_bytes
    begins = [k for k in range(step.chunk, step.chunk + step.chunks) if k == step.chunk or not (whole and joined[k])]
    ends = [*begins[1:], step.chunk + step.chunks]
    sizes = np.array([(end - begin) * step.nbytes for begin, end in zip(begins, ends, strict=True)], np.uint64)
    device = np.array([slot + (k - step.chunk) * chunk_bytes for k in begins], np.uint64)
    if len(begins) > _FEW and state.owner.batch_supported():
        host: U64 = np.zeros(len(begins), np.uint64)
        at = int(host.ctypes.data)
        for group in _runs(begins):
            c.write(at, _at(places.host, group[0]), len(group), add=step.offset)
            at += 8 * len(group)
        refs += [host, device, sizes]
        dst, src = (int(v.ctypes.data) for v in ((host, device) if store else (device, host)))
        c.copy_batch(dst, src, int(sizes.ctypes.data), len(begins), stream)
        return
    for chunk, nbytes, there in zip(begins, sizes.tolist(), device.tolist(), strict=True):
        here = places.single.get(chunk)
        if here is None:
            here = places.single[chunk] = c.value()
        if store:
            c.copy(here + step.offset, there, nbytes, stream)
        else:
            c.copy(there, here + step.offset, nbytes, stream)


def _runs(values: list[int]) -> list[list[int]]:
    grouped = itertools.groupby(enumerate(values), key=lambda pair: pair[1] - pair[0])
    return [[value for _, value in group] for _, group in grouped]
