"""Between the pool and the disk: chunks that were stored are written behind, those that are missed are read back."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from kvraw.multiprocess.disk import PAGE, DiskTier
from kvraw.multiprocess.objects import ObjectTable, StoredObject
from kvraw.runtime.host.pool import HostPool

__all__ = ["Spill"]

_log = logging.getLogger("kvraw")
_MOST_LATER = 1 << 16  # chunks


def _padded(one: StoredObject) -> int:
    """Bytes that a chunk takes of the pool, and of the disk."""
    return -(-one.chunk.nbytes // PAGE) * PAGE


class Spill:
    """One thread at a time may call it.

    Parameters
    ----------
    disk : DiskTier
        Where to.
    pool, objects, counts
        Of the service.
    """

    def __init__(self, disk: DiskTier, pool: HostPool, objects: ObjectTable, counts: Counter[str]) -> None:
        self._disk, self._pool, self._objects, self._counts = disk, pool, objects, counts
        self._writes: list[tuple[Future[None], StoredObject]] = []
        self._loads: dict[bytes, tuple[Future[bool], StoredObject]] = {}
        self._waiting = 0  # bytes to be written, which cannot be evicted
        self._later: deque[StoredObject] = deque()  # the disk is behind: if they are there still

    def _bytes(self, one: StoredObject) -> Any:
        return memoryview(self._pool.view(one.chunk.address, _padded(one)))  # type: ignore[arg-type]

    def holds(self, key: bytes, nbytes: int) -> bool:
        """Whether the disk has a chunk."""
        return self._disk.holds(key, nbytes)

    def keep(self, objects: Sequence[StoredObject]) -> None:
        """Write what was stored; later, where a quarter of the pool waits for the disk already."""
        self._later.extend(objects)
        self._write_some()
        while len(self._later) > _MOST_LATER:
            self._later.popleft()
            self._counts["disk_skipped"] += 1

    def _write_some(self) -> None:
        later, most = self._later, self._pool.nbytes // 4
        # One chunk at least, however large it is.
        while later and (not self._waiting or self._waiting + _padded(later[0]) <= most):
            one = later.popleft()
            nbytes = one.chunk.nbytes
            if self._objects.find(one.key, nbytes) is not one:
                self._counts["disk_skipped"] += 1  # it was evicted meanwhile
                continue
            future = self._disk.write(one.key, self._bytes(one), nbytes)
            if future is not None:
                one.locks += 1
                self._waiting += _padded(one)
                self._writes.append((future, one))
            elif not self._disk.holds(one.key, nbytes):
                self._counts["disk_skipped"] += 1

    def load(self, keys: Sequence[bytes], nbytes: int, ahead: int) -> int:
        """Read the leading ones of these keys, behind `ahead` that are there; how many are coming."""
        if (ahead + len(keys)) * -(-nbytes // PAGE) * PAGE > self._pool.nbytes // 2:
            return 0  # they would drive each other out
        coming = 0
        for key in keys:
            if key in self._loads:
                coming += 1
            elif self._objects.find(key, nbytes) is None:
                if self._objects.known(key) or not self._disk.holds(key, nbytes):
                    break
                one = self._objects.reserve(key, nbytes)
                if one is None:
                    break
                self._loads[key] = self._disk.read(key, self._bytes(one)), one
                coming += 1
        return coming

    def advance(self) -> float:
        """Take note of what is over; seconds after which to look again."""
        for key, (future, one) in list(self._loads.items()):
            if not future.done():
                continue
            del self._loads[key]
            if future.exception() is None and future.result():
                self._objects.publish([one])
                self._counts["disk_loaded"] += 1
            else:
                _log.warning("a chunk on disk is damaged: %s", future.exception() or "its checksum is another one")
                self._objects.drop(one)
                self._disk.forget(key)
                self._counts["disk_damaged"] += 1
        writes, self._writes = self._writes, []
        for entry in writes:
            written, one = entry
            if not written.done():
                self._writes.append(entry)
                continue
            one.locks -= 1
            self._waiting -= _padded(one)
            self._counts["disk_skipped" if written.exception() else "disk_written"] += 1  # its log says why
        self._write_some()
        return 0.001 if self._loads else 0.01 if self._writes else 1.0

    def finish(self, until: float) -> None:
        """Write what is left, up to that moment of the monotonic clock."""
        while time.monotonic() < until:
            self.advance()
            if not self._writes:
                return
            wait([future for future, _ in self._writes], until - time.monotonic(), FIRST_COMPLETED)

    def stats(self) -> dict[str, float]:
        """Counts and gauges by name."""
        names = ("disk_written", "disk_loaded", "disk_skipped", "disk_damaged")
        return {
            **{name: float(self._counts[name]) for name in names},
            "disk_waiting": float(len(self._writes) + len(self._later)),
            "disk_objects": float(len(self._disk)),
            "disk_bytes": float(self._disk.used),
        }
