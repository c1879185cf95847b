"""Any copy plan, with addresses and indices given at each call: the level below caches and chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvraw import config
from kvraw.arrays import IndexVector, index_vector, pointer_vector
from kvraw.cache import require_host
from kvraw.checks import integer
from kvraw.copying import cpu, reference
from kvraw.copying.addresses import AddressTable, resolve
from kvraw.copying.bound_copy import BoundCopy
from kvraw.copying.call import Call
from kvraw.copying.device_state import DeviceState, device_state
from kvraw.copying.kernel import THREADS, KernelPlan
from kvraw.copying.operands import DeviceTable, Operands, check_entries, check_host_index, require_index
from kvraw.copying.plan import CopyPlan, Side
from kvraw.copying.planner import Choice, Neighbour, RateLimit
from kvraw.copying.transfer import Transfer
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.runtime.completion import Operation
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.stream import stream_handle

__all__ = ["AddressTable", "DeviceTable", "PreparedCopy", "Reached"]

Reached = AddressTable
_NONE = np.zeros(0, np.uint64)
_GPU_ENGINES = ("kernel", "copy", "staged")
_HOST_ENGINES = ("cpu", "reference")
_KERNEL = Choice("kernel", "asked for", 0.0)


class PreparedCall:
    """One copy with its arguments, to be enqueued as a part of an operation."""

    __slots__ = ("_bound", "_call", "_choice")

    def __init__(self, bound: BoundCopy, call: Call, choice: Choice | None = None) -> None:
        self._bound, self._call, self._choice = bound, call, choice

    def enqueue(
        self,
        state: DeviceState,
        operation: Operation,
        capturing: bool,
        on_error: Callable[[Exception], None] | None = None,
    ) -> str:
        """Enqueue the copy on the operation's stream; returns the engine. The device's context is current."""
        if not self._call.count:
            return "none"
        self._call.capturing, self._call.on_error = capturing, on_error
        choice = self._bound.enqueue(state, operation, self._call, self._choice)
        operation.recorded = False  # other parts may come behind it
        return choice.engine


class PreparedCopy:
    """A copy plan made ready: call it with base addresses, indices and a count.

    Parameters
    ----------
    plan : CopyPlan
        Two sides, the counts and the run.
    device : int, optional
        The GPU that carries it out; None: the CPU, over host memory.
    engine : str
        "auto", "kernel", "copy" or "staged" on a GPU; "auto", "cpu" or "reference" on the CPU.
    ctas, threads : int, optional
        Most thread blocks of the kernel, and most threads of a block.
    neighbour : "busy" or "idle", optional
        What the GPU does beside the copy. "busy": other work, so the engine is taken that costs least together with
        what that work loses, and kernels over the link keep to a rate. "idle": the fastest. Default: `KVRAW_NEIGHBOUR`.
    max_rate : float
        Most bytes a second over the link, which kernels alone keep to and all that copy the same way share; 0: any.
    check : bool
        Check indices against the sides' limits, on the host where they are there, else in the kernel, which leaves a
        bad one out: its bytes stay as they were, or become zeros where a copy to the host goes through staging slots.
    names, index_names : tuple of str
        What errors call the source and the destination, and their indices.

    Raises
    ------
    LayoutError
        There is no such engine, or not for this device.
    BoundsError
        `ctas` is negative, or `max_rate` is one that no kernel can keep to.

    Examples
    --------
    Rows of 64 bytes, by number, out of one table into another:

    >>> rows = kvraw.Side(outer=64, limit=8)
    >>> copy = kvraw.PreparedCopy(kvraw.CopyPlan(rows, rows, 1, 1, 1, 1, run=64), device=None)
    >>> a, b = np.arange(512, dtype=np.uint8).reshape(8, 64), np.zeros((8, 64), np.uint8)
    >>> copy([a.ctypes.data], [b.ctypes.data], 2, src_index=[7, 1], dst_index=[0, 1]).wait()
    >>> bool((b[:2] == a[[7, 1]]).all()), int(b[2:].sum())
    (True, 0)
    """

    def __init__(
        self,
        plan: CopyPlan,
        *,
        device: int | None,
        engine: str = "auto",
        ctas: int | None = None,
        threads: int | None = None,
        neighbour: Neighbour | None = None,
        max_rate: float = 0.0,
        check: bool = True,
        names: tuple[str, str] = ("src", "dst"),
        index_names: tuple[str, str] | None = None,
    ) -> None:
        fitting, asked = (_HOST_ENGINES if device is None else _GPU_ENGINES), config.ENGINE.get()
        wished = engine == "auto" and asked == "staged"  # of every plan: where it cannot be, another carries it out
        if engine == "auto" and asked in fitting:
            engine = asked
        if engine not in ("auto", *fitting):
            engines = ", ".join(("auto", *_GPU_ENGINES, *_HOST_ENGINES))
            raise LayoutError(f"engine is {engine!r} with device {device}; must be one of {engines} and fit it")
        if ctas is not None and integer("ctas", ctas) < 0:
            raise BoundsError(f"ctas is {ctas}, must be >= 0")
        limit = RateLimit.of(neighbour, max_rate)
        self.plan, self.device, self.check, self.names = plan, device, check, names
        self.index_names = index_names or (f"{names[0]}_index", f"{names[1]}_index")
        self._engine = engine
        self._bound: BoundCopy | None = None
        self._cpu: cpu.CpuPlan | None = None
        if device is not None:
            self._bound = BoundCopy(
                plan,
                engine=engine,
                where_possible=wished,
                ctas=ctas,
                threads=threads or THREADS,
                check=check,
                index_names=self.index_names,
                limit=limit,
            )
        elif engine != "reference":
            self._cpu = cpu.CpuPlan(plan)

    @property
    def bound(self) -> BoundCopy:
        """The copy bound to the engines of its GPU."""
        assert self._bound is not None, "the copy is in host memory"
        return self._bound

    def __call__(
        self,
        src: Sequence[int] | Any,
        dst: Sequence[int] | Any,
        count: int,
        *,
        src_index: Any = None,
        dst_index: Any = None,
        first: int = 0,
        stream: Any = None,
        engine: str | None = None,
        on_error: Callable[[Exception], None] | None = None,
        refs: object = None,
    ) -> Transfer:
        """Copy items `first` to `first + count`; on a GPU, enqueue the copy on `stream`.

        Parameters
        ----------
        src, dst : sequence of int, AddressTable or DeviceTable
            Base addresses of each side, as the host knows them. What they reach is the caller's to keep, and to bound.
        count, first : int
            Items.
        src_index, dst_index : object, optional
            Index of each item, at least `first + count` values; None: the item itself.
        stream : object
            As for `kvraw.store`; a GPU needs one.
        engine : str, optional
            "kernel": by a kernel, whatever else could carry this call out.
        on_error : callable, optional
            Receives what kernels find in indices on the device, where nobody waits for the copy.
        refs : object
            Kept alive until the copy is over.

        Returns
        -------
        Transfer
            To wait for.

        Raises
        ------
        BoundsError
            A table or an index vector is too short, or an index out of bounds; nothing is moved.
        PlacementError
            A base or an index lies where the engine cannot reach it, or the stream is another device's.
        """
        if self.device is None:
            bases, index = self._take((src, dst), (src_index, dst_index), first, count)
            return self._on_host(bases, index, first, count)
        handle = stream_handle(stream, self.device)
        if not count:
            self._take((src, dst), (src_index, dst_index), first, count)
            return Transfer(device=self.device)
        with DeviceScope(self.device):
            call = self.call(src, dst, count, src_index=src_index, dst_index=dst_index, first=first)
            call.capturing, call.on_error = driver().stream_capturing(handle), on_error
            kept = (refs, call, src, dst, src_index, dst_index)
            completion, chosen = self.bound.submit(
                device_state(self.device), handle, call, kept, _KERNEL if engine == "kernel" else None
            )
        return Transfer((completion,), chosen, self.device)

    def call(
        self, src: Any, dst: Any, count: int, *, src_index: Any = None, dst_index: Any = None, first: int = 0
    ) -> Call:
        """Resolve and check the arguments of a call on a GPU, all but the range of indices. Its context is current.

        Parameters
        ----------
        src, dst, count, src_index, dst_index, first
            As of a call.

        Returns
        -------
        Call
            What the bound copy takes.
        """
        (source, target), index = self._take((src, dst), (src_index, dst_index), first, count)
        source, target = (self._resolve(name, end) for name, end in zip(self.names, (source, target), strict=True))
        return Call(source, target, index[0], index[1], first, count)

    @property
    def kernel(self) -> KernelPlan:
        """What the kernel engine launches."""
        return self.bound.kernel

    def ready(
        self,
        src: Any,
        dst: Any,
        count: int,
        *,
        src_index: Any = None,
        dst_index: Any = None,
        first: int = 0,
        engine: str | None = None,
    ) -> PreparedCall:
        """Check the arguments of a call on a GPU, for one operation of several copies. Its context is current."""
        call = self.call(src, dst, count, src_index=src_index, dst_index=dst_index, first=first)
        assert self.device is not None
        self.bound.check(device_state(self.device), call)
        return PreparedCall(self.bound, call, _KERNEL if engine == "kernel" else None)

    def launch(
        self,
        state: DeviceState,
        src: Operands,
        dst: Operands,
        count: int,
        stream: int,
        *,
        first: int = 0,
        link: bool,
        way: str = "",
        captured: bool,
        on_error: Callable[[Exception], None] | None = None,
        refs: object = None,
    ) -> Transfer:
        """Enqueue the kernel with operands that the caller has checked; the device's context is current.

        `link` says that host memory takes part, `captured` that a capture is in progress on the stream; `on_error`
        receives what the kernel found in indices on the device, where nobody waits for the copy.
        """
        operation = state.completions.begin(stream, captured=captured)
        try:
            self.bound.kernel.enqueue(state, operation, src, dst, first, count, link=link, way=way, on_error=on_error)
            completion = operation.commit(refs)
        except BaseException:
            operation.abort()
            raise
        return Transfer((completion,), "kernel", self.device)

    def _take(
        self, bases: tuple[Any, Any], index: tuple[Any, Any], first: int, count: int
    ) -> tuple[list[Any], list[IndexVector | None]]:
        if count < 0 or first < 0:
            raise BoundsError(f"count is {count}, first {first}: must be >= 0")
        sides = (self.plan.src, self.plan.dst)
        tables: list[Any] = []
        for name, given, side in zip(self.names, bases, sides, strict=True):
            table = given if isinstance(given, (AddressTable, DeviceTable)) else pointer_vector(name, given)
            check_entries(name, table.entries if isinstance(table, DeviceTable) else len(table), side, first + count)
            tables.append(table)
        vectors = [
            self._index(n, i, side, first, count) for n, i, side in zip(self.index_names, index, sides, strict=True)
        ]
        return tables, vectors

    def _index(self, name: str, values: Any, side: Side, first: int, count: int) -> IndexVector | None:
        if values is None:
            return None
        index = values if isinstance(values, IndexVector) else index_vector(name, values)
        if index.count < first + count:
            raise BoundsError(f"{name} has {index.count} values, must have at least {first + count}")
        if self.device is not None:
            require_index(name, index, self.device)
        if index.host is not None and index.host.strides != (8,):
            index = index._replace(host=np.ascontiguousarray(index.host))
        if index.host is not None and self.check and self.device is None:
            check_host_index(name, index.host[: first + count], side, first)
        return index

    def _on_host(self, bases: list[Any], index: list[IndexVector | None], first: int, count: int) -> Transfer:
        ends = []
        for name, index_name, table, ids in zip(self.names, self.index_names, bases, index, strict=True):
            if isinstance(table, DeviceTable):
                raise PlacementError(f"{name} is a table on a device; the CPU engine takes one on the host")
            if isinstance(table, AddressTable):
                table = table.host
            else:
                require_host(name, table, self.plan.run_bytes)
            if ids is not None and ids.host is None:
                raise PlacementError(f"{index_name} lies on a device; the CPU engine takes it on the host")
            ends.append(Operands(table, ids))
        if count and self._cpu is not None:
            self._cpu.copy(ends[0], ends[1], first, count)
        elif count:
            reference.copy(self.plan, ends[0], ends[1], first, count)
        return Transfer(engine="cpu" if self._cpu is not None else "reference")

    def _resolve(self, name: str, bases: Any) -> AddressTable | DeviceTable:
        """A table as the device sees it; the driver is asked where that is not known yet."""
        if isinstance(bases, (AddressTable, DeviceTable)):
            return bases
        table = resolve(bases)
        if self._engine != "copy":
            assert self.device is not None
            table.require(self.device, name)
        return table
