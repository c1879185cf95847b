"""An exception of a signal handler at any line of the allocators: what is asked for is done, or not; never between."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw import host_kv_pool, pages
from kvraw.runtime.host import pool as pool_module
from kvraw.runtime.host import suballoc, usage
from kvraw.runtime.host.backing import BackingInfo
from kvraw.runtime.host.mapping import HostOptions

FILES = {m.__file__ for m in (usage, pool_module, suballoc, pages, host_kv_pool)}
PAGE = 4096


class StopError(BaseException):
    """What the signal handler raises."""


def interrupted(work: Callable[[], Any], nth: int, what: Callable[[], None] | None = None) -> bool:
    """Do it, and raise (or call) at the nth line of the allocators; whether there is such a line."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            count += 1
            if count == nth:
                if what is None:
                    raise StopError
                sys.settrace(None)
                what()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except StopError:
        pass
    finally:
        sys.settrace(before)
    return count >= nth


def every_line(setting: Callable[[], tuple[Callable[[], Any], Callable[[], None]]]) -> int:
    """Interrupt a work at each of its lines, and check after each; how many there are."""
    nth = 1
    while True:
        work, check = setting()
        if not interrupted(work, nth):
            return nth - 1
        check()
        nth += 1


class Transfer:
    """An operation that uses some chunks."""

    def __init__(self, chunks: list[kvraw.HostChunk] | None = None) -> None:
        self.queue, self.finished = None, False
        self.uses = None if chunks is None else np.array([c.address for c in chunks], np.uint64)


def whole(pool: kvraw.HostPool, chunks: list[kvraw.HostChunk]) -> None:
    """The pool holds just those chunks that are not freed, hands nothing out twice, and can be used up."""
    live = {c.address: c.nbytes for c in chunks if not c.freed}
    info = pool.info()
    assert info["used"] == sum(live.values())
    assert info["chunks"] == len(live)
    assert info["allocations"] - info["frees"] == len(live)  # type: ignore[operator]
    assert info["free"] + info["used"] + info["waiting"] == pool.nbytes  # type: ignore[operator]
    rng, mine = random.Random(0), list[kvraw.HostChunk]()
    for _ in range(20):
        if mine and rng.random() < 0.4:
            pool.free([mine.pop(rng.randrange(len(mine)))])
            continue
        try:
            mine += pool.chunks(1, rng.choice([PAGE, 2 * PAGE, 4 * PAGE]))
        except kvraw.HostMemoryError:
            continue
        new = mine[-1]
        for address, nbytes in live.items():
            assert new.address + new.nbytes <= address or address + nbytes <= new.address
    pool.free(mine)
    free = pool.info()["free"]
    pool.free(pool.chunks(free // PAGE, PAGE))  # type: ignore[operator]
    locked: list[bool] = []
    thread = threading.Thread(target=lambda: locked.append(pool._lock.acquire(timeout=5)))
    thread.start()
    thread.join()
    assert locked == [True]


def make() -> tuple[kvraw.HostPool, list[kvraw.HostChunk]]:
    pool = kvraw.HostPool(32 * PAGE, pin=False, options=HostOptions(populate=False))
    pool._facts = BackingInfo()  # or `info` would read all of /proc/self/smaps each time
    kept, gone = pool.chunks(3, 2 * PAGE), pool.chunks(4, PAGE)
    pool.free([gone[1], gone[3]])
    return pool, [*kept, gone[0], gone[2]]


def test_chunks() -> None:
    def setting() -> tuple[Callable[[], Any], Callable[[], None]]:
        pool, chunks = make()
        return (lambda: pool.chunks(2, PAGE)), (lambda: whole(pool, chunks))

    assert every_line(setting) > 50


def test_free() -> None:
    def setting() -> tuple[Callable[[], Any], Callable[[], None]]:
        pool, chunks = make()
        return (lambda: pool.free([chunks[1], chunks[3]])), (lambda: whole(pool, chunks))

    assert every_line(setting) > 40


def test_free_beside_transfers_and_their_end() -> None:
    def setting() -> tuple[Callable[[], Any], Callable[[], None]]:
        pool, chunks = make()
        transfers = [Transfer(chunks[:2]), Transfer(chunks[1:3]), Transfer()]
        for one in transfers:
            pool.mark_used(one)  # type: ignore[arg-type]

        def work() -> None:
            pool.free(chunks[:2])
            transfers[1].finished = transfers[2].finished = True
            pool.free([chunks[3]])

        def check() -> None:
            for one in transfers:
                one.finished = True
            pool._lock.acquire(timeout=1)
            pool._settle()
            pool._lock.release()
            whole(pool, chunks)

        return work, check

    assert every_line(setting) > 100


def test_a_signal_handler_or_finalizer_uses_the_pool_in_the_midst_of_it() -> None:
    for work_of in (lambda p, c: p.chunks(2, PAGE), lambda p, c: p.free([c[1], c[3]])):
        nth = 1
        while True:
            pool, chunks = make()
            got: list[kvraw.HostChunk] = []

            def handler(pool: kvraw.HostPool = pool, chunks: list[kvraw.HostChunk] = chunks) -> None:
                pool.free([chunks[0]])
                chunks += pool.chunks(1, 2 * PAGE)  # what was just freed, the best fit

            def work(pool: kvraw.HostPool = pool, chunks: list[kvraw.HostChunk] = chunks) -> None:
                got.extend(work_of(pool, chunks) or ())  # noqa: B023

            if not interrupted(work, nth, handler):
                break
            ends = sorted((c.address, c.address + c.nbytes) for c in [*chunks, *got] if not c.freed)
            assert all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False))  # noqa: RUF007
            whole(pool, [*chunks, *got])
            nth += 1
        assert nth > 40


def host_pool() -> kvraw.HostKVPool:
    return kvraw.HostKVPool(
        layout="page_first", tokens=128, page_size=16, layers=1, heads=1, head_size=8, element_size=1
    )


@pytest.mark.parametrize("what", ["alloc", "free"])
def test_pages_of_a_host_kv_pool(what: str) -> None:
    def setting() -> tuple[Callable[[], Any], Callable[[], None]]:
        host = host_pool()
        kept, other = host.alloc(32), host.alloc(16)
        assert kept is not None
        assert other is not None

        def check() -> None:
            left = host.available
            assert left in ((80,) if what == "alloc" else (80, 112))
            got = host.alloc(left)
            assert got is not None
            assert host.alloc(16) is None
            assert not set(got) & set(other)
            if left == 80:
                assert not set(got) & set(kept)
            host.free(got)

        return (lambda: host.alloc(48) if what == "alloc" else host.free(kept)), check

    assert every_line(setting) > 10


def test_a_call_that_was_interrupted_does_not_hold_up_close() -> None:
    tensors = [np.zeros((2, 8, 16, 1, 8), np.int8)]
    cache = kvraw.PagedCache.from_tensors(tensors, axes="PBTHD")

    def setting() -> tuple[Callable[[], Any], Callable[[], None]]:
        host = host_pool()
        slots = host.alloc(16)
        return (lambda: host.backup(cache, np.arange(16), slots)), (lambda: host.close(timeout=0.5))

    assert every_line(setting) > 20
