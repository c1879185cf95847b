"""Calls by the kernel engine, and checks of ids, bound to programs: most of a call is written ahead of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvraw.arrays import I64, U64
from kvraw.copying.addresses import AddressTable
from kvraw.copying.call import Call
from kvraw.copying.device_state import DeviceState
from kvraw.copying.kernel import BoundLaunch
from kvraw.copying.plan import Side
from kvraw.runtime import fork
from kvraw.runtime.completion import Operation
from kvraw.runtime.driver import CudaDriver
from kvraw.runtime.program import IDS, IDS_COUNT, Commands, Operand, Program, Value

__all__ = ["BoundCall", "IdCheck", "IdChecker", "id_checker"]

_NO_IDS: I64 = np.zeros(0, np.int64)


class IdCheck(NamedTuple):
    """What ids are checked for ahead of everything else; `side` None: nothing."""

    name: str
    side: Side | None
    distinct: bool

    def add_to(self, c: Commands, ids: Value, first: Operand, count: Operand) -> None:
        """Add it to commands, for `count` ids that lie at `ids` and are the call's from `first` on."""
        if self.side is not None:
            skip = self.side.skip_negative
            c.check(self.name, ids, count, self.side.limit, skip_negative=skip, distinct=self.distinct, first=first)


class IdChecker:
    """The program that makes one check, for all plans of a device."""

    def __init__(self, check: IdCheck, driver: CudaDriver) -> None:
        c = Commands()
        first = c.value()
        check.add_to(c, IDS, first, IDS_COUNT)
        self._lock, self._program, self._first = fork.lock(), Program(c, driver), first.index

    def __call__(self, ids: I64, first: int = 0) -> None:
        """Check ids on the host, the first of which is that of item `first`.

        Raises
        ------
        BoundsError
            One is out of bounds, or stands twice where it must not.
        """
        with self._lock:
            self._program.values[self._first] = first
            self._program.run(ids)


def id_checker(state: DeviceState, check: IdCheck) -> IdChecker:
    """What makes a check."""
    known = state.bound["id checks"]
    found: IdChecker | None = known.get(check)
    return found or known.setdefault(check, IdChecker(check, state.owner))


class BoundCall:
    """The program of calls of one kind that are one launch, by ids on the host.

    Parameters
    ----------
    launch : BoundLaunch
        The launch.
    checks : tuple of IdCheck
        Of the ids of source and destination.
    call : Call
        One of these calls.
    """

    __slots__ = ("_event", "_flat", "_held", "_launch", "_lock", "_other", "_program", "_seen", "_stream")

    def __init__(self, state: DeviceState, launch: BoundLaunch, checks: tuple[IdCheck, IdCheck], call: Call) -> None:
        c = Commands()
        stream, event, other = (c.value() for _ in range(3))
        self._stream, self._event, self._other = stream.index, event.index, other.index
        self._lock = fork.lock()
        self._launch = launch  # whose arguments the rows name
        self._flat = int(call.dst_index is None)  # the side of the chunks
        tables = [np.zeros(len(t) if isinstance(t, AddressTable) else 0, np.uint64) for t in call.tables]
        self._seen: tuple[U64, U64] = (tables[0], tables[1])
        self._held: list[object] = [None, None]  # the tables whose addresses these have
        indexed = [k for k in (0, 1) if call.indices[k] is not None]
        ids = {k: IDS if k == indexed[0] else other for k in indexed}
        c.on_device(state.device)
        c.uncaptured(stream)
        for k in indexed:
            checks[k].add_to(c, ids[k] + 8 * call.first, call.first, call.count)
        for k in indexed:
            c.write(launch.index_addresses[k], ids[k] + 8 * call.first, launch.count)
        for table, seen in zip(launch.table_addresses, self._seen, strict=True):
            c.write(table, int(seen.ctypes.data), len(seen))
        c.launch(launch.kernel, launch.ctas, launch.threads, stream, launch.params)
        c.record(event, stream)
        self._program = Program(c, state.owner)
        self._hold(call)

    def _hold(self, call: Call) -> None:
        for k, table in enumerate(call.tables):
            if table is not self._held[k]:
                assert isinstance(table, AddressTable)
                self._seen[k][:] = table.seen
                self._held[k] = table

    def run(self, operation: Operation, ids: I64, seen: U64) -> bool:
        """Enqueue a call that differs from the one before in its ids and chunks, and whose chunks have no ids.

        `ids` are those of the call, without gaps, and `seen` the addresses of its chunks as the device sees them.
        False where its stream is being captured, or the context is another device's.

        Raises
        ------
        BoundsError
            An id is bad; nothing was enqueued.
        """
        with self._lock:
            values = self._program.values
            values[self._stream], values[self._event] = operation.stream, operation._event  # type: ignore[assignment]
            self._seen[self._flat][:] = seen
            self._held[self._flat] = None
            return operation.run(self._program, ids)

    def run_call(self, operation: Operation, call: Call) -> bool:
        """The same for any call of its kind."""
        with self._lock:
            values = self._program.values
            values[self._stream], values[self._event] = operation.stream, operation._event  # type: ignore[assignment]
            self._hold(call)
            index, other = call.indices
            if index is None:
                index, other = other, None
            if other is not None:
                assert other.host is not None
                values[self._other] = other.host.ctypes.data
            ids = _NO_IDS if index is None or index.host is None else index.host
            return operation.run(self._program, ids)
