"""What is used lives as long as it is used: graphs, failures half-way, captures elsewhere, the exit of the process."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw import codec
from kvraw.adapters import tensors
from kvraw.adapters.lmcache import _memory
from kvraw.codec.streams import dense
from kvraw.copying import kernel_args as ka
from kvraw.copying.device_state import device_state, drain
from kvraw.errors import ClosedError, DriverError, TransferTimeoutError
from kvraw.layouts.geometry import Geometry
from kvraw.runtime import driver as driver_module
from kvraw.runtime.completion import CompletionQueue
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.stream_records import Recorder
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.backends import device_ids
from tests.helpers.world import World

MANY = Geometry(layers=2, blocks=600, block_size=1, heads=1, head_size=8, element_size=2)
FULL, UNSUPPORTED = "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"


@pytest.mark.parametrize("seed", range(4))
def test_layers_are_loaded_by_ids_that_the_caller_let_go_of(seed: int) -> None:
    fake = FakeDriver(seed=seed)
    before = driver_module.install(fake)  # type: ignore[arg-type]
    try:
        w = World(0)
        pool = kvraw.HostKVPool.like(w.cache, tokens=32, layout="page_first")
        for plane in (0, 1):
            pool.numpy(plane)[:] = 7
        ids = device_ids(range(32), 0, w.stream)
        gone = weakref.ref(ids)
        load = pool.load_layers(w.cache, pool.alloc(32), ids, stream=w.stream)
        del ids
        assert gone() is not None
        load.wait()
        drain()
        del load
        gc.collect()
        device_state(0).completions.release_refs()
        assert gone() is None
        assert (w.now()[:, :, :8] == 7).all()
        pool.close()
        w.close()
    finally:
        driver_module.install(before)


def test_a_graph_keeps_what_it_reads_though_nobody_keeps_the_transfer(fake: FakeDriver) -> None:
    w = World(0, MANY, chunks=40)
    kvraw.load(w.cache, w.chunks, np.arange(500), stream=w.stream, engine="kernel").wait()
    kept = len(device_state(0).completions.captured)
    fake.capture(w.stream.handle, True)
    kvraw.load(w.cache, w.chunks, np.arange(500), stream=w.stream, engine="kernel")
    plan: Any = next(p for p in w.cache.plans.values())
    at = int(plan._gpu.kernel._long[ka.INDEX[1]])
    fake.capture(w.stream.handle, False)
    w.stream.synchronize()
    gc.collect()
    for _ in range(40):
        kvraw.load(w.cache, w.chunks, np.arange(500)[::-1] + 99, stream=w.stream, engine="kernel").wait()
    there = np.ctypeslib.as_array((ctypes.c_int64 * 500).from_address(at))
    np.testing.assert_array_equal(there, np.arange(500))
    assert len(device_state(0).completions.captured) == kept + 1
    w.close()


def test_calls_on_other_streams_do_not_end_a_capture(fake: FakeDriver) -> None:
    w = World(0)
    with kvraw.Stream(0) as captured:
        fake.capture(captured.handle, True)
        for k in range(40):
            done = kvraw.store(w.cache, w.chunks, [k % 40], stream=w.stream)
            assert done.done() in (True, False)
        w.pool.free(w.pool.chunks(1, 4096))
        done.wait()
        drain()
        fake.capture(captured.handle, False)
    w.close()  # the fixture looks for what would have ended the capture


@pytest.mark.parametrize("what", ["decode", "decompress"])
def test_a_kernel_that_cannot_be_launched_behind_its_copies(fake: FakeDriver, what: str) -> None:
    rng, stream = np.random.default_rng(0), kvraw.Stream(0)
    values = rng.standard_normal((2, 40, 32)).astype(np.float32)
    symbols = rng.integers(0, 16, (2, 40, 32), dtype=np.uint8)
    encoded, packed = codec.encode(symbols, 16), codec.compress(values, 32)
    with kvraw.DeviceBuffer(values.nbytes, 0) as memory:
        if what == "decode":
            out = dense(memory.address, symbols.shape, 1, 0, None)
            run: Callable[[], Any] = lambda: codec.decode(encoded, out, stream=stream)  # noqa: E731
        else:
            out = dense(memory.address, values.shape, 4, 0, None)
            run = lambda: codec.decompress(packed, out, dtype="float32", stream=stream)  # noqa: E731
        run().wait()
        fake.fail("launch", 1 if what == "decode" else 2, FULL)
        with pytest.raises(DriverError, match="launch failed"):
            run()
        free = device_state(0).idle["arena"]
        assert not free or not fake.live()["pending"]
        run().wait()
    stream.close()


def test_memory_that_a_lost_operation_may_use_is_not_handed_out(fake: FakeDriver) -> None:
    w = World(0)
    kvraw.store(w.cache, w.chunks, np.arange(24), stream=w.stream, engine="kernel").wait()
    fake.fail("event_record", 1, FULL)
    fake.fail("stream_synchronize", 1, UNSUPPORTED)
    with pytest.raises(DriverError, match="event_record failed"):
        kvraw.store(w.cache, w.chunks, np.arange(24), stream=w.stream, engine="kernel")
    address = w.chunks[0].address
    w.pool.free([w.chunks[0]])
    (other,) = w.pool.chunks(1, w.chunks[1].nbytes)
    assert other.address != address
    with pytest.raises(TransferTimeoutError, match="not known to be over"):
        w.pool.close(timeout=0.01)
    w.stream.synchronize()


def test_the_books_are_looked_through_while_others_enqueue(fake: FakeDriver) -> None:
    completions = CompletionQueue()
    with DeviceScope(0), kvraw.Stream(0) as stream:
        begun = [completions.begin(stream.handle) for _ in range(3)]

        class Beside:
            """Stands on the books, and has something committed in the midst of each look at them."""

            @property
            def _pending(self) -> bool:
                if begun:
                    begun.pop().commit(None)
                return True

        beside: Any = Beside()
        completions.streams[0] = deque([beside])
        begun.pop().commit(None)
        completions.drain()
        assert not begun
        assert list(completions.streams[0]) == [beside]


def test_pinned_memory_is_given_back_behind_copies_by_address(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = World(0)
    handle = w.stream.handle
    monkeypatch.setattr(tensors, "_raw_stream", lambda device: handle)
    with DeviceScope(0):
        address = ops.alloc_pinned_ptr(1 << 16)
        ops.lmcache_memcpy_async(address, w.memory.address, 4096, ops.D2H, 0, 4096)
        assert fake.live()["pending"]
        ops.free_pinned_ptr(address)
        assert not fake.live()["pending"]
        address = ops.alloc_pinned_ptr(1 << 16)
        ops.lmcache_memcpy_async(address, w.memory.address, 4096, ops.D2H, 0, 4096)
        fake.fail("event_synchronize", 1, UNSUPPORTED)
        with pytest.raises(DriverError, match="event_synchronize failed"):
            ops.free_pinned_ptr(address)
        gc.collect()
        assert address in _memory._live
        ops.free_pinned_ptr(address)
        assert address not in _memory._live
    w.close()


@pytest.mark.parametrize("name", ["event_done", "event_milliseconds"])
def test_a_record_outlives_a_failed_poll(fake: FakeDriver, name: str) -> None:
    recorder = Recorder()
    with kvraw.Stream(0) as one, kvraw.Stream(0) as two:
        recorder.record(one.handle, ("first",))
        recorder.record(two.handle, ("second",))
        one.synchronize()
        two.synchronize()
        fake.fail(name, 2, UNSUPPORTED)
        with pytest.raises(DriverError):
            recorder.drain()
        assert sorted(r.value[0] for r in recorder.drain()) == ["first", "second"]


def test_a_buffer_that_is_closed_while_it_is_to_be_pinned(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = kvraw.HostPool(1 << 21, pin=False)
    checked, go, errors = threading.Event(), threading.Event(), []
    check = pool.require_open

    def slow() -> None:
        check()
        if threading.current_thread() is thread and not checked.is_set():
            checked.set()
            go.wait(30)

    def pin() -> None:
        try:
            pool.pin(0)
        except ClosedError as error:
            errors.append(error)

    monkeypatch.setattr(pool, "require_open", slow)
    thread = threading.Thread(target=pin)
    thread.start()
    assert checked.wait(30)
    pool.close()
    go.set()
    thread.join()
    assert errors
    assert not pool.pinned
    assert not fake.live()["blocks"]


def test_a_forked_child_uses_host_memory_by_address(fake: FakeDriver) -> None:
    w = World(0)
    kvraw.store(w.cache, w.chunks, [1], stream=w.stream).wait()
    child = os.fork()
    if not child:
        try:
            src, dst = np.arange(4096, dtype=np.uint8), np.zeros(4096, np.uint8)
            kvraw.memcpy_batch([dst.ctypes.data], [src.ctypes.data], [4096])
            layers = [np.zeros((2, 4, 4, 2, 16), np.int16) for _ in range(2)]
            geometry = Geometry(layers=2, blocks=4, block_size=4, heads=2, head_size=16, element_size=2)
            cache = kvraw.PagedCache.from_pointers([t.ctypes.data for t in layers], 1, geometry)
            chunk = np.ones(cache.chunk_bytes(8), np.uint8)
            kvraw.load(cache, [int(chunk.ctypes.data)], [0, 1], chunk_tokens=8)
            os._exit(0 if (src == dst).all() and (layers[1][:, :2] == 257).all() else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    w.close()


def test_a_cache_copies_the_addresses_that_it_is_given(fake: FakeDriver) -> None:
    w = World(0)
    given = w.cache.bases.copy()
    cache = kvraw.PagedCache.from_pointers(given, 1, w.geometry, device=0)
    given[:] = 1
    np.testing.assert_array_equal(cache.bases, w.cache.bases)
    with pytest.raises(ValueError, match="read-only"):
        cache.bases[0] = 1
    w.close()


@pytest.mark.parametrize("engine", ["staged", "kernel", "copy", "cpu", "reference"])
def test_an_engine_that_is_asked_of_every_plan(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setenv("KVRAW_ENGINE", engine)
    w = World(0)
    kvraw.store(w.cache, w.chunks, [3, 1], stream=w.stream).wait()
    np.testing.assert_array_equal(w.chunk(0)[0, 1, 0], w.paged[1, 0, 3])
    layers = [np.ones((2, 40, 4, 2, 16), np.int16) for _ in range(3)]
    cache = kvraw.PagedCache.from_tensors(layers, axes="PBTHD")
    kvraw.store(cache, w.chunks, [3, 1]).wait()
    assert (w.chunk(0)[:, :, :2].view(np.int16) == 1).all()
    for one in (w.cache, cache):
        with kvraw.HostKVPool.like(one, tokens=32, layout="page_first") as pool:
            slots = pool.alloc(8)
            pool.backup(one, np.arange(8), slots, stream=w.stream).wait()
    w.close()


def test_a_ring_that_cannot_be_had_leaves_no_events(fake: FakeDriver) -> None:
    w = World(0)
    with DeviceScope(0):
        state = device_state(0)
        for name, nth in (("mem_alloc", 2), ("event_create", 1), ("event_create", 4)):
            gc.collect()
            before = fake.live()
            fake.fail(name, nth, FULL)
            with pytest.raises(kvraw.KvrawError):
                state.arena.ring("store")
            gc.collect()
            after = fake.live()
            assert (after["events"], after["blocks"]) == (before["events"], before["blocks"])
    w.close()


_AT_EXIT = """
import atexit
atexit.register(lambda: last())  # behind all that comes later: those run first
import numpy as np
import kvraw
from kvraw.runtime import driver
from tests.device.test_lifetimes import MANY
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.backends import device_ids
from tests.helpers.world import World
driver.install(FakeDriver())
w = World(0, MANY, chunks=40)
ids = device_ids((1, 2), 0, w.stream) if "{ids}" == "device" else np.arange(500)
def last():
    kvraw.store(w.cache, w.chunks, ids, stream=w.stream, engine="{engine}").wait()
    first = 1 if "{ids}" == "device" else 0
    print("equal" if (w.chunk(0)[:, :, 0] == w.paged[:, :, first].swapaxes(0, 1)).all() else "apart")
for owner in (w.stream, w.memory, *([ids.memory] if "{ids}" == "device" else [])):
    owner._finalizer.atexit = False
kvraw.store(w.cache, w.chunks, ids, stream=w.stream, engine="{engine}").wait()
"""


@pytest.mark.parametrize(("ids", "engine"), [("device", "kernel"), ("host", "kernel"), ("host", "staged")])
def test_transfers_at_exit(ids: str, engine: str) -> None:
    code = _AT_EXIT.format(ids=ids, engine=engine)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout == "equal\n", found.stderr


def test_one_question_for_all_operations_of_a_stream(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    event_done = fake.event_done
    monkeypatch.setattr(fake, "event_done", lambda event: (asked.append(event), event_done(event))[1])
    queue, over = CompletionQueue(), list[int]()
    with kvraw.Stream(0) as stream, DeviceScope(0):
        for k in range(10):
            operation = queue.begin(stream.handle)
            operation.on_done(lambda k=k: over.append(k))
            operation.enqueued.append(stream.handle)
            operation.commit(None)
        stream.synchronize()
        asked.clear()
        queue.reap()
        assert over == list(range(10))
        assert not len(queue)
        assert len(asked) == 1
