"""Any copy plan, with addresses and indices given at each call: the level below caches and chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvraw import config
from kvraw.arrays import ASK_DRIVER, U64, IndexVector, index_vector, pointer_vector
from kvraw.cache import require_host
from kvraw.engines import copy_engine, cpu, reference
from kvraw.engines.device_state import DeviceState, device_state
from kvraw.engines.kernel import KernelPlan
from kvraw.engines.operands import Operands, check_entries, check_host_index
from kvraw.engines.planner import profile_for
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.plan import CopyPlan, Side
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.inflight import Completion, Operation
from kvraw.runtime.memory import locate_all
from kvraw.runtime.stream import stream_handle

__all__ = ["Copy", "DeviceTable", "PreparedCopy", "Reached", "Ready"]

_NONE = np.zeros(0, np.uint64)
_ENGINES = ("auto", "kernel", "copy", "cpu", "reference")


class Copy:
    """A copy that was enqueued (GPU) or is done (CPU)."""

    __slots__ = ("_completion", "engine")

    def __init__(self, completion: Completion | None, engine: str) -> None:
        self._completion, self.engine = completion, engine

    def done(self) -> bool:
        """Whether the copy is over; never waits."""
        return self._completion is None or self._completion.done()

    def wait(self) -> None:
        """Wait on the host until the copy is over; raises `BoundsError` where the kernel met a bad index."""
        if self._completion is not None:
            self._completion.wait()
            if self._completion.error is not None:
                raise self._completion.error


@dataclass(frozen=True, slots=True, eq=False)
class Reached:
    """Base addresses that were looked up before: the driver is not asked about them again.

    Attributes
    ----------
    host, seen : numpy.ndarray of uint64
        As the host and as the device know them.
    link : bool
        Host memory is among them.
    edges : tuple of int
        Addresses behind them where one registration of somebody else ends and the next begins.
    """

    host: U64
    seen: U64
    link: bool
    edges: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.host)


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """A table of base addresses in the device's memory, each of them memory of the device.

    Attributes
    ----------
    address, entries : int
        Where it lies, and its length.
    bits : int
        The bits that may be set in any of the addresses; 0 means that all are multiples of 16.
    owner : object
        Kept alive until the copy is over.
    """

    address: int
    entries: int
    bits: int = 0
    owner: object = None


class Ready:
    """The arguments of one copy, checked; to be enqueued as a part of an operation."""

    __slots__ = ("_copy", "_count", "_first", "_index", "_seen")

    def __init__(
        self,
        copy: PreparedCopy,
        seen: list[Reached | DeviceTable],
        index: list[IndexVector | None],
        first: int,
        count: int,
    ) -> None:
        self._copy, self._seen, self._index, self._first, self._count = copy, seen, index, first, count

    def enqueue(self, state: DeviceState, operation: Operation, capturing: bool) -> str:
        """Enqueue the copy on the operation's stream; returns the engine. The device's context is current."""
        if not self._count:
            return "none"
        copy, index = self._copy, self._index
        tables = [t for t in self._seen if isinstance(t, Reached)]
        link = any(t.link for t in tables)
        host_ids = all(i is None or i.host is not None for i in index) and len(tables) == 2
        engine = copy.choose(link, host_ids, capturing, self._count)
        if engine == "copy":
            ends = [Operands(t.host, i) for t, i in zip(tables, index, strict=True)]
            operation.enqueued.append(operation.stream)
            found = copy_engine.merge(copy_engine.describe(copy.plan, ends[0], ends[1], self._first, self._count))
            edges = [e for t in tables for e in t.edges]
            copy_engine.enqueue(found, operation.stream, capturing=capturing, edges=edges)
        else:
            ends = [
                Operands(t.seen, i) if isinstance(t, Reached) else Operands(_NONE, i, t.address, t.bits)
                for t, i in zip(self._seen, index, strict=True)
            ]
            copy.kernel.enqueue(state, operation, ends[0], ends[1], self._first, self._count, link=link)
        return engine


class PreparedCopy:
    """A copy plan made ready: call it with base addresses, indices and a count.

    Parameters
    ----------
    plan : CopyPlan
        Two sides, the counts and the run.
    device : int, optional
        The GPU that carries it out; None: the CPU, over host memory.
    engine : str
        "auto", "kernel" or "copy" on a GPU; "auto", "cpu" or "reference" on the CPU.
    ctas : int, optional
        Most thread blocks of the kernel.
    check : bool
        Check indices against the sides' limits, on the host where they are there, else in the kernel.
    names : tuple of str
        What errors call the source and the destination.
    """

    def __init__(
        self,
        plan: CopyPlan,
        *,
        device: int | None,
        engine: str = "auto",
        ctas: int | None = None,
        check: bool = True,
        names: tuple[str, str] = ("src", "dst"),
    ) -> None:
        if engine == "auto":
            engine = config.ENGINE.get()
        if engine not in _ENGINES or (engine != "auto" and (engine in ("kernel", "copy")) != (device is not None)):
            raise LayoutError(
                f"engine is {engine!r} with device {device}; must be one of {', '.join(_ENGINES)} and fit it"
            )
        self.plan, self.device, self.check, self.names = plan, device, check, names
        self._engine = engine
        self.kernel = KernelPlan(plan, ctas=ctas, check=check, names=(f"{names[0]}_index", f"{names[1]}_index"))
        self._cpu = cpu.CpuPlan(plan) if device is None and engine != "reference" else None

    def __call__(
        self,
        src: Any,
        dst: Any,
        count: int,
        *,
        src_index: Any = None,
        dst_index: Any = None,
        first: int = 0,
        stream: Any = None,
        refs: object = None,
    ) -> Copy:
        """Copy items `first` to `first + count`; on a GPU, enqueue the copy on `stream`.

        Parameters
        ----------
        src, dst : sequence of int, Reached or DeviceTable
            Base addresses of each side, as the host knows them. What they reach is the caller's to keep, and to bound.
        count, first : int
            Items.
        src_index, dst_index : object, optional
            Index of each item, at least `first + count` values; None: the item itself.
        stream : object
            As for `kvraw.store`; a GPU needs one.
        refs : object
            Kept alive until the copy is over.

        Raises
        ------
        BoundsError
            A table or an index vector is too short, or an index out of bounds; nothing is moved.
        PlacementError
            A base or an index lies where the engine cannot reach it.
        """
        if self.device is None:
            bases, index = self._take((src, dst), (src_index, dst_index), first, count)
            return self._on_host(bases, index, first, count)
        handle = stream_handle(stream)
        with DeviceScope(self.device):
            ready = self.ready(src, dst, count, src_index=src_index, dst_index=dst_index, first=first)
            if not count:
                return Copy(None, "none")
            capturing = driver().stream_capturing(handle)
            state = device_state(self.device)
            operation = state.books.begin(handle, captured=capturing)
            try:
                engine = ready.enqueue(state, operation, capturing)
            except BaseException:
                operation.abort()
                raise
            return Copy(operation.commit((refs, ready)), engine)

    def ready(
        self, src: Any, dst: Any, count: int, *, src_index: Any = None, dst_index: Any = None, first: int = 0
    ) -> Ready:
        """Check the arguments of a call on a GPU, for one operation of several copies. Its context is current."""
        assert self.device is not None
        bases, index = self._take((src, dst), (src_index, dst_index), first, count)
        seen = [
            b if isinstance(b, (Reached, DeviceTable)) else self._on_device(n, b)
            for n, b in zip(self.names, bases, strict=True)
        ]
        return Ready(self, seen, index, first, count)

    def _take(
        self, bases: tuple[Any, Any], index: tuple[Any, Any], first: int, count: int
    ) -> tuple[list[Any], list[IndexVector | None]]:
        if count < 0 or first < 0:
            raise BoundsError(f"count is {count}, first {first}: must be >= 0")
        sides = (self.plan.src, self.plan.dst)
        tables: list[Any] = []
        for name, given, side in zip(self.names, bases, sides, strict=True):
            if isinstance(given, DeviceTable):
                check_entries(name, given.entries, side, first + count)
                tables.append(given)
                continue
            table = given if isinstance(given, Reached) else pointer_vector(name, given)
            check_entries(name, len(table), side, first + count)
            tables.append(table)
        vectors = [
            self._index(f"{n}_index", i, side, first, count)
            for n, i, side in zip(self.names, index, sides, strict=True)
        ]
        return tables, vectors

    def _index(self, name: str, values: Any, side: Side, first: int, count: int) -> IndexVector | None:
        if values is None:
            return None
        index = values if isinstance(values, IndexVector) else index_vector(name, values)
        if index.count < first + count:
            raise BoundsError(f"{name} has {index.count} values, must have at least {first + count}")
        if index.device not in (None, ASK_DRIVER, self.device):
            raise PlacementError(f"{name} lies on device {index.device}, must lie on {self.device} or the host")
        if index.host is not None and self.check:
            check_host_index(name, index.host[: first + count], side, first)
        return index

    def _on_host(self, bases: list[Any], index: list[IndexVector | None], first: int, count: int) -> Copy:
        ends = []
        for name, table, ids in zip(self.names, bases, index, strict=True):
            if isinstance(table, DeviceTable):
                raise PlacementError(f"{name} is a table on a device; the CPU engine takes one on the host")
            if isinstance(table, Reached):
                table = table.host
            else:
                require_host(name, table, 1)
            if ids is not None and ids.host is None:
                raise PlacementError(f"{name}_index lies on a device; the CPU engine takes it on the host")
            ends.append(Operands(table, ids))
        if count and self._cpu is not None:
            self._cpu.copy(ends[0], ends[1], first, count)
        elif count:
            reference.copy(self.plan, ends[0], ends[1], first, count)
        return Copy(None, "cpu" if self._cpu is not None else "reference")

    def _on_device(self, name: str, bases: U64) -> Reached:
        """Addresses as the device sees them, and whether host memory is among them."""
        seen, link = bases.copy(), False
        for at, where in enumerate(locate_all(bases.tolist(), 1)):
            if not where.device_address:
                raise PlacementError(
                    f"{name}[{at}] at {int(bases[at]):#x} is pageable host memory; the GPU takes pinned, registered or "
                    f"device memory"
                )
            seen[at], link = where.device_address, link or where.device is None
        return Reached(bases, seen, link)

    def choose(self, link: bool, host_ids: bool, capturing: bool, count: int) -> str:
        """The engine of a call on a GPU."""
        if self._engine == "copy" and not host_ids:
            raise PlacementError("engine is 'copy', but an index or a table lies on a device")
        if self._engine != "auto":
            return self._engine
        if not link or not host_ids or capturing:
            return "kernel"
        assert self.device is not None
        profile, nbytes, run = profile_for(self.device), count * self.plan.item_bytes, self.plan.run_bytes
        slow = {e: max(profile.seconds(e, d, run, nbytes) for d in ("store", "load")) for e in ("kernel", "copy")}
        return min(slow, key=slow.__getitem__)
