"""Takes in a row of chunks: where each lies, and what must outlive their use."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Set
from operator import attrgetter
from typing import Any

import numpy as np

from kvraw.addresses import in_reach, no_address
from kvraw.arrays import ASK_DRIVER, U64, is_pointer, require_writable, tensor_view
from kvraw.cache import require_host
from kvraw.copying.addresses import AddressTable, resolve
from kvraw.errors import BoundsError, ClosedError, LayoutError, PlacementError
from kvraw.runtime.completion import Operation
from kvraw.runtime.host.pool import ChunkKind, HostChunk, HostPool
from kvraw.runtime.host.usage import HostUse

__all__ = ["ChunkTable", "chunk_bytes"]


_UINT64 = np.dtype(np.uint64)
_HINT = " (a HostPool gives pinned chunks)"
_kind_of, _address_of = attrgetter("kind"), attrgetter("address")


# What an object has that is one chunk or a table, not a row of chunks: its values are no addresses.
_ONE = ("data_ptr", "__array_interface__", "__cuda_array_interface__", "__dlpack__")
_NO_ROWS = (str, bytes, bytearray, memoryview, array, Mapping, Set)


def _no_row(chunks: object) -> TypeError:
    return TypeError(f"chunks is a {type(chunks).__name__}, must be a sequence of chunks, such as [chunk]")


def _require_row(chunks: object) -> None:
    """Raise `TypeError` where one array stands for a row of chunks."""
    if isinstance(chunks, _NO_ROWS) or any(hasattr(chunks, name) for name in _ONE):
        raise _no_row(chunks)


def chunk_bytes(chunks: Sequence[Any]) -> int | None:
    """Bytes of the first of some chunks: 0 where there is none, None where it is a plain address."""
    if type(chunks) is not list:
        _require_row(chunks)
    try:
        if not len(chunks):
            return 0
        chunk = chunks[0]
    except (TypeError, KeyError):
        raise _no_row(chunks) from None
    if isinstance(chunk, HostChunk):
        return chunk.nbytes
    return None if is_pointer(chunk) else tensor_view(chunk, "chunks[0]").nbytes


class ChunkTable:
    """Chunks in order, checked for size; each a `HostChunk`, a tensor or array of any library, or an address.

    With `written`, none may be read-only.

    Attributes
    ----------
    addresses : numpy.ndarray of uint64
        As the host sees them (or the device, for chunks in device memory).
    pools : list of HostPool
        The pools that chunks come from.
    owners : list
        What to keep alive.
    starts : list
        Distinct where the addresses are; those, or live chunks of one pool.

    Raises
    ------
    BoundsError
        A chunk has the wrong size, or an address that no process has.
    LayoutError
        A chunk has gaps.
    ClosedError
        A chunk's pool is closed.
    PlacementError
        A chunk that is to be written is read-only.
    """

    __slots__ = ("_foreign", "_versions", "addresses", "nbytes", "owners", "pools", "starts")

    def __init__(self, chunks: Sequence[Any], nbytes: int, written: bool) -> None:
        self.nbytes = nbytes
        if type(chunks) is not list:
            _require_row(chunks)
        try:
            self.owners: list[Any] = list(chunks)
        except TypeError:
            raise _no_row(chunks) from None
        self._foreign: list[tuple[int, int | None]] = []  # (position, device) of what is no chunk of a pool
        self._versions: list[int] = []  # of the pools, before a look at their chunks
        pool = self._one_pool()
        if pool is not None:
            self.pools: list[HostPool] = [pool]
            self.starts: list[Any] = self.owners
            self.addresses: U64 = np.fromiter(map(_address_of, self.owners), _UINT64, len(self.owners))
            return
        self.pools = []
        addresses = [0] * len(self.owners)
        last: HostPool | None = None
        for at, chunk in enumerate(self.owners):
            if type(chunk) is HostChunk:
                addresses[at], size = chunk.address, chunk.nbytes
                if chunk.pool is not last:
                    last = chunk.pool
                    last.require_open()
                    if last not in self.pools:
                        self._versions.append(last.version)
                        self.pools.append(last)
                if chunk.freed:
                    raise ClosedError(f"chunks[{at}] was given back to its pool")
            else:
                addresses[at], size, device = self._take(at, chunk, written)
                self._foreign.append((at, device))
            if size != nbytes:
                raise BoundsError(f"chunks[{at}] has {size} bytes, must have {nbytes}")
        self.starts, self.addresses = addresses, np.array(addresses, np.uint64)

    def _one_pool(self) -> HostPool | None:
        """The pool, where all are live chunks of one pool and of the right size: found out without a look at each."""
        try:
            pool: HostPool = self.owners[0].pool
            version = pool.version
            kinds = list(map(_kind_of, self.owners))
            kind = kinds[0]
        except (AttributeError, IndexError):
            return None
        if type(kind) is not ChunkKind or kind.nbytes != self.nbytes or kinds.count(kind) != len(kinds):
            return None
        pool.require_open()
        self._versions.append(version)
        return pool

    @property
    def one_pool(self) -> HostPool | None:
        """The pool, where all are chunks of one."""
        return self.pools[0] if len(self.pools) == 1 and not self._foreign else None

    def mark_used(self, operation: Operation | HostUse) -> None:
        """Note an operation that uses the chunks with their pools, which look at them once more.

        Raises
        ------
        ClosedError
            Another thread freed one since the row was made, or closed its pool.
        """
        operation.uses = None if self._foreign else self.addresses  # what is no chunk may be a part of one
        for pool, version in zip(self.pools, self._versions, strict=True):
            pool.mark_live_chunks(operation, version, self._require_live)

    def _require_live(self) -> None:
        for at, chunk in enumerate(self.owners):
            if type(chunk) is HostChunk and chunk.freed:
                raise ClosedError(f"chunks[{at}] was given back to its pool")

    def _take(self, at: int, chunk: Any, written: bool) -> tuple[int, int, int | None]:
        if is_pointer(chunk):
            if not in_reach(chunk, self.nbytes):
                raise no_address(f"chunks[{at}]", int(chunk), self.nbytes)
            return int(chunk), self.nbytes, ASK_DRIVER
        view = tensor_view(chunk, f"chunks[{at}]")
        if written and view.readonly:
            require_writable(f"chunks[{at}]", view)
        if not view.contiguous:
            raise LayoutError(f"chunks[{at}] has shape {view.shape}, strides {view.strides} bytes; must have no gaps")
        self.owners[at] = view.owner
        return view.address, view.nbytes, view.device

    def __len__(self) -> int:
        return len(self.addresses)

    def require_distinct(self, begin: int, end: int) -> None:
        """Raise `BoundsError` where two chunks of these positions begin at one address: only one store would last."""
        seen: dict[int, int] = {}
        for at, address in enumerate(self.addresses[begin:end].tolist(), begin):
            first = seen.setdefault(address, at)
            if first != at:
                raise BoundsError(
                    f"chunks[{at}] and chunks[{first}] both begin at {address:#x}; a store writes each once"
                )

    def require_host(self, engine: str) -> None:
        """Raise `PlacementError` where a chunk is device memory."""
        for at, device in self._foreign:
            if device == ASK_DRIVER:
                require_host("chunks", [int(self.addresses[at])], self.nbytes, at)
            elif device is not None:
                raise PlacementError(
                    f"chunks[{at}] is memory of device {device}; the {engine} engine takes host memory"
                )

    def on_device(self, device: int) -> AddressTable:
        """The chunks as this device sees them. Its context is current; pools that are not pinned yet are pinned.

        Raises
        ------
        PlacementError
            A chunk is pageable host memory, or another device's.
        BoundsError
            One goes over the end of its memory.
        """
        addresses, link = self.addresses, bool(self.pools)
        for pool in self.pools:
            pool.pin(device)
        if (one := self.one_pool) is not None:
            shift = one.device_shift
            bits = one.ALIGNMENT | (shift & one.ALIGNMENT - 1)
            seen = addresses + np.uint64(shift % 2**64) if shift else addresses
            return AddressTable(addresses, seen, True, bits=bits)
        # A tensor that says which device holds it is believed.
        rest = [at for at, where in self._foreign if where != device]
        if rest and len(rest) == len(self):
            table = resolve(addresses, self.nbytes)
            table.require(device, "chunks", hint=_HINT)
            return table
        seen, foreign = addresses.copy(), dict(self._foreign)
        for at, chunk in enumerate(self.owners):
            if at not in foreign:
                seen[at] = chunk.address + chunk.pool.device_shift
        found = resolve(addresses[rest], self.nbytes)
        found.require(device, "chunks", rest, hint=_HINT)
        seen[rest] = found.seen
        return AddressTable(addresses, seen, link or found.link, found.edges)
