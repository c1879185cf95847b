"""Every driver call of a store, a load, a batch and a pool's life fails once: a clear error, no leak, life goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw import codec
from kvraw.codec.streams import dense
from kvraw.errors import DriverError
from kvraw.layouts.geometry import Geometry
from kvraw.rope import rerotate_keys
from kvraw.runtime import driver as driver_module
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.backends import device_ids
from tests.helpers.world import World

RESULT = "CUDA_ERROR_OUT_OF_MEMORY"
# Asked where an answer is already known, or before anything.
QUERIES = {
    "version",
    "device_count",
    "device_name",
    "batch_supported",
    "context_current",
    "context_id",
    "pointer_in_pieces",
}
GIVING_BACK = {"host_unregister", "host_free", "mem_free", "stream_destroy", "event_destroy"}


@contextlib.contextmanager
def installed(fake: FakeDriver) -> Iterator[FakeDriver]:
    before = driver_module.install(fake)  # type: ignore[arg-type]
    try:
        yield fake
    finally:
        driver_module.install(before)


def small_world() -> World:
    return World(0, Geometry(layers=2, blocks=600, block_size=1, heads=1, head_size=8, element_size=2), chunks=40)


def store(w: World) -> None:
    ids = np.random.default_rng(0).permutation(600)[:20]
    kvraw.store(w.cache, w.chunks, ids, stream=w.stream).wait()
    rows = np.concatenate([w.chunk(at) for at in range(2)], axis=2)[:, :, :20]
    np.testing.assert_array_equal(rows, w.paged[:, :, ids].transpose(1, 0, 2, 3, 4, 5))


def store_large(w: World) -> None:
    ids = np.random.default_rng(1).permutation(600)[:590]
    kvraw.store(w.cache, w.chunks, ids, stream=w.stream).wait()
    rows = np.concatenate([w.chunk(at) for at in range(40)], axis=2)[:, :, :590]
    np.testing.assert_array_equal(rows, w.paged[:, :, ids].transpose(1, 0, 2, 3, 4, 5))


def load_device_ids(w: World) -> None:
    ids = (5, 590, 0)
    on_device = device_ids(ids, 0, w.stream)
    kvraw.load(w.cache, w.chunks, on_device, stream=w.stream).wait()
    on_device.memory.close()  # here, not by the collector: a finalizer's error reaches nobody
    want = w.chunk(0)[:, :, :3].transpose(1, 0, 2, 3, 4, 5)
    np.testing.assert_array_equal(w.now()[:, :, list(ids)], want)


def batch(w: World) -> None:
    n = w.paged.nbytes // 8
    target = w.pool.chunks(1, n * 4)[0]
    dst = np.uint64(target.address) + np.arange(4, dtype=np.uint64) * np.uint64(n)
    src = np.uint64(w.memory.address) + np.array([3, 0, 2, 1], np.uint64) * np.uint64(n)
    try:
        kvraw.memcpy_batch(dst, src, [n] * 4, stream=w.stream, device=0).wait()
        got = target.numpy().reshape(4, n)
        np.testing.assert_array_equal(got, w.paged.ravel()[: 4 * n].reshape(4, n)[[3, 0, 2, 1]])
    finally:
        target.free()


def pool_life(w: World) -> None:
    with kvraw.HostPool(1 << 16, device=0) as pool:
        assert pool.pinned
        (chunk,) = pool.chunks(1, 4096)
        chunk.numpy()[:] = 3


def registration(w: World) -> None:
    array = np.zeros(1 << 16, np.uint8)
    start = int(array.ctypes.data) + -int(array.ctypes.data) % 4096
    kvraw.Registration(start, 5 * 4096, 0, step=4096, owner=array).close()


def coded(w: World) -> tuple[np.ndarray, Any]:
    """Few symbols, for kernels take long here; they lie at the beginning of the world's device memory."""
    values = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    w.mirror.numpy()[:12] = values.ravel()
    w.copy(w.memory.address, w.mirror.address, 12)
    return values, dense(w.memory.address, values.shape, 1, 0, w.memory)


def encode(w: World) -> None:
    values, symbols = coded(w)
    encoded = codec.encode(symbols, 32, stream=w.stream)
    assert encoded.to_bytes() == codec.encode(values, 32).to_bytes()


def decode(w: World) -> None:
    values, symbols = coded(w)
    codec.decode(codec.encode(values[::-1].copy(), 32), symbols, stream=w.stream).wait()
    np.testing.assert_array_equal(w.now().view(np.uint8).ravel()[:12], values[::-1].ravel())


def numbers(w: World) -> tuple[np.ndarray, Any]:
    values = np.sin(np.arange(12, dtype=np.float32)).reshape(2, 3, 2)
    w.mirror.numpy()[:48] = values.view(np.uint8).ravel()
    w.copy(w.memory.address, w.mirror.address, 48)
    return values, dense(w.memory.address, values.shape, 4, 0, w.memory)


def compress(w: World) -> None:
    values, chunk = numbers(w)
    compressed = codec.compress(chunk, 32, dtype="float32", stream=w.stream)
    np.testing.assert_array_equal(codec.decompress(compressed), codec.decompress(codec.compress(values, 32)))


def decompress(w: World) -> None:
    values, chunk = numbers(w)
    compressed = codec.compress(values, 32)
    codec.decompress(compressed, chunk, dtype="float32", stream=w.stream).wait()
    w.copy(w.mirror.address, w.memory.address, 48)
    found = w.mirror.numpy()[:48].view(np.float32).reshape(values.shape)
    np.testing.assert_array_equal(found, codec.decompress(compressed))


def key_rotation(w: World) -> None:
    key, cache = dense(w.memory.address, (3, 2, 8), 4, 0, w), dense(w.memory.address + 4096, (5, 8), 4, 0, w)
    rerotate_keys(key, [0, 1, 2], [4, 4, 4], cache, dtype="float32", stream=w.stream).wait()


SCENARIOS = [store, store_large, load_device_ids, batch, pool_life, registration]
SCENARIOS += [encode, decode, compress, decompress, key_rotation]


def calls_of(scenario: Callable[[World], None]) -> list[tuple[str, int]]:
    """Every (method, n) that the scenario uses in a world that has not used it before."""
    with installed(FakeDriver()) as fake:
        world = small_world()
        before = fake.calls.copy()
        scenario(world)
        used = fake.calls - before
        world.close()
    return [(name, k) for name, n in sorted(used.items()) if name not in QUERIES for k in range(1, n + 1)]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda f: f.__name__)
def test_every_call_may_fail(scenario: Callable[[World], None]) -> None:
    tried = calls_of(scenario)
    assert len(tried) >= 5
    for name, nth in tried:
        with installed(FakeDriver()) as fake:
            world = small_world()
            live = fake.live()
            fake.fail(name, nth, RESULT)
            with pytest.raises(DriverError, match=f"{name} failed: {RESULT}"):
                scenario(world)
            world.stream.synchronize()
            after = fake.live()
            if name not in GIVING_BACK and not name.startswith("context"):
                # What stays is kept for later calls: events, a page of status words, two buffers for tables, and the
                # words of the pace.
                assert after["blocks"] - live["blocks"] <= 4, (name, nth, live, after)
                assert after["streams"] == live["streams"], (name, nth)
                assert {op.call for op in fake.pending()} <= {"memset_async"}, (
                    name,
                    nth,
                )  # of words that nobody waits for
            assert len(fake.violations) == 0
            scenario(world)
            kept = fake.live()
            scenario(world)
            # How many events a scenario has in use at once depends on how soon the streams are served.
            grown = {k: n for k, n in fake.live().items() if n > kept[k] and k != "events"}
            assert not grown, (name, nth, grown, kept)
            assert fake.live()["events"] <= 8, (name, nth)
            world.close()


@pytest.mark.parametrize("step", range(1, 6))
def test_a_failed_registration_is_rolled_back_whole(step: int) -> None:
    array = np.zeros(1 << 16, np.uint8)
    start = int(array.ctypes.data) + -int(array.ctypes.data) % 4096
    with installed(FakeDriver()) as fake:
        fake.fail("host_register", step, RESULT)
        with pytest.raises(DriverError):
            kvraw.Registration(start, 5 * 4096, 0, step=4096)
        assert fake.live()["blocks"] == 0
        with kvraw.Registration(start, 5 * 4096, 0, step=4096):
            assert fake.live()["blocks"] == 5


def test_a_pool_that_cannot_be_pinned_is_not_handed_out() -> None:
    with installed(FakeDriver()) as fake:
        fake.fail("host_register", 1, RESULT)
        with pytest.raises(DriverError, match="host_register failed"):
            kvraw.HostPool(1 << 16, device=0)
        assert fake.live()["blocks"] == 0


def test_a_kernel_out_of_bounds_is_named() -> None:
    """The emulator itself: a wrong base is caught with kernel, line and lane."""
    with installed(FakeDriver()):
        world = small_world()
        world.cache.bases = world.cache.bases + np.uint64(1 << 40) * (np.arange(len(world.cache.bases)) == 1)
        with pytest.raises(Exception, match=r"kvraw_copy_paced_v16(.|\n)*(lane|thread)"):
            kvraw.store(world.cache, world.chunks, [3], stream=world.stream).wait()


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_streams_gives_the_same_bytes(seed: int) -> None:
    with installed(FakeDriver(seed=seed)):
        world = small_world()
        streams = [kvraw.Stream(0) for _ in range(4)]
        rng = np.random.default_rng(seed)
        transfers: list[tuple[Any, np.ndarray, int]] = []
        for at, stream in enumerate(streams):
            for _ in range(3):
                ids = rng.permutation(600)[:16]
                transfers.append((kvraw.store(world.cache, [world.chunks[at]], ids, stream=stream), ids, at))
        last = {at: ids for _, ids, at in transfers}
        for transfer, _, _ in transfers:
            transfer.wait()
        for at, ids in last.items():
            np.testing.assert_array_equal(world.chunk(at), world.paged[:, :, ids].transpose(1, 0, 2, 3, 4, 5))
        for stream in streams:
            stream.close()
        world.close()
