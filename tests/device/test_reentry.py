"""Finalizers of what a transfer borrows come back into the books and the pool, and nothing under way is let go of."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

import kvraw
from kvraw.copying.device_state import device_state, drain
from kvraw.copying.kernel import KernelPlan
from kvraw.errors import ClosedError, DriverError
from kvraw.runtime.completion import Completion, CompletionQueue
from kvraw.runtime.context import DeviceScope
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.backends import device_ids
from tests.helpers.world import World


class Thing:
    """Something that an operation borrows."""


def operation(completions: CompletionQueue, stream: int, refs: object) -> Completion:
    begun = completions.begin(stream)
    begun.enqueued.append(stream)
    return begun.commit(refs)


def test_a_finalizer_that_settles_operations(fake: FakeDriver) -> None:
    with DeviceScope(0), kvraw.Stream(0) as stream, kvraw.Stream(0) as other, kvraw.DeviceBuffer(64, 0) as memory:
        completions = CompletionQueue()
        first, second = Thing(), Thing()
        weakref.finalize(first, completions.reap)
        kept = weakref.ref(second)
        done = operation(completions, stream.handle, first)
        del first
        fake.memset_async(memory.address, 1, 64, other.handle)
        running = operation(completions, other.handle, second)
        del second
        stream.synchronize()
        completions.reap()
        completions.release_refs()
        assert done.done()
        assert running._event is None or kept() is not None  # over, or still borrowed
        completions.drain()
        assert running.done()
        assert kept() is None
        assert not len(completions)


def test_a_pool_under_the_books_lock_and_the_books_under_the_pools(fake: FakeDriver) -> None:
    """Two threads, each with one of the two locks, whose finalizers want the other."""
    world = World(0)
    ended = threading.Event()

    def store() -> None:
        rng = np.random.default_rng(0)
        for _ in range(60):
            chunks = world.pool.chunks(1, world.cache.chunk_bytes(16))
            thing = Thing()
            weakref.finalize(thing, world.pool.free, chunks)
            with DeviceScope(0):
                operation(device_state(0).completions, world.stream.handle, (thing, chunks))
            kvraw.store(world.cache, world.chunks, rng.permutation(40)[:24], stream=world.stream)
            del thing, chunks

    def ask() -> None:
        while not ended.is_set():
            world.pool.info()

    asking = threading.Thread(target=ask, daemon=True)
    storing = threading.Thread(target=store, daemon=True)
    asking.start()
    storing.start()
    storing.join(60)
    assert not storing.is_alive(), "two threads wait for each other"
    ended.set()
    asking.join(60)
    with DeviceScope(0):
        device_state(0).completions.drain()
    world.close()


def test_a_pool_that_is_closed_before_it_is_borrowed(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0)
    pool = kvraw.HostPool(1 << 20, device=0)
    chunks = pool.chunks(1, world.cache.chunk_bytes(16))
    real = CompletionQueue.begin

    def begin(self: CompletionQueue, stream: int, *, captured: bool = False) -> object:
        monkeypatch.undo()
        pool.close()  # another thread, between the checks and the enqueueing
        return real(self, stream, captured=captured)

    monkeypatch.setattr(CompletionQueue, "begin", begin)
    with pytest.raises(ClosedError):
        kvraw.store(world.cache, chunks, [1, 2], stream=world.stream)
    world.close()


def test_no_room_for_staging_slots(fake: FakeDriver) -> None:
    world = World(0)
    plan = kvraw.TransferPlan(world.cache, "store", chunk_tokens=16, engine="staged")
    fake.fail("mem_alloc", 1, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        plan(world.chunks, np.arange(24), stream=world.stream)
    fake.fail("mem_alloc", 1, "CUDA_ERROR_OUT_OF_MEMORY")
    with DeviceScope(0), pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvraw.copying.chooser.best", lambda seconds, busy: max(seconds))  # "staged", of the names
        transfer = kvraw.TransferPlan(world.cache, "store", chunk_tokens=16)(
            world.chunks, np.arange(24), stream=world.stream
        )
    transfer.wait()
    assert transfer.engine == "kernel"
    assert "OUT_OF_MEMORY" in transfer.explain()
    world.close()


def test_a_finalizer_that_drains_while_an_error_is_read(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is neither lost nor taken for another, and the event is given back once."""
    world = World(0)
    bad = device_ids((0, 10**6), 0, world.stream)
    real, entered = KernelPlan.describe_fault, []

    def describe_fault(self: KernelPlan, where: int, value: int, origin: int) -> Exception:
        error = real(self, where, value, origin)
        if not entered:
            entered.append(None)
            drain()  # what a pool does that is collected here
        return error

    monkeypatch.setattr(KernelPlan, "describe_fault", describe_fault)
    transfer = kvraw.store(world.cache, world.chunks, bad, stream=world.stream)
    for _ in range(2):
        with pytest.raises(kvraw.BoundsError, match=r"block_ids\[1\] is 1000000"):
            transfer.wait()
    assert entered
    with DeviceScope(0):
        events = device_state(0).completions.events
    assert len(events) == len(set(events))
    assert None not in events
    for _ in range(20):
        kvraw.store(world.cache, world.chunks, [0], stream=world.stream).wait()
    world.close()


def test_a_replay_that_nobody_asks_about_is_not_the_next_ones(fake: FakeDriver) -> None:
    world = World(0)
    bad, good = device_ids((0, 10**6), 0, world.stream), device_ids((0, 1), 0, world.stream)
    fake.capture(world.stream.handle, True)
    transfer = kvraw.store(world.cache, world.chunks, bad, stream=world.stream)
    fake.capture(world.stream.handle, False)
    world.stream.synchronize()  # the emulator's capture runs at once: a replay
    del transfer
    gc.collect()
    kvraw.store(world.cache, world.chunks, good, stream=world.stream).wait()
    world.close()


def test_errors_that_nobody_waits_for_are_logged(fake: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    world = World(0)
    for settle in (drain, lambda: device_state(0).completions.reap()):
        caplog.clear()
        kvraw.store(world.cache, world.chunks, device_ids((0, 10**6), 0, world.stream), stream=world.stream)
        world.stream.synchronize()
        with DeviceScope(0):
            settle()
        assert [r.getMessage()[:23] for r in caplog.records] == ["block_ids[1] is 1000000"]
    world.close()
