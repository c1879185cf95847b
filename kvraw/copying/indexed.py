"""A launch whose ids lie on the device, bound: a call writes addresses and counts, and is one compiled function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvraw.arrays import U64
from kvraw.copying import kernel_args as ka
from kvraw.copying.device_state import DeviceState
from kvraw.copying.kernel import KernelPlan, launch_shape
from kvraw.copying.operands import DeviceTable
from kvraw.errors import BoundsError
from kvraw.runtime import fork
from kvraw.runtime.completion import Completion
from kvraw.runtime.program import Commands, Program, Value

__all__ = ["IndexedLaunch"]

_MOST = 1024  # counts of items whose grids are kept


class IndexedLaunch:
    """A launch of a copy plan between tables that stay what they are, or are written by a call, by ids on the device.

    The device's context is current where it is made.

    Parameters
    ----------
    plan : KernelPlan
        What is launched; names what errors call the ids.
    tables : tuple
        Base addresses of source and destination as the device sees them, or where the device has them; for one of them
        the number of base addresses that each call gives.
    widths : tuple of int
        Bytes of an id of the source and of the destination, 8 or 4; 0: items are their own ids.
    pinned : sequence of (int, int)
        Addresses in pinned or registered memory, each with the number that the driver gave what lies there: where that
        has changed, the tables are no longer right.
    link : bool
        Host memory takes part.
    bits : int
        The alignment of the base addresses that calls give, or-ed together.
    asks : bool
        Calls name an address and the number that the driver gave the memory there, which must still be the same.
    rate, way : float, str
        Bytes a second that the launch keeps to, and the direction whose link it shares; 0: it keeps to none.

    Raises
    ------
    BoundsError
        The tables do not fit the argument block.
    """

    __slots__ = (
        *("_block", "_count", "_event", "_grid", "_index", "_lock", "_most", "_per_item", "_program"),
        *(
            "_asked",
            "_first",
            "_jobs",
            "_kernel",
            "_long",
            "_short",
            "_state",
            "_stream",
            "_table",
            "_threads",
            "_values",
            "_words",
            "plan",
        ),
    )
    JOB = 6  # values of a launch among other commands: `ka` has the second to fourth in this order

    def __init__(
        self,
        state: DeviceState,
        plan: KernelPlan,
        tables: tuple[U64 | DeviceTable | int, U64 | DeviceTable | int],
        widths: tuple[int, int],
        *,
        pinned: Sequence[tuple[int, int]] = (),
        link: bool = True,
        bits: int = 0,
        asks: bool = False,
        rate: float | None = None,
        way: str = "",
    ) -> None:
        self._state, self.plan, self._lock = state, plan, fork.lock()
        for table in tables:
            if not isinstance(table, int):
                bits |= table.bits if isinstance(table, DeviceTable) else int(np.bitwise_or.reduce(table))
        if rate is None:
            rate = plan.limit.rate(state.device, way) if link else 0.0
        indexed = [k for k in (0, 1) if widths[k]]
        launch = plan.bind(state, tables, indexed, 0, 1, bits, link=link, width=widths, rate=rate, way=way)
        if launch is None:
            entries = sum(t if isinstance(t, int) else len(t) for t in tables if not isinstance(t, DeviceTable))
            raise BoundsError(f"tables have {entries} base addresses, must have at most {ka.WORDS}")
        block, self._first = launch.block, 0
        self._block, self._kernel, self._long = block, launch.kernel, block.words
        given = [at for at, table in zip(launch.table_addresses, tables, strict=True) if isinstance(table, int)]
        self._table = (given[0] - block.start) // 8 if given else 0
        self._per_item = int(block.words[ka.SEGMENTS])
        self._words: memoryview[int] = memoryview(block.words.view("u1").data).cast("B").cast("Q")
        self._index = tuple(ka.INDEX[k] if widths[k] else -1 for k in (0, 1))
        self._threads = plan.most_threads(rate, way)
        self._most, self._count, self._grid = plan.most_ctas(link, state.multiprocessors, rate > 0), -1, (0, 0)
        c = Commands()
        stream, event, ctas, threads = c.value(), c.value(), c.value(), c.value()
        self._asked = -1
        c.on_device(state.device)
        c.uncaptured(stream)
        if asks:
            asked: Value = c.value(2)
            self._asked = asked.index
            c.same_memory(asked, Value(asked.index + 1))
        for address, number in pinned:
            c.same_memory(address, number)
        self._jobs: dict[int, tuple[int, int, int]] = {}
        c.launch(self._kernel, ctas, threads, stream, block.address)
        c.record(event, stream)
        self._program = Program(c, state.owner)
        self._values = self._program.values
        self._stream, self._event = stream.index, event.index
        self._short = ctas.index

    def enqueue(
        self,
        stream: int,
        src_ids: int,
        dst_ids: int,
        count: int,
        *,
        first: int = 0,
        bases: Sequence[int] | U64 = (),
        memory: tuple[int, int] = (0, 0),
        on_error: Callable[[Exception], None] | None = None,
        refs: object = None,
    ) -> Completion | None:
        """Launch it for items `first` to `first + count`, at least one, by ids at these addresses.

        `bases` are the addresses that calls give, `memory` the one that they ask about and the number of what lies
        there.

        `on_error` receives what the kernel finds in the ids, where nobody waits for the launch; `refs` are kept until
        it is over.

        Returns
        -------
        Completion or None
            None where it was not launched: another device's context is current, a capture is in progress on the
            stream, or the pinned memory is no longer what it was.
        """
        state, program = self._state, self._program
        if not state.completions.events and state.owner.context_device() != state.device:
            return None  # ahead of all: an event would be made in the current context
        operation = state.completions.begin(stream)
        try:
            status = 0
            if self.plan.check:
                status = state.status.take(operation, self.plan, 0, on_error)
            with self._lock:
                words, values, (src, dst) = self._words, self._values, self._index
                if src >= 0:
                    words[src] = src_ids
                if dst >= 0:
                    words[dst] = dst_ids
                words[ka.STATUS] = status
                if type(bases) is np.ndarray:
                    self._long[self._table : self._table + len(bases)] = bases
                else:
                    at = self._table
                    for base in bases:
                        words[at] = base
                        at += 1
                if self._asked >= 0:
                    values[self._asked], values[self._asked + 1] = memory
                if first != self._first:
                    words[ka.FIRST_ITEM] = self._first = first
                if count != self._count:
                    self._shape(count)
                values[self._stream], values[self._event] = stream, operation._event  # type: ignore[assignment]
                operation.enqueued.append(stream)
                operation.recorded = program.run()
            if operation.recorded:
                return operation.commit(refs)
            operation.abandon()
            return None
        except BaseException:
            operation.abort()
            raise

    def add_to(self, c: Commands, stream: Value, job: Value) -> None:
        """Add the launch to other commands, whose `JOB` values from `job` on are what `job` returns."""
        start, at = self._block.start, job.index
        c.write(start + 8 * max(self._index), job.address, 1)
        c.write(start + 8 * ka.SEGMENTS, Value(at + 1).address, 3)
        c.launch(self._kernel, Value(at + 4), Value(at + 5), stream, self._block.address)

    def job(self, ids: int, first: int, count: int, status: int) -> tuple[int, int, int, int, int, int]:
        """The values of one launch for items `first` to `first + count`."""
        found = self._jobs.get(count)
        if found is None:
            segments = count * self._per_item
            if len(self._jobs) >= _MOST:
                self._jobs.clear()
            found = self._jobs[count] = segments, *launch_shape(segments, self._most, self._threads)
        return ids, found[0], first, status, found[1], found[2]

    def _shape(self, count: int) -> None:
        segments = count * self._per_item
        self._words[ka.SEGMENTS] = segments
        ctas, threads = launch_shape(segments, self._most, self._threads)
        self._values[self._short], self._values[self._short + 1] = ctas, threads
        self._count = count
