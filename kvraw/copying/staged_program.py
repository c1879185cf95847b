"""The program of calls through staging slots, of which a ring has one for each number of steps."""

from __future__ import annotations

from kvraw import config
from kvraw.copying.device_state import DeviceState
from kvraw.copying.staging_ring import StagingRing
from kvraw.runtime.program import IDS, Commands, Program, Value

__all__ = ["SlotProgram", "get_ready", "slot_program"]

_FEW = 4  # copies that are enqueued one by one sooner than as a batch
_READY = 6  # steps of the programs that are made ahead of calls
# The words of a step in a program: of its launch, then of its slot and its copies.
(TABLE_AT, TABLE, TABLE_COUNT, BASE, IDS_AT, IDS_COUNT, IDS_FIRST, INDEX_AT, STATUS_AT, THERE) = range(10)
(PAGED_AT, PAGED, PAGED_COUNT, KERNEL, CTAS, THREADS, PARAMS) = range(10, 17)
(FREE, FULL, CLEARED, DST, SRC, SIZES, EACH, BATCH) = range(17, 25)


class SlotProgram:
    """What calls of so many steps do, whatever they copy. Whoever runs it holds the ring's lock.

    Parameters
    ----------
    lead : bool
        A launch straight to the chunks goes ahead of the slots.
    parts : int
        Batch calls for the copies of one slot, of which the driver takes so many at once.
    """

    def __init__(self, state: DeviceState, ring: StagingRing, store: bool, steps: int, lead: bool, parts: int) -> None:
        c, copies = Commands(), ring.copies.handle
        self.width = BATCH + parts
        stream, event, there, table, upload = c.value(), c.value(), c.value(2), c.value(), c.value(3)
        words = c.value(PARAMS + 1 + steps * self.width)
        self.stream, self.event, self.there, self.table = stream.index, event.index, there.index, table.index
        self.upload, self.steps = upload.index, words.index + PARAMS + 1
        self.batches = parts if state.owner.batch_supported() else 0
        # With nothing ahead of them the caller's stream packs the slots of a store: it waits for their copies anyway.
        packs = ring.packs.handle if lead else stream
        writer, reader = (packs, copies) if store else (copies, stream)
        self.streams = (copies, ring.packs.handle) if lead else (copies,)

        def launch(at: int, on: Value | int) -> None:
            w = [Value(at + k) for k in range(PARAMS + 1)]
            c.write(w[TABLE_AT], w[TABLE], w[TABLE_COUNT], add=w[BASE])
            c.write(w[IDS_AT], IDS, w[IDS_COUNT], first=w[IDS_FIRST])
            c.write(w[INDEX_AT], there.address, w[THERE])
            c.write(w[STATUS_AT], Value(there.index + 1).address, w[THERE])
            c.write(w[PAGED_AT], w[PAGED], w[PAGED_COUNT])
            c.launch(w[KERNEL], w[CTAS], w[THREADS], on, w[PARAMS])

        c.on_device(state.device)
        c.uncaptured(stream)
        c.copy(upload, Value(upload.index + 1), Value(upload.index + 2), stream)
        if writer is not stream:
            c.record(ring.start, stream)
            c.wait(writer, ring.start)
        if lead:
            launch(words.index, stream)
        for step in range(steps):
            at = self.steps + step * self.width
            w = [Value(at + k) for k in range(self.width)]
            c.wait(writer, w[FREE])
            if store:
                c.memset(w[BASE], 0, w[CLEARED], packs)
                launch(at, packs)
                c.record(w[FULL], writer)
                c.wait(reader, w[FULL])
            c.copy_each(w[DST], w[SRC], w[SIZES], w[EACH], copies)
            for k in range(self.batches):
                step_back = 8 * k * config.MAX_BATCH.get()
                c.copy_batch(w[DST] + step_back, w[SRC] + step_back, w[SIZES] + step_back, w[BATCH + k], copies)
            if not store:
                c.record(w[FULL], writer)
                c.wait(reader, w[FULL])
                launch(at, stream)
            c.record(w[FREE], reader)
        if store:
            c.wait(stream, w[FREE])
        c.record(event, stream)
        self.program = Program(c, state.owner)

    def counts(self, copies: int) -> list[int]:
        """How many copies go one by one, and in each batch call."""
        parts = range(self.width - BATCH)
        if copies <= _FEW or not self.batches:
            return [copies, *[0 for _ in parts]]
        most = config.MAX_BATCH.get()
        return [0, *(max(0, min(most, copies - k * most)) for k in parts)]


def slot_program(state: DeviceState, ring: StagingRing, store: bool, steps: int, lead: bool, parts: int) -> SlotProgram:
    """The program of a ring, whose lock is held; see `SlotProgram`."""
    key = steps, lead, parts
    made: SlotProgram | None = ring.programs.get(key)
    if made is None:
        made = ring.programs[key] = SlotProgram(state, ring, store, *key)
    return made


def get_ready(state: DeviceState, direction: str) -> None:
    """Make the ring of a direction and the programs that most calls need, ahead of them."""
    ring = state.arena.ring(direction)
    with ring.lock:
        for steps in range(1, _READY + 1):
            slot_program(state, ring, direction == "store", steps, lead=False, parts=1)
