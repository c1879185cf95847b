"""The arguments of a prepared copy: tables that were looked up before, and copies that wait to be enqueued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvraw.arrays import U64, IndexVector
from kvraw.engines.device_state import DeviceState
from kvraw.engines.operands import DeviceTable, Operands
from kvraw.runtime.inflight import Operation

if TYPE_CHECKING:
    from kvraw.prepared import PreparedCopy

__all__ = ["Reached", "Ready"]

_NONE = np.zeros(0, np.uint64)


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
        Where registrations that they lie in end, whoever made them: no copy may span one.
    pageable : bool
        Pageable host memory is among them, which `seen` has as 0: for the copy engine alone.

    Examples
    --------
    >>> memory = np.zeros(64, np.uint8)
    >>> bases = np.array([memory.ctypes.data], np.uint64)
    >>> len(kvraw.Reached(bases, bases, link=True))
    1
    """

    host: U64
    seen: U64
    link: bool
    edges: tuple[int, ...] = ()
    pageable: bool = False

    def __len__(self) -> int:
        return len(self.host)


class Ready:
    """The arguments of one copy, checked; to be enqueued as a part of an operation.

    Attributes
    ----------
    link, pageable : bool
        Host memory is among what it reaches; pageable memory is.
    edges : list of int
        What no copy of the copy engine may span.
    """

    __slots__ = ("_copy", "_count", "_first", "_index", "_seen", "edges", "link", "pageable")

    def __init__(
        self,
        copy: PreparedCopy,
        seen: list[Reached | DeviceTable],
        index: list[IndexVector | None],
        first: int,
        count: int,
    ) -> None:
        self._copy, self._seen, self._index, self._first, self._count = copy, seen, index, first, count
        tables = [t for t in seen if isinstance(t, Reached)]
        self.link, self.pageable = any(t.link for t in tables), any(t.pageable for t in tables)
        self.edges = [e for t in tables for e in t.edges]

    def choose(self, capturing: bool) -> str:
        """The engine that is to carry it out."""
        on_host = all(i is None or i.host is not None for i in self._index)
        tables = not any(isinstance(t, DeviceTable) for t in self._seen)
        return self._copy.choose(self.link, on_host and tables, capturing, self._count)

    def operands(self, engine: str) -> list[Operands]:
        """Both sides as this engine takes them."""
        return [
            Operands(_NONE, i, t) if isinstance(t, DeviceTable) else Operands(t.host if engine == "copy" else t.seen, i)
            for t, i in zip(self._seen, self._index, strict=True)
        ]

    def enqueue(
        self,
        state: DeviceState,
        operation: Operation,
        capturing: bool,
        told: Callable[[Exception], None] | None = None,
    ) -> str:
        """Enqueue the copy on the operation's stream; returns the engine. The device's context is current."""
        if not self._count:
            return "none"
        copy, engine = self._copy, self.choose(capturing)
        src, dst = self.operands(engine)
        if engine == "copy":
            copy.enqueue_batch(
                operation,
                src,
                dst,
                self._first,
                self._count,
                capturing=capturing,
                pageable=self.pageable,
                edges=self.edges,
            )
        else:
            copy.enqueue_kernel(state, operation, src, dst, self._first, self._count, link=self.link, told=told)
        return engine
