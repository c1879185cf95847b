"""The queue of a device's operations, and what pools refer to in it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import kvraw
from kvraw.copying.device_state import device_state
from kvraw.runtime import driver as driver_module
from kvraw.runtime.completion import Completion, CompletionQueue
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.host.usage import HostWork
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.backends import device_ids
from tests.helpers.world import World


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    made = FakeDriver()
    before = driver_module.install(made)  # type: ignore[arg-type]
    yield made
    driver_module.install(before)


def test_errors_are_not_logged_while_a_pool_is_locked(fake: FakeDriver) -> None:
    """Whoever logs holds a lock of his own, in which another thread may use the pool."""
    world, locked = World(0), list[bool]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            locked.append(world.pool._lock._is_owned() or queue.lock._is_owned())

    handler, log = Handler(), logging.getLogger("kvraw")
    with DeviceScope(0):
        queue = device_state(0).completions
    log.addHandler(handler)
    try:
        kvraw.store(world.cache, world.chunks, device_ids((0, 10**6), 0, world.stream), stream=world.stream)
        world.stream.synchronize()
        assert world.pool.info()["in_flight"] == 0
        assert not locked
        kvraw.store(world.cache, world.chunks, [0], stream=world.stream).wait()
        assert locked == [False]
    finally:
        log.removeHandler(handler)
        world.close()


def test_the_default_stream_of_another_thread_holds_up_nobody(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One handle (2) is another stream in each thread."""
    stuck, real = set[int](), FakeDriver.event_done
    monkeypatch.setattr(FakeDriver, "event_done", lambda self, e: e not in stuck and real(self, e))
    with DeviceScope(0), kvraw.Stream(0) as stream:
        queue, begun = CompletionQueue(), list[Completion]()

        def commit() -> None:
            with DeviceScope(0):
                operation = queue.begin(2)
                operation.recorded = True
                assert operation.event is not None
                fake.event_record(operation.event, stream.handle)
                begun.append(operation.commit(None))

        thread = threading.Thread(target=commit)
        thread.start()
        thread.join()
        assert begun[0]._event is not None
        stuck.add(begun[0]._event)
        commit()
        stream.synchronize()
        queue.poll()
        assert [one.finished for one in begun] == [False, True]
        assert len(queue) == 1
        stuck.clear()
        queue.drain()
        assert not len(queue)


def test_what_is_behind_an_operation_in_a_stream_is_not_asked_about(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(FakeDriver, "event_done", lambda self, e: bool(asked.append(e)))
    with DeviceScope(0), kvraw.Stream(0) as one, kvraw.Stream(0) as other:
        queue = CompletionQueue()
        for stream in (one, one, one, other):
            queue.begin(stream.handle).commit(None)
        queue.poll()
        assert len(asked) == len(set(asked)) == 3  # newest and oldest of one, oldest of the other
        monkeypatch.undo()
        queue.drain()


def test_events_that_threads_record_in_another_order_than_they_commit(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads enqueue on one stream: the newest of the queue is not the last that the stream gets to."""
    stuck, real, record = set[int](), FakeDriver.event_done, FakeDriver.event_record
    monkeypatch.setattr(FakeDriver, "event_done", lambda self, e: e not in stuck and real(self, e))
    with DeviceScope(0), kvraw.Stream(0) as stream:
        queue = CompletionQueue()
        ahead = [queue.begin(stream.handle).commit(None) for _ in range(2)]
        one, other = queue.begin(stream.handle), queue.begin(stream.handle)

        def meanwhile(self: FakeDriver, event: int, on: int) -> None:
            record(self, event, on)
            if event == one.event:  # here the other thread goes on
                assert other.event is not None
                stuck.add(other.event)
                other.commit("what it uses")

        monkeypatch.setattr(FakeDriver, "event_record", meanwhile)
        one.commit(None)
        stream.synchronize()
        queue.poll()
        assert not other.finished  # the stream has not got to it
        assert all(before.finished for before in ahead)
        stuck.clear()
        queue.poll()
        assert one.finished
        assert other.finished
        assert not len(queue)


def test_a_pool_keeps_few_of_the_operations_that_are_over(fake: FakeDriver) -> None:
    world = World(0)
    for k in range(300):
        kvraw.store(world.cache, world.chunks, np.array([k % 8]), stream=world.stream).wait()
    assert len(world.pool._uses) <= 65
    assert world.pool.info()["in_flight"] == 0
    world.close()


def test_work_of_a_thread_is_over_with_its_frame() -> None:
    with kvraw.HostPool(1 << 16, pin=False) as pool:
        work = HostWork()
        pool.mark_used(work.use)
        with pytest.raises(kvraw.TransferTimeoutError, match="by a transfer of thread MainThread"):
            pool.close(timeout=0)
        pool.mark_used(HostWork().use, within=work.use)  # a part of what `close` waits for
        with pytest.raises(kvraw.ClosedError):
            pool.mark_used(work.use)
        del work
        pool.close(timeout=0)
