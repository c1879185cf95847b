"""The CPU engine's threads: none goes on once a call returned or raised, and the caller does what no thread can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.copying import cpu

SIZE = 4 << 20


@pytest.fixture(autouse=True)
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRAW_CPU_THREADS", "4")


class Work:
    """Stretches that take a while each, of which it is known whether one is under way."""

    def __init__(self, seconds: float = 0.01, bad: int = -1, error: type[Exception] = ValueError) -> None:
        self.seconds, self.bad, self.error = seconds, bad, error
        self.lock, self.active, self.done = threading.Lock(), 0, []  # type: ignore[var-annotated]

    def __call__(self, begin: int, end: int) -> None:
        with self.lock:
            self.active += 1
        try:
            time.sleep(self.seconds * (1 + begin % 3))
        finally:
            with self.lock:
                self.active -= 1
                self.done.append((begin, end))
        if begin == self.bad:
            raise self.error("a stretch")


def test_every_stretch_is_done_once() -> None:
    for count in (1, 2, 3, 4, 9):
        work = Work(0.001)
        cpu.in_parts(work, count, 99)
        assert sorted(work.done)[0][0] == 0
        assert sum(end - begin for begin, end in work.done) == count
        assert not work.active


@pytest.mark.parametrize("error", [ValueError, kvraw.BoundsError])
@pytest.mark.parametrize("bad", range(4))
def test_an_error_comes_when_nothing_is_under_way(bad: int, error: type[Exception]) -> None:
    work = Work(bad=bad, error=error)
    with pytest.raises(error, match="a stretch"):
        cpu.in_parts(work, 4, 4)
    assert not work.active


def test_threads_that_are_busy_with_others_keep_nothing_of_a_call() -> None:
    go = threading.Event()
    pool = cpu._executor(cpu.threads() - 1)
    blocked = [pool.submit(go.wait, 30) for _ in range(cpu.threads() - 1)]
    try:
        work = Work(0)
        gone = weakref.ref(work)
        cpu.in_parts(work, 4, 4)
        assert sum(end - begin for begin, end in work.done) == 4
        del work
        assert gone() is None
    finally:
        go.set()
        for one in blocked:
            one.result()


class SignalledError(Exception):
    """Raised by a signal handler."""


@pytest.mark.parametrize("after", [0.002, 0.015, 0.03])
def test_a_signal_while_threads_work(after: float) -> None:
    def handler(*_: Any) -> None:
        raise SignalledError

    work = Work(0.04)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        with pytest.raises(SignalledError):
            cpu.in_parts(work, 4, 4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not work.active
    done = list(work.done)
    time.sleep(0.15)
    assert work.done == done


def test_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = []

    def submit(self: ThreadPoolExecutor, work: Any, *args: Any) -> None:
        queued.append(lambda: work(*args))  # as the real one: it is in the queue when no thread can be started
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    src, dst = np.arange(SIZE, dtype=np.uint8), np.zeros(SIZE, np.uint8)
    ends = [[a.ctypes.data + k for k in range(0, SIZE, 4096)] for a in (dst, src)]
    kvraw.memcpy_batch(*ends, [4096] * len(ends[0]))
    assert (src == dst).all()
    dst[:] = 0
    for late in queued:
        late()
    assert queued
    assert not dst.any()


_NO_THREADS = """
import os, resource, threading
os.environ["KVRAW_CPU_THREADS"] = "4"
import numpy as np, kvraw
from kvraw import codec
kvraw.warm_up()
rng = np.random.default_rng(0)
chunk = rng.standard_normal((4, 64, 1024)).astype(np.float32)
again = codec.decompress(codec.compress(chunk[:1, :1]))  # compiled now
src, dst = rng.integers(0, 256, {size}, np.uint8), np.zeros({size}, np.uint8)
ends = [[a.ctypes.data + k for k in range(0, {size}, 4096)] for a in (dst, src)]
with open("/proc/self/statm") as file:
    mapped = int(file.read().split()[0]) * resource.getpagesize()
threading.stack_size(1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (mapped + (512 << 20), -1))
try:
    threading.Thread(target=print).start()
except RuntimeError as error:
    print(error)
kvraw.memcpy_batch(*ends, [4096] * len(ends[0]))
assert (src == dst).all()
assert abs(codec.decompress(codec.compress(chunk)) - chunk).max() < 0.5
assert threading.active_count() == 1
"""


def test_where_the_system_has_no_thread() -> None:
    code = _NO_THREADS.format(size=SIZE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "can't start new thread\n"


@pytest.mark.parametrize("begun", [True, False])
def test_a_thread_that_ends_in_the_midst_of_its_part(monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    """As where memory is short, and not even its end can be noted: an error, and nobody waits."""
    real, lost = cpu._Crew.help_out, threading.Event()

    def help_out(crew: cpu._Crew, me: int) -> None:
        if lost.is_set():
            return real(crew, me)
        lost.set()
        crew._busy.add(me)
        if begun:
            assert crew._next() is not None
        raise MemoryError

    def work(begin: int, end: int) -> None:
        if end > begin:
            lost.wait(5)

    monkeypatch.setattr(cpu._Crew, "help_out", help_out)
    start = time.monotonic()
    if begun:
        with pytest.raises(MemoryError, match="ended before its part was done"):
            cpu.in_parts(work, 4, 4)
    else:
        cpu.in_parts(work, 4, 4)
    assert time.monotonic() - start < 4


_AT_EXIT = """
import atexit, os
import numpy as np
os.environ["KVRAW_CPU_THREADS"] = "4"
def last():
    kvraw.memcpy_batch(*ends, [4096] * len(ends[0]))
    print("equal" if (src == dst).all() else "apart")
import kvraw
src, dst = np.arange({size}, dtype=np.uint8), np.zeros({size}, np.uint8)
ends = [[a.ctypes.data + k for k in range(0, {size}, 4096)] for a in (dst, src)]
if {warm}:
    kvraw.memcpy_batch(*ends, [4096] * len(ends[0]))
    dst[:] = 0
atexit.register(last)
"""


@pytest.mark.parametrize("warm", [True, False])
def test_at_exit(warm: bool) -> None:
    code = _AT_EXIT.format(size=SIZE, warm=warm)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout == "equal\n", found.stderr


class Slow:
    """Holds the CPU engine's copy up until it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        copy = cpu.CpuPlan.copy

        def held(plan: cpu.CpuPlan, *args: Any) -> None:
            self.begun.set()
            assert self.go.wait(30)
            copy(plan, *args)

        monkeypatch.setattr(cpu.CpuPlan, "copy", held)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_chunks_are_not_handed_out_while_another_thread_copies(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    cache = kvraw.PagedCache.from_tensors([np.ones((2, 8, 4, 2, 16), np.int16)] * 1, axes="PBTHD")
    nbytes, slow = cache.chunk_bytes(8), Slow(monkeypatch)
    pool = kvraw.HostPool(8192, pin=False)
    (chunk,) = pool.chunks(1, nbytes)
    address = chunk.address
    thread = threading.Thread(target=lambda: getattr(kvraw, direction)(cache, [chunk], [1, 2]))
    thread.start()
    assert slow.begun.wait(30)
    pool.free([chunk])
    (other,) = pool.chunks(1, nbytes)
    assert other.address != address
    assert pool.info()["waiting"] == 4096
    with pytest.raises(kvraw.HostMemoryError, match="4096 bytes were freed but 1 transfers may still use them"):
        pool.chunks(1, nbytes)
    with pytest.raises(kvraw.TransferTimeoutError, match="a transfer of thread"):
        pool.close(timeout=0.01)
    slow.go.set()
    thread.join()
    pool.close()
    assert pool.info()["closed"]


def test_a_failed_copy_frees_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvraw.PagedCache.from_tensors([np.ones((2, 8, 4, 2, 16), np.int16)], axes="PBTHD")

    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(cpu.CpuPlan, "copy", fails)
    with kvraw.HostPool(4096, pin=False) as pool:
        (chunk,) = pool.chunks(1, cache.chunk_bytes(8))
        with pytest.raises(MemoryError):
            kvraw.store(cache, [chunk], [1, 2])
        pool.free([chunk])
        pool.chunks(1, 4096)


def test_a_forked_child_closes_what_a_thread_of_its_parent_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvraw.PagedCache.from_tensors([np.ones((2, 8, 4, 2, 16), np.int16)], axes="PBTHD")
    slow = Slow(monkeypatch)
    with kvraw.HostPool(8192, pin=False) as pool:
        (chunk,) = pool.chunks(1, cache.chunk_bytes(8))
        thread = threading.Thread(target=lambda: kvraw.store(cache, [chunk], [1, 2]))
        thread.start()
        assert slow.begun.wait(30)
        child = os.fork()
        if not child:
            try:
                pool.close(timeout=1)
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        slow.go.set()
        thread.join()
