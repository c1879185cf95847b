"""What a device shows, on the emulator and on a GPU: ids that live there, streams, placement, lifetimes."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import kvraw
from kvraw.layouts.geometry import Geometry
from kvraw.runtime.context import DeviceScope, current_device
from kvraw.runtime.driver import driver
from tests.helpers.backends import device_ids
from tests.helpers.world import TOKENS, G, World


@pytest.fixture
def world(device: int) -> Iterator[World]:
    w = World(device)
    yield w
    w.close()


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("bad", [40, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("verb", ["store", "load"])
def test_a_bad_id_on_the_device_is_left_out_and_reported(world: World, verb: str, bad: int, dtype: str) -> None:
    ids = [7, bad, 0, 39, 21]
    before, chunks_before = world.now(), [c.numpy().copy() for c in world.chunks]
    on_device = device_ids(tuple(ids), world.device, world.stream, dtype)
    transfer = getattr(kvraw, verb)(world.cache, world.chunks, on_device, stream=world.stream)
    for _ in range(2):
        with pytest.raises(kvraw.BoundsError, match=rf"block_ids\[1\] is {bad}, must be in \[0, 40\)"):
            transfer.wait()
    assert transfer.done()
    want = before.copy()
    for at, block in enumerate(ids):
        chunk, inner = divmod(at, TOKENS // 4)
        rows = chunks_before[chunk].reshape(world.chunk(0).shape)[:, :, inner]
        if verb == "load" and block != bad:
            want[:, :, block] = rows.transpose(1, 0, 2, 3, 4)
        if verb == "store":
            old = rows if block == bad else before[:, :, block].transpose(1, 0, 2, 3, 4)
            np.testing.assert_array_equal(world.chunk(chunk)[:, :, inner], old)
    np.testing.assert_array_equal(world.now(), want)


def test_an_error_nobody_waits_for_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    ids = device_ids((99,), world.device, world.stream)
    kvraw.store(world.cache, world.chunks, ids, stream=world.stream)
    world.stream.synchronize()
    with caplog.at_level(logging.ERROR, "kvraw"):
        for _ in range(20):
            kvraw.store(world.cache, world.chunks, [1], stream=world.stream).wait()
    assert any("block_ids[0] is 99" in r.getMessage() for r in caplog.records)


def test_a_bad_id_on_the_host_moves_nothing(world: World) -> None:
    before = world.now()
    with pytest.raises(kvraw.BoundsError, match=r"block_ids\[1\] is 40"):
        kvraw.load(world.cache, world.chunks, [1, 40], stream=world.stream)
    np.testing.assert_array_equal(world.now(), before)


def test_what_skip_leaves_out_is_no_duplicate(world: World) -> None:
    """Ids and chunks ahead of the first to move do not count: not as duplicates, and not as out of bounds."""
    per_chunk = TOKENS // 4
    before = world.now()
    ids = [3, 3, 99, -5, 3, 8, 8]
    options = {"stream": world.stream, "skip_blocks": 5}
    kvraw.load(world.cache, world.chunks, ids[:6], **options).wait()
    want = before.copy()
    want[:, :, 8] = world.chunk(1)[:, :, 1].transpose(1, 0, 2, 3, 4)
    np.testing.assert_array_equal(world.now(), want)
    kvraw.load(world.cache, world.chunks, ids[:5], stream=world.stream, skip_blocks=4).wait()  # 3 stands ahead as well
    want[:, :, 3] = world.chunk(1)[:, :, 0].transpose(1, 0, 2, 3, 4)
    np.testing.assert_array_equal(world.now(), want)
    with pytest.raises(kvraw.BoundsError, match="8 more than once"):
        kvraw.load(world.cache, world.chunks, ids, **options)
    np.testing.assert_array_equal(world.now(), want)
    one, two = world.chunks[:2]
    kvraw.store(world.cache, [one, one, two], range(3 * per_chunk), stream=world.stream, skip_blocks=per_chunk).wait()
    np.testing.assert_array_equal(world.chunk(0), want[:, :, per_chunk : 2 * per_chunk].transpose(1, 0, 2, 3, 4, 5))
    with pytest.raises(kvraw.BoundsError, match=r"chunks\[1\] and chunks\[0\] both begin"):
        kvraw.store(world.cache, [one, one], range(2 * per_chunk), stream=world.stream, skip_blocks=per_chunk - 1)


@pytest.mark.parametrize("engine", ["kernel", "copy", "staged", None])
def test_slots_left_out_are_no_duplicates(world: World, engine: str | None) -> None:
    before = world.now()
    slots = np.array([-1, 5, -1, 9, -7, -7, -1, 2])
    kvraw.load_slots(world.cache, world.chunks, slots, stream=world.stream, engine=engine).wait()
    want = before.reshape(*before.shape[:2], -1, *before.shape[4:]).copy()
    rows = world.chunk(0).reshape(2, G.layers, TOKENS, *before.shape[4:])
    for at, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[:, :, slot] = rows[:, :, at].transpose(1, 0, 2, 3)
    np.testing.assert_array_equal(world.now(), want.reshape(before.shape))
    with pytest.raises(kvraw.BoundsError, match="slots has 5 more than once"):
        kvraw.load_slots(world.cache, world.chunks, [-1, 5, -1, 5], stream=world.stream, engine=engine)


def test_pageable_chunks_are_refused(world: World) -> None:
    chunk = np.zeros(world.cache.chunk_bytes(TOKENS), np.uint8)
    with pytest.raises(kvraw.PlacementError, match=r"chunks\[0\] at 0x\w+ is pageable host memory"):
        kvraw.store(world.cache, [chunk], [1], stream=world.stream)
    assert not chunk.any()


def test_a_registration_makes_them_usable(world: World) -> None:
    array = np.zeros(world.cache.chunk_bytes(TOKENS) + 8192, np.uint8)
    start = -int(array.ctypes.data) % 4096
    chunk = array[start : start + world.cache.chunk_bytes(TOKENS)]
    with kvraw.Registration(int(chunk.ctypes.data), chunk.nbytes, world.device):
        with pytest.raises(kvraw.BoundsError, match="overlaps the registration"):
            kvraw.Registration(int(chunk.ctypes.data), 16, world.device)
        kvraw.store(world.cache, [chunk], [5, 6], stream=world.stream).wait()
    got = chunk.reshape(world.chunk(0).shape)[:, :, :2]
    np.testing.assert_array_equal(got, world.paged[:, :, 5:7].transpose(1, 0, 2, 3, 4, 5))
    with pytest.raises(kvraw.PlacementError, match="pageable"):
        kvraw.store(world.cache, [chunk], [5], stream=world.stream)


def test_a_registration_in_steps_is_one_range(world: World) -> None:
    array = np.zeros(1 << 20, np.uint8)
    start = -int(array.ctypes.data) % 4096
    size = world.cache.chunk_bytes(TOKENS)
    with kvraw.Registration(int(array.ctypes.data) + start, 64 * 4096, world.device, step=4096):
        chunk = array[start + 2048 : start + 2048 + size]
        kvraw.store(world.cache, [chunk], [5], stream=world.stream).wait()
        np.testing.assert_array_equal(
            chunk.reshape(world.chunk(0).shape)[:, :, 0], world.paged[:, :, 5].transpose(1, 0, 2, 3, 4)
        )


def test_a_device_pointer_given_to_the_cpu_engine(world: World) -> None:
    there = f"memory of device {world.device}"
    with pytest.raises(kvraw.PlacementError, match=f"{there}; the CPU engine takes host memory"):
        kvraw.PagedCache.from_pointers(world.cache.bases, 1, G)
    paged = np.zeros(world.shape, np.uint8)
    host = kvraw.PagedCache.from_pointers([int(p.ctypes.data) for p in paged], 1, G)
    with pytest.raises(kvraw.PlacementError, match=there):
        kvraw.store(host, [world.memory.address], [0], chunk_tokens=TOKENS)
    with pytest.raises(kvraw.PlacementError, match=there):
        kvraw.store(world.cache, world.chunks, [0], engine="cpu")
    with pytest.raises(kvraw.PlacementError, match=there):
        kvraw.memcpy_batch([int(paged.ctypes.data)], [world.memory.address], [8])


def test_a_stream_is_demanded(world: World) -> None:
    with pytest.raises(TypeError, match="stream is None"):
        kvraw.store(world.cache, world.chunks, [0])
    with pytest.raises(TypeError, match="stream is a str"):
        kvraw.store(world.cache, world.chunks, [0], stream="0")


def test_a_closed_pool_and_a_closed_stream(world: World) -> None:
    pool = kvraw.HostPool(1 << 20, device=world.device)
    chunks = pool.chunks(1, world.cache.chunk_bytes(TOKENS))
    pool.close()
    with pytest.raises(kvraw.ClosedError, match="the pool is closed"):
        kvraw.store(world.cache, chunks, [0], stream=world.stream)
    stream = kvraw.Stream(world.device)
    stream.close()
    with pytest.raises(kvraw.ClosedError, match="the stream is closed"):
        kvraw.store(world.cache, world.chunks, [0], stream=stream)


def test_a_pool_waits_for_what_uses_it(world: World) -> None:
    for _ in range(5):
        with kvraw.HostPool(8 << 20, device=world.device) as pool:
            chunks = pool.chunks(6, world.cache.chunk_bytes(TOKENS))
            for _ in range(12):
                kvraw.load(world.cache, chunks, np.arange(24), stream=world.stream)
    world.stream.synchronize()


def test_a_pool_is_pinned_at_first_use(world: World) -> None:
    with kvraw.HostPool(1 << 20, pin=False) as pool:
        chunks = pool.chunks(1, world.cache.chunk_bytes(TOKENS))
        assert not pool.pinned
        kvraw.store(world.cache, chunks, [3], stream=world.stream).wait()
        assert pool.info()["pinned"] is True


@pytest.mark.parametrize("count", [300, 449, 3000])
def test_many_ids_and_many_chunks(device: int, count: int) -> None:
    geometry = Geometry(layers=2, blocks=4096, block_size=4, heads=1, head_size=8, element_size=2)
    world = World(device, geometry, chunks=-(-count // 4))
    ids = np.random.default_rng(count).permutation(4096)[:count]
    kvraw.store(world.cache, world.chunks, ids, stream=world.stream)
    kvraw.store(world.cache, world.chunks[:2], ids[:8], stream=world.stream).wait()
    rows = np.concatenate([world.chunk(at) for at in range(len(world.chunks))], axis=2)[:, :, :count]
    np.testing.assert_array_equal(rows, world.paged[:, :, ids].transpose(1, 0, 2, 3, 4, 5))
    other = np.random.default_rng(0).permutation(4096)[:count]
    kvraw.load(world.cache, world.chunks, other, stream=world.stream).wait()
    want = world.paged.copy()
    want[:, :, other] = world.paged[:, :, ids]
    np.testing.assert_array_equal(world.now(), want)
    world.close()


def test_large_calls_in_a_row(device: int) -> None:
    """Tables that go through the device, several calls in flight: each has buffers of its own."""
    geometry = Geometry(layers=1, blocks=1024, block_size=4, heads=1, head_size=8, element_size=2)
    world = World(device, geometry, chunks=4 * 128)
    rng = np.random.default_rng(0)
    calls = [(rng.permutation(1024)[:512], at) for at in range(4)]
    for ids, at in calls:
        kvraw.store(world.cache, world.chunks[at * 128 : (at + 1) * 128], ids, stream=world.stream)
    world.stream.synchronize()
    for ids, at in calls:
        rows = np.concatenate([world.chunk(at * 128 + k) for k in range(128)], axis=2)
        np.testing.assert_array_equal(rows, world.paged[:, :, ids].transpose(1, 0, 2, 3, 4, 5))
    world.close()


def test_many_layers_spill_their_table(device: int) -> None:
    world = World(device, Geometry(layers=600, blocks=6, block_size=4, heads=1, head_size=8, element_size=2), chunks=1)
    for ids in ([4, 1], [2, 5, 0]):
        kvraw.store(world.cache, world.chunks, ids, stream=world.stream).wait()
        got = world.chunk(0)[:, :, : len(ids)]
        np.testing.assert_array_equal(got, world.paged[:, :, ids].transpose(1, 0, 2, 3, 4, 5))
    world.close()


def test_the_current_context_stays_as_it_was(world: World) -> None:
    seen: list[int | None] = []

    def work() -> None:
        seen.append(current_device())
        kvraw.store(world.cache, world.chunks, [0], stream=world.stream).wait()
        seen.append(current_device())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None, None]
    with DeviceScope(world.device):
        work()
    assert seen[2:] == [world.device, world.device]


def test_threads_may_share_a_plan(world: World) -> None:
    plan = kvraw.TransferPlan(world.cache, "store", chunk_tokens=TOKENS)
    errors: list[BaseException] = []

    def work(at: int) -> None:
        try:
            with kvraw.Stream(world.device) as stream:
                rng = np.random.default_rng(at)
                for _ in range(40):
                    ids = rng.permutation(40)[:4]
                    plan([world.chunks[at]], ids, stream=stream).wait()
                    want = world.paged[:, :, ids].transpose(1, 0, 2, 3, 4, 5)
                    np.testing.assert_array_equal(world.chunk(at), want)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors


def test_dropped_transfers_keep_what_they_use(world: World) -> None:
    want = world.paged.copy()
    rows = np.concatenate([world.chunk(k) for k in range(6)], axis=2)[:, :, :24].transpose(1, 0, 2, 3, 4, 5)
    with kvraw.Stream(world.device) as stream:
        for k in range(60):
            blocks = np.random.default_rng(k).permutation(40)[:24]
            want[:, :, blocks] = rows
            ids = device_ids(tuple(blocks), world.device, stream)
            kvraw.load(world.cache, world.chunks, ids, stream=stream)
            del ids
            if k % 20 == 0:
                gc.collect()
        stream.synchronize()
    np.testing.assert_array_equal(world.now(), want)


@pytest.mark.parametrize("legacy", [False, True])
def test_memcpy_batch(world: World, legacy: bool) -> None:
    order = np.random.default_rng(2).permutation(40)
    size = world.paged[0, 0, 0].nbytes
    src = np.uint64(world.memory.address) + order.astype(np.uint64) * np.uint64(size)
    target = world.pool.chunks(1, 40 * size)[0]
    dst = np.uint64(target.address) + np.arange(40, dtype=np.uint64) * np.uint64(size)
    stream = 0 if legacy else world.stream
    kvraw.memcpy_batch(dst, src, np.full(40, size), stream=stream, device=world.device).wait()
    with DeviceScope(world.device):
        driver().stream_synchronize(0)  # it waits for the copies, if another stream took them
    np.testing.assert_array_equal(target.numpy().reshape(40, -1), world.paged[0, 0, order].reshape(40, -1))


def test_memcpy_batch_is_cut_into_calls(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRAW_MAX_BATCH", "7")
    real, sizes = type(driver()).memcpy_batch_async, []

    def cut(self: object, dst: np.ndarray, src: np.ndarray, nbytes: np.ndarray, stream: int) -> None:
        sizes.append(len(nbytes))
        real(self, dst, src, nbytes, stream)

    monkeypatch.setattr(type(driver()), "memcpy_batch_async", cut)
    each = world.paged.nbytes // 80
    target = world.pool.chunks(1, each * 40)[0]
    order = np.random.default_rng(1).permutation(40).astype(np.uint64) * np.uint64(2)  # none ends where another begins
    to = np.uint64(target.address) + np.arange(40, dtype=np.uint64) * np.uint64(each)
    start = np.uint64(world.memory.address) + order * np.uint64(each)
    kvraw.memcpy_batch(to, start, [each] * 40, stream=world.stream, device=world.device).wait()
    want = world.paged.ravel().reshape(80, each)[order.astype(int)]
    np.testing.assert_array_equal(target.numpy().reshape(40, each), want)
    assert sizes == ([7, 7, 7, 7, 7, 5] if driver().batch_supported() else [])


def test_device_memory_that_says_it_is_read_only_is_a_source_only(world: World) -> None:
    class Held:
        def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
            data = {"data": (address, True), "shape": shape, "typestr": typestr, "version": 3}
            self.__cuda_array_interface__ = data

    size = world.cache.chunk_bytes(TOKENS)
    chunk = Held(world.memory.address, (size,), "|u1")
    with pytest.raises(kvraw.PlacementError, match=r"chunks\[1\] is read-only memory"):
        kvraw.store(world.cache, [world.chunks[0], chunk], [39], stream=world.stream)
    each = world.paged.nbytes // G.layers
    shape = (2, G.blocks, G.block_size, G.heads, G.head_size)
    tensors = [Held(world.memory.address + k * each, shape, "<i2") for k in range(G.layers)]
    cache = kvraw.PagedCache.from_tensors(tensors, axes="PBTHD")
    with pytest.raises(kvraw.PlacementError, match="cache holds a read-only tensor"):
        kvraw.load(cache, world.chunks, [39], stream=world.stream)
    np.testing.assert_array_equal(world.now(), world.paged)
    kvraw.store(cache, world.chunks, [39], stream=world.stream).wait()
    np.testing.assert_array_equal(world.chunk(0)[:, :, 0], world.paged[:, :, 39].transpose(1, 0, 2, 3, 4))


@pytest.mark.parametrize("engine", ["kernel", "staged"])
def test_a_transfer_under_way_keeps_the_tensors_of_a_cache_that_was_dropped(world: World, engine: str) -> None:
    class Held:
        """An owner that can be watched."""

    owner = Held()
    seen = weakref.ref(owner)
    cache = kvraw.PagedCache.from_pointers(world.cache.bases, 1, G, device=world.device, owner=owner)
    gc.collect()
    gc.disable()
    try:
        kvraw.store(cache, world.chunks, [1, 2], stream=world.stream, engine=engine)
        del cache, owner
        assert seen() is not None
        world.stream.synchronize()
        for _ in range(80):  # enough for the books to be looked through
            kvraw.store(world.cache, world.chunks, [1, 2], stream=world.stream, engine=engine).wait()
        assert seen() is None
    finally:
        gc.enable()
