"""Calls bound to programs: all but the ids, addresses, stream and event of a call is written ahead of it."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from kvraw.arrays import I64, U64
from kvraw.engines.arena import StagingRing
from kvraw.engines.device_state import DeviceState
from kvraw.engines.kernel import BoundLaunch
from kvraw.plan import Side
from kvraw.runtime.program import IDS, Commands, Program, Value

__all__ = ["BoundCall", "IdCheck", "StagedStep", "bind_kernel", "bind_staged"]

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


class _Places(NamedTuple):
    """The values that a call writes.

    Attributes
    ----------
    stream, event : Value
        Its stream and event.
    single : dict of int to Value
        The address, as the host sees it, of some chunks.
    seen, host : numpy.ndarray of uint64
        The addresses of its chunks as the device and as the host see them.
    there : Value
        The address of ids on the device, and behind it that of the status words.
    """

    stream: Value
    event: Value
    single: dict[int, Value]
    seen: U64
    host: U64
    there: Value

    def at(self, vector: U64, chunk: int) -> int:
        """Where the address of a chunk stands."""
        return int(vector.ctypes.data) + 8 * chunk


class BoundCall:
    """A program for calls of one kind, run by one thread at a time.

    Attributes
    ----------
    streams : tuple of int
        What it enqueues on beside the call's stream.
    steps : int
        Staging slots that it uses.
    """

    __slots__ = ("_event", "_places", "_refs", "_stream", "program", "steps", "streams")

    def __init__(
        self, program: Program, places: _Places, refs: object, streams: tuple[int, ...] = (), steps: int = 0
    ) -> None:
        self.program, self._places, self.streams, self.steps = program, places, streams, steps
        self._stream, self._event = places.stream.index, places.event.index
        self._refs = refs  # argument blocks and vectors that its rows name

    def run(
        self, stream: int, event: int, ids: I64, seen: U64, host: U64, there: tuple[int, int] | None = None
    ) -> bool:
        """Enqueue a call; False where its stream is being captured, or the context is another device's.

        The event is recorded behind all of it. `ids` are those of the call, without gaps, and `seen` and `host` the
        addresses of its chunks as the device and as the host see them. `there` are the addresses of ids on the device
        and of the status words.

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
        places.seen[:] = seen
        if there is not None:
            at = places.there.index
            values[at], values[at + 1] = there
        if self.steps:
            places.host[:] = host
            for chunk, value in places.single.items():
                values[value.index] = host.item(chunk)
        return program.run(ids)


def _begin(c: Commands, device: int, check: IdCheck, first: int, count: int, chunks: int) -> _Places:
    places = _Places(c.value(), c.value(), {}, np.zeros(chunks, np.uint64), np.zeros(chunks, np.uint64), c.value(2))
    c.on_device(device)
    c.uncaptured(places.stream)
    side = check.side
    if side is not None:
        c.check(
            check.name,
            IDS + 8 * first,
            count,
            side.limit,
            skip_negative=side.skip_negative,
            distinct=check.distinct,
            first=first,
        )
    return places


def bind_kernel(
    state: DeviceState, launch: BoundLaunch, check: IdCheck, first: int, count: int, chunks: int, flat: int
) -> BoundCall:
    """The call that is one launch: `chunks` addresses are the table of side `flat` (0: source)."""
    c = Commands()
    places = _begin(c, state.device, check, first, count, chunks)
    c.write(launch.index_address, IDS + 8 * first, count)
    c.write(launch.table_addresses[flat], places.at(places.seen, 0), chunks)
    c.launch(launch.kernel, launch.ctas, launch.threads, places.stream, launch.params)
    c.record(places.event, places.stream)
    return BoundCall(Program(c, state.owner), places, launch)


def bind_staged(
    state: DeviceState,
    ring: StagingRing,
    steps: list[StagedStep],
    lead: StagedStep | None,
    check: IdCheck,
    count: int,
    store: bool,
    chunk_bytes: int,
    joined: tuple[bool, ...],
    width: int = 0,
    cleared: bool = False,
) -> BoundCall:
    """The call that goes through a ring's slots, from the next one on.

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
    places = _begin(c, state.device, check, 0, count, len(joined))
    copies, packs, refs = ring.copies.handle, ring.packs.handle, list[object]()
    writer: Value | int = packs if store else copies
    reader: Value | int = copies if store else places.stream
    c.record(ring.start, places.stream)
    c.wait(writer, ring.start)
    flat = int(store)

    def launch(step: StagedStep, stream: Value | int) -> None:
        if width:
            c.write(step.launch.index_address, places.there.address, 1)
            c.write(step.launch.status_address, Value(places.there.index + 1).address, 1)
        else:
            c.write(step.launch.index_address, IDS + 8 * step.index_first, step.launch.count)
        c.launch(step.launch.kernel, step.launch.ctas, step.launch.threads, stream, step.launch.params)
        refs.append(step.launch)

    if lead is not None:
        table = lead.launch.table_addresses[flat]
        c.write(table, places.at(places.seen, lead.chunk), lead.chunks, add=lead.launch.table_offset)
        launch(lead, places.stream)
    slots = ring.coming(len(steps))
    for step, slot in zip(steps, slots, strict=True):
        c.wait(writer, slot.free)
        if store:
            if cleared:
                c.memset(slot.address, 0, step.chunks * chunk_bytes if step.chunks > 1 else step.nbytes, packs)
            launch(step, packs)
            c.record(slot.full, packs)
            c.wait(copies, slot.full)
        _move(c, state, step, slot.address, places, store, chunk_bytes, joined, copies, refs)
        if not store:
            c.record(slot.full, copies)
            c.wait(places.stream, slot.full)
            launch(step, places.stream)
        c.record(slot.free, reader)
    if store:
        c.wait(places.stream, slots[-1].free)
    c.record(places.event, places.stream)
    return BoundCall(Program(c, state.owner), places, refs, (copies, packs), len(steps))


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
            c.write(at, places.at(places.host, group[0]), len(group), add=step.offset)
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
