"""Forks beside eight threads that store, allocate and register; each child does the same, or gets a ForkError.

Run by itself: ``python -m tests.helpers.forks COUNT [switch interval]``; prints what became of the children.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable

import numpy as np

import kvraw
from kvraw.adapters import lmcache
from kvraw.runtime import driver as driver_module
from tests.emulator.fake_driver import FakeDriver

BLOCKS = 32


class Store:
    """Stores on the CPU engine's threads, into chunks of a pool that all jobs share."""

    def __init__(self, pool: kvraw.HostPool) -> None:
        self.tensors = [np.full((2, BLOCKS, 16, 8, 64), k + 1, np.int16) for k in range(2)]
        self.cache = kvraw.PagedCache.from_tensors(self.tensors, axes="PBTHD")
        self.pool = pool

    def __call__(self) -> None:
        (chunk,) = self.pool.chunks(1, self.cache.chunk_bytes(16 * BLOCKS), timeout=10)
        kvraw.store(self.cache, [chunk], np.arange(BLOCKS)).wait()
        layers = chunk.numpy(np.int16).reshape(2, 2, -1)
        assert (layers[:, 0] == 1).all()
        assert (layers[:, 1] == 2).all()
        chunk.free()


def allocate(pool: kvraw.HostPool) -> None:
    """Chunks, of which none lies in another, and which come back."""
    chunks = pool.chunks(3, 4096, timeout=10) + pool.chunks(2, 12288, timeout=10)
    ends = sorted((c.address, c.address + c.nbytes) for c in chunks)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    pool.free(chunks)


def pages(host: kvraw.HostKVPool) -> None:
    """Pages of a KV pool."""
    slots = host.alloc(64)
    assert slots is not None
    host.free(slots)


def record() -> None:
    """A record on a stream that nobody gives work, which is refused in a child."""
    lmcache.record_completion_on_stream(0, "kind", b"x")
    lmcache.drain_recorded_completions()


def register() -> None:
    """Pinned memory, of which a child has none."""
    kvraw.HostPool(1 << 16, device=0).close()


def jobs() -> list[Callable[[], None]]:
    """What eight threads and each child do; the first use of everything."""
    pool = kvraw.HostPool(64 << 20, pin=False)
    host = kvraw.HostKVPool(
        layout="page_first", tokens=4096, page_size=16, layers=2, heads=2, head_size=16, element_size=2
    )
    stores = [Store(pool) for _ in range(3)]
    out = [*stores, lambda: allocate(pool), lambda: allocate(pool), lambda: pages(host), record, register]
    for job in out:
        job()
    return out


def child(work: list[Callable[[], None]]) -> None:
    """All jobs; ends the process with 0 where each worked or raised `ForkError`."""
    signal.alarm(30)
    code = 1
    try:
        for job in work:
            with contextlib.suppress(kvraw.ForkError):
                job()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def main(count: int, interval: float) -> collections.Counter[int]:
    """Fork this often; how often each exit status came."""
    warnings.simplefilter("ignore")
    sys.setswitchinterval(interval)
    os.environ["KVRAW_CPU_THREADS"] = "3"
    driver_module.install(FakeDriver())
    work, stop = jobs(), False
    failed: list[BaseException] = []

    def spin(job: Callable[[], None]) -> None:
        while not stop:
            try:
                job()
            except BaseException as error:
                failed.append(error)
                raise

    threads = [threading.Thread(target=spin, args=(job,)) for job in work]
    for thread in threads:
        thread.start()
    found: collections.Counter[int] = collections.Counter()
    try:
        for _ in range(count):
            pid = os.fork()
            if not pid:
                child(work)
            found[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])] += 1
            if found.total() - found[0] >= 3:
                break
    finally:
        stop = True
        for thread in threads:
            thread.join()
    assert not failed
    return found


if __name__ == "__main__":
    begin = time.monotonic()
    result = main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 1e-4)
    sys.stdout.write(f"exit statuses {dict(result)} after {time.monotonic() - begin:.0f} s\n")
    sys.exit(any(result[code] for code in result if code))
