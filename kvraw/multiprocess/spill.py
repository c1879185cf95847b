"""Between the pool and the disk: chunks that were stored are written behind, those that are missed are read back."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from kvraw.multiprocess.disk import PAGE, DiskTier
from kvraw.multiprocess.objects import ObjectTable, StoredObject
from kvraw.runtime.host.pool import HostPool

__all__ = ["Spill"]

_log = logging.getLogger("kvraw")


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

    def _bytes(self, one: StoredObject) -> Any:
        nbytes = -(-one.chunk.nbytes // PAGE) * PAGE
        return memoryview(self._pool.view(one.chunk.address, nbytes))  # type: ignore[arg-type]

    def holds(self, key: bytes, nbytes: int) -> bool:
        """Whether the disk has a chunk."""
        return self._disk.holds(key, nbytes)

    def keep(self, objects: Sequence[StoredObject]) -> None:
        """Write what was stored; left out where a quarter of the pool waits for the disk already."""
        for one in objects:
            if self._waiting + one.chunk.nbytes > self._pool.nbytes // 4:
                self._counts["disk_skipped"] += 1
                continue
            future = self._disk.write(one.key, self._bytes(one), one.chunk.nbytes)
            if future is not None:
                one.locks += 1
                self._waiting += one.chunk.nbytes
                self._writes.append((future, one))

    def load(self, keys: Sequence[bytes], nbytes: int, ahead: int) -> int:
        """Read the leading ones of these keys, behind `ahead` that are there; how many are coming."""
        if (ahead + len(keys)) * nbytes > self._pool.nbytes // 2:
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

    def advance(self) -> bool:
        """Take note of what is over; whether something is being read."""
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
            self._waiting -= one.chunk.nbytes
            error = written.exception()
            self._counts["disk_skipped" if error else "disk_written"] += 1
            if error is not None:
                _log.warning("a chunk was not written to disk: %s", error)
        return bool(self._loads)

    def stats(self) -> dict[str, float]:
        """Counts and gauges by name."""
        names = ("disk_written", "disk_loaded", "disk_skipped", "disk_damaged")
        return {
            **{name: float(self._counts[name]) for name in names},
            "disk_objects": float(len(self._disk)),
            "disk_bytes": float(self._disk.used),
        }
