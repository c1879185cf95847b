"""One call of a copy: where both sides begin, by which indices, and which items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvraw.arrays import U64, IndexVector
from kvraw.copying.addresses import AddressTable
from kvraw.copying.operands import DeviceTable, Operands

__all__ = ["Call"]

_NONE: U64 = np.zeros(0, np.uint64)


@dataclass(slots=True)
class Call:
    """The arguments of a copy on a GPU; not changed once made.

    Attributes
    ----------
    src, dst : AddressTable or DeviceTable
        Base addresses.
    src_index, dst_index : IndexVector or None
        Index of each item; None: the item itself.
    first, count : int
        Items.
    capturing : bool
        A stream capture is in progress.
    checked : bool
        The indices that are on the host were checked.
    on_error : callable, optional
        Receives what kernels find in ids on the device, where nobody waits for the operation.
    host_ids, host_tables : bool
        All indices are on the host; both tables are known to it.
    """

    src: AddressTable | DeviceTable
    dst: AddressTable | DeviceTable
    src_index: IndexVector | None
    dst_index: IndexVector | None
    first: int
    count: int
    capturing: bool = False
    checked: bool = False
    on_error: Callable[[Exception], None] | None = None
    host_ids: bool = field(init=False)
    host_tables: bool = field(init=False)

    def __post_init__(self) -> None:
        src, dst = self.src_index, self.dst_index
        self.host_ids = (src is None or src.host is not None) and (dst is None or dst.host is not None)
        self.host_tables = type(self.src) is AddressTable and type(self.dst) is AddressTable

    @classmethod
    def of_chunks(
        cls,
        cache: AddressTable,
        chunks: AddressTable,
        store: bool,
        index: IndexVector,
        first: int,
        count: int,
        capturing: bool = False,
        on_error: Callable[[Exception], None] | None = None,
    ) -> Call:
        """A call between a cache, by an index, and chunks, which have none."""
        if store:
            return cls(cache, chunks, index, None, first, count, capturing, False, on_error)
        return cls(chunks, cache, None, index, first, count, capturing, False, on_error)

    @property
    def end(self) -> int:
        """The item behind the last."""
        return self.first + self.count

    @property
    def tables(self) -> tuple[AddressTable | DeviceTable, AddressTable | DeviceTable]:
        """Of source and destination."""
        return self.src, self.dst

    @property
    def indices(self) -> tuple[IndexVector | None, IndexVector | None]:
        """Of source and destination."""
        return self.src_index, self.dst_index

    @property
    def edges(self) -> tuple[int, ...]:
        """What no copy of the copy engine may span."""
        return (*self.src.edges, *self.dst.edges)

    def side(self, at: int, *, on_device: bool) -> Operands:
        """The source (0) or the destination (1), as the device or the host knows its addresses."""
        table, index = (self.dst, self.dst_index) if at else (self.src, self.src_index)
        if not isinstance(table, AddressTable):
            return Operands(_NONE, index, table)
        if on_device:
            return Operands(table.seen, index, None, table.alignment)
        return Operands(table.host, index)
