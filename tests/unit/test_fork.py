"""Forked children: locks are free, tables whole, and what cannot be used says so."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvraw
from kvraw.adapters.lmcache import _recorders
from kvraw.copying import cpu
from kvraw.runtime import fork
from kvraw.runtime.stream_records import Recorder

ROOT = Path(__file__).parents[2]
FORKS = os.environ.get("KVRAW_TEST_FORKS", "120")  # 5000 for the long run


def in_child(work: Callable[[], object]) -> int:
    """The exit status of a child that does this: 0 where it is true, 1 where not, 3 a ForkError, -14 a hang."""
    pid = os.fork()
    if not pid:
        code = 2
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            code = 0 if work() else 1
        except kvraw.ForkError:
            code = 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forks_beside_threads_that_store_allocate_and_register() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.helpers.forks", FORKS], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{{0: {FORKS}}}" in found.stdout


class Holder:
    """Another thread that holds a lock."""

    def __init__(self, lock: threading.RLock) -> None:  # type: ignore[valid-type]
        self.lock, self.held, self.go = lock, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        with self.lock:  # type: ignore[attr-defined]
            self.held.set()
            self.go.wait(30)

    def __enter__(self) -> None:
        self.thread.start()
        assert self.held.wait(30)

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self.thread.join()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_another_thread_holds_is_free_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRAW_CPU_THREADS", "3")
    pool = kvraw.HostPool(1 << 16, pin=False)
    host = kvraw.HostKVPool(
        layout="page_first", tokens=64, page_size=16, layers=1, heads=1, head_size=8, element_size=1
    )
    recorder = Recorder()
    cpu.in_parts(lambda a, b: None, 3, 3)
    cases: list[tuple[object, Callable[[], object]]] = [
        (pool._lock, lambda: pool.free(pool.chunks(2, 4096)) is None),
        (host._lock, lambda: host.free(host.alloc(16)) is None),
        (host._lock, lambda: host.close(1) is None),
        (recorder._lock, lambda: recorder.drain() == []),
        (cpu._lock, lambda: cpu.in_parts(lambda a, b: None, 3, 3) is None),
    ]
    for lock, work in cases:
        with Holder(lock):  # type: ignore[arg-type]
            assert in_child(work) == 0
        assert work()  # and the parent goes on


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_lock_of_the_forking_thread_stays_its_own() -> None:
    lock = fork.lock()

    def work() -> bool:
        lock.release()
        return not lock._is_owned()

    with lock:
        assert in_child(work) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_waits_for_what_is_not_to_be_divided() -> None:
    begun, steps = threading.Event(), []

    def imports() -> None:
        with fork.undivided():
            begun.set()
            threading.Event().wait(0.2)
            steps.append(1)

    thread = threading.Thread(target=imports)
    thread.start()
    assert begun.wait(10)
    assert in_child(lambda: steps == [1]) == 0
    thread.join()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_in_the_midst_of_a_copy() -> None:
    """By a signal handler, say: the child's own copy says so, and does not wait for threads that it lacks."""
    parent, found = os.getpid(), []

    def work(begin: int, end: int) -> None:
        if begin == 0 < end and threading.current_thread() is threading.main_thread():
            pid = os.fork()
            if pid:
                found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            else:
                signal.alarm(10)
        elif end > begin:
            threading.Event().wait(0.3)

    try:
        cpu._run(work, [0, 1, 2, 3])
    except kvraw.ForkError:
        if os.getpid() != parent:
            os._exit(0)
        raise
    finally:
        if os.getpid() != parent:
            os._exit(1)
    assert found in ([0], [])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_records_of_the_parent_are_not_the_childs() -> None:
    _recorders.record_completion_on_stream(0, "kind", b"x")
    assert in_child(lambda: _recorders.drain_recorded_completions() == []) == 0
    assert _recorders.drain_recorded_completions() == [("kind", b"x")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("torn", ["arena", "pool", "pages"])
def test_a_child_of_a_change_that_was_under_way(torn: str) -> None:
    """As a fork by another thread finds it: what is not done is not there, what is done is whole."""
    pool = kvraw.HostPool(1 << 16, pin=False)
    host = kvraw.HostKVPool(
        layout="page_first", tokens=64, page_size=16, layers=1, heads=1, head_size=8, element_size=1
    )
    kept, freed = pool.chunks(2, 4096)
    if torn == "arena":
        pool._arena._begin()
        pool._arena._fill(4096)  # type: ignore[arg-type]
    elif torn == "pool":
        pool._begin()
        pool._freeing = freed, freed.address - pool.address, pool_wait(pool, freed)
        freed.kind = None
    else:
        host._book._torn = True
        host._book.taken[:2] = 7

    def whole() -> bool:
        used = 4096 if torn == "pool" else 8192
        info, slots = pool.info(), host.alloc(32)
        others = pool.chunks((pool.nbytes - used) // 4096, 4096)
        assert slots is not None
        assert host.alloc(32 if torn == "pages" else 48) is None
        return info["used"] == used and kept.address not in {c.address for c in others} and not kept.freed

    assert in_child(whole) == 0


def pool_wait(pool: kvraw.HostPool, chunk: kvraw.HostChunk) -> object:
    from kvraw.runtime.host.pool import _Wait

    return _Wait(pool._arena.grant_of(chunk.address - pool.address), ())


def test_forks_are_seen_to_in_one_place() -> None:
    """No lock but those of `fork`, or of what lives no longer than a call; no other hook."""
    allowed = {"kvraw.runtime.fork", "kvraw.runtime.host.populate"}
    for path in (ROOT / "kvraw").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and module not in allowed:
                assert node.attr not in ("RLock", "Lock", "Condition", "Semaphore", "register_at_fork"), module


def test_numpy_views_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    with kvraw.HostPool(1 << 16, pin=False) as pool:
        (chunk,) = pool.chunks(1, 4096)
        chunk.numpy()[:] = 3
        assert in_child(lambda: (np.asarray(chunk.numpy()) == 3).all()) == 0


def test_a_pool_in_shared_memory_is_handed_out_by_its_maker() -> None:
    with kvraw.HostPool(1 << 16, pin=False, options=kvraw.HostOptions(kind="shared")) as pool:
        (chunk,) = pool.chunks(1, 4096)
        chunk.numpy()[:] = 7

        def reads_and_writes() -> bool:
            right = bool((chunk.numpy() == 7).all())
            chunk.numpy()[:] = 8
            return right

        assert in_child(reads_and_writes) == 0
        assert (chunk.numpy() == 8).all()
        assert in_child(lambda: pool.chunks(1, 4096)) == 3
        assert in_child(lambda: [pool.free([chunk]), pool.chunks(1, 4096)]) == 3
        assert in_child(lambda: kvraw.HostPool.attach(str(pool.name), pin=False).nbytes == pool.nbytes) == 0
        assert len(pool.chunks(15, 4096)) == 15
    with kvraw.HostPool(1 << 16, pin=False) as own:  # a copy of the memory with the books
        assert in_child(lambda: pool_of_the_child(own)) == 0


def pool_of_the_child(pool: kvraw.HostPool) -> bool:
    return len(pool.chunks(16, 4096)) == 16
