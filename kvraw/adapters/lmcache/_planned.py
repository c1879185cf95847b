"""What the plans of LMCache are made of: tables and ids at addresses, staging copies, and copies that are ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvraw.adapters.lmcache._copies import check_range, copy_on_host
from kvraw.adapters.lmcache._ids import host_ids
from kvraw.adapters.lmcache._launch import Copies
from kvraw.addresses import FIRST, TOP, require_address
from kvraw.arrays import ASK_DRIVER, U64, IndexVector
from kvraw.cache import require_host
from kvraw.copying.addresses import resolve
from kvraw.copying.operands import check_host_index, require_index
from kvraw.copying.steps import Step, StepCopy
from kvraw.errors import PlacementError
from kvraw.memo import Memo
from kvraw.prepared import DeviceTable, Reached
from kvraw.runtime.context import at_reset
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import PinnedBuffer

if TYPE_CHECKING:
    from kvraw.adapters.lmcache._paged import Paged

__all__ = ["pieces", "run_on_host", "stages", "tables_of"]

_TOP = 2**64
_bits: Memo[tuple[int, int, int], int] = Memo(4096)
at_reset(_bits.clear)


def words(address: int, count: int) -> U64:
    """A vector of addresses in host memory."""
    return host_ids(address, count).view(np.uint64)


def _fetch(name: str, address: int, entries: int, device: int, stream: int) -> U64:
    """A table on the device as it is behind what the stream was given, which may still be writing it."""
    with PinnedBuffer(entries * 8, device) as copy:
        driver().memcpy_async(copy.address, address, entries * 8, stream)
        driver().stream_synchronize(stream)
        found: U64 = words(copy.address, entries).copy()
    resolve(found).require(device, name, pageable=True)
    return found


def _table_bits(name: str, address: int, entries: int, device: int, stream: int | None) -> int:
    """The bits that are set in any address of a table on the device, to tell the alignment.

    The table is read once, and the host waits for that. Without a stream an unknown table is taken as aligned to 8
    bytes.
    """
    key = (device, address, entries)
    if key not in _bits and stream is not None:
        _bits.keep(key, int(np.bitwise_or.reduce(_fetch(name, address, entries, device, stream))) % 16)
    return _bits.get(key, 8)


def _demanded_bits(head_bytes: int) -> int:
    """The alignment that LMCache's own kernel takes for granted, as bits: of its accesses, 16, 4 or 2 bytes."""
    return 0 if head_bytes % 16 == 0 else 4 if head_bytes % 4 == 0 else 2


def tables_of(name: str, address: int, paged: Paged, stream: int | None) -> Sequence[DeviceTable | Reached]:
    """The tables of a cache's parts, out of the one at an address of its device, or of the host.

    One on a device is looked at behind what the stream was given; without a stream (a capture is in progress), not at
    all. The parts of a format that has several begin at distances from its addresses, which then must be read: at each
    call, and the host waits for it.
    """
    entries, device, parts = len(paged.addresses), paged.device, paged.parts
    if device is None:
        require_address(name, address, 8 * entries)
        tables = [p.bases(words(address, entries)) for p in parts]
        for bases in tables:
            require_host(name, bases, 1)
        return [Reached(b, b, False) for b in tables]
    require_index(name, IndexVector(None, address, entries, 8, ASK_DRIVER), device)
    if len(parts) > 1:
        if stream is None:
            raise PlacementError(f"{name} of a format of several layouts cannot be read while a graph is captured")
        found = _fetch(name, address, entries, device, stream)
        return [Reached(b, b, False) for b in (p.bases(found) for p in parts)]
    head_bytes = parts[0].head_bytes
    # Other addresses may come to stand in the table: no more is made of what it held than LMCache's kernel would.
    bits = _table_bits(name, address, entries, device, stream) | _demanded_bits(head_bytes)
    return [DeviceTable(address, entries, bits)]


def pieces(
    copies: Copies,
    device: int | None,
    ends: tuple[Sequence[Any], Sequence[Any]],
    ids: tuple[int, int],
    first: int,
    count: int,
) -> list[Any]:
    """The copies of items `first` to `first + count` between tables and objects, ready: to be enqueued, or called.

    `ids` are the address of a list of int64 ids, and where in it item 0 has its own. In host memory they are checked.
    """
    base, before = ids
    address, total = base + 8 * before, first + count
    found: list[Any] = []
    to_host = copies.to_host
    if device is None:
        require_address(f"{copies.index}_base", base, 8 * (before + total))
        index = IndexVector(host_ids(address, total), 0, total)
        for copy in copies.each:
            side = copy.plan.src if to_host else copy.plan.dst
            check_host_index(copies.index, host_ids(base, before + total), side, before + first)
    else:
        require_index(f"{copies.index}_base", IndexVector(None, address, total, 8, ASK_DRIVER), device)
        index = IndexVector(None, address, total, 8, device)
    for copy, table, objects in zip(copies.each, *ends, strict=True):
        both, by = ((table, objects), (index, None)) if to_host else ((objects, table), (None, index))
        options: dict[str, Any] = {"src_index": by[0], "dst_index": by[1], "first": first}
        if device is None:
            found.append(partial(copy, *both, count, **options))
        else:
            found.append(copy.ready(*both, count, **options, engine="kernel" if copies.kernel else None))
    return found


def stages(copies: Iterable[StepCopy]) -> list[StepCopy]:
    """Staging copies, checked; without those of no bytes."""
    found = []
    for dest, src, nbytes, offset in copies:
        if not (
            nbytes > 0 <= offset < _TOP - nbytes and FIRST <= dest <= TOP - nbytes and FIRST <= src <= TOP - nbytes
        ):
            check_range("staging copy: dest", dest, nbytes, offset)
            check_range("staging copy: src", src, nbytes)
            if not nbytes:
                continue
        found.append((dest, src, nbytes, offset))
    return found


def run_on_host(step: Step, *, copies_first: bool = True) -> None:
    """Carry a step out in host memory: its copies, and its launches, which are functions there."""
    for copying in (copies_first, not copies_first):
        for part in step.copies if copying else step.launches:
            if type(part) is tuple:
                copy_on_host(*part[:3])
            else:
                part()  # type: ignore[operator]
