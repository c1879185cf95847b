"""Another library resets the device's context: what is made anew works, what was made before says so."""

from __future__ import annotations

import numpy as np
import pytest

import kvraw
from kvraw.runtime.context import DeviceScope
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.world import World

IDS = np.arange(20)


def store(w: World, **more: object) -> None:
    kvraw.store(w.cache, w.chunks, IDS, stream=w.stream, **more).wait()  # type: ignore[arg-type]
    for at in range(5):
        want = w.paged[:, :, 4 * at : 4 * at + 4].swapaxes(0, 1)
        np.testing.assert_array_equal(w.chunk(at), want.reshape(w.chunk(at).shape))


@pytest.mark.parametrize("made_anew", [False, True], ids=["left", "made anew"])
def test_what_is_made_anew_works(fake: FakeDriver, made_anew: bool) -> None:
    for _ in range(3):
        w = World(0)
        store(w)
        under_way = kvraw.store(w.cache, w.chunks, IDS, stream=w.stream)
        kept = w.chunks[0].numpy().copy()
        fake.reset(0)
        if made_anew:
            fake.primary_retain(0)
        v = World(0)
        assert not w.pool.pinned
        for engine in ("kernel", "copy", "staged", "auto"):
            store(v, engine=engine)

        with pytest.raises(kvraw.ClosedError, match="the stream is gone: the context of device 0 was reset"):
            kvraw.store(w.cache, w.chunks, IDS, stream=w.stream)
        with pytest.raises(kvraw.ClosedError, match="the cache is gone: the context of device 0 was reset"):
            kvraw.store(w.cache, w.chunks, IDS, stream=v.stream)
        with pytest.raises(kvraw.ClosedError, match="work is gone"):
            under_way.wait()
        assert under_way.done()
        np.testing.assert_array_equal(w.chunks[0].numpy(), kept)  # what lay on the host is there
        kvraw.store(v.cache, w.chunks, IDS, stream=v.stream).wait()  # pinned anew
        assert w.pool.pinned
        w.pool.close(1.0)
        w.stream.close()
        w.memory.close()
        v.close()
    assert fake.live()["pending"] == 0


def test_the_first_to_meet_it_says_so(fake: FakeDriver) -> None:
    w = World(0)
    store(w)
    fake.reset(0)
    with pytest.raises(kvraw.DriverError, match="the context of device 0 was reset: streams, caches and device memory"):
        kvraw.store(w.cache, w.chunks, IDS, stream=w.stream)
    store(World(0))
    w.pool.close(1.0)


def test_pools_that_the_driver_allocated(fake: FakeDriver) -> None:
    pool = kvraw.HostPool(1 << 16, device=0, options=kvraw.HostOptions(kind="pinned"))
    fake.reset(0)
    kvraw.Stream(0).close()
    with pytest.raises(kvraw.ClosedError):
        pool.chunks(1, 4096)
    pool.close()


def test_the_other_device_goes_on(fake: FakeDriver) -> None:
    here, there = World(0), World(1)
    store(here)
    store(there)
    fake.reset(0)
    kvraw.Stream(0).close()
    store(there)
    assert there.pool.pinned
    there.close()
    here.pool.close(1.0)


def test_work_on_the_host_does_not_meet_a_dead_gpu(fake: FakeDriver) -> None:
    w = World(0)
    store(w)
    rng = np.random.default_rng(0)
    paged, chunk = rng.integers(0, 256, (2, 2, 16, 4, 2, 32), dtype=np.uint8), np.zeros(2 * 2 * 16 * 64, np.uint8)
    with DeviceScope(0):
        fake.sticky = "CUDA_ERROR_ILLEGAL_ADDRESS"
        try:
            at = [int(layer.ctypes.data) for layer in paged]
            geometry = kvraw.Geometry(layers=2, blocks=16, block_size=4, heads=2, head_size=16, element_size=2)
            cache = kvraw.PagedCache.from_pointers(at, 1, geometry)
            kvraw.store(cache, [chunk], [1, 2, 3, 4])
            kvraw.load(cache, [int(chunk.ctypes.data)], [1, 2, 3, 4], chunk_tokens=16)
            kvraw.memcpy_batch([chunk.ctypes.data], [paged.ctypes.data], [64])
            with kvraw.HostPool(1 << 16) as pool:
                kvraw.store(cache, pool.chunks(1, len(chunk)), [1, 2, 3, 4])
            plan = kvraw.TransferPlan(cache, "store", chunk_tokens=16).plan
            kvraw.PreparedCopy(plan, device=None)(at, [int(chunk.ctypes.data)], 4, src_index=[1, 2, 3, 4])
            with pytest.raises(kvraw.DriverError, match="ILLEGAL_ADDRESS"):
                kvraw.Stream(0)
        finally:
            fake.sticky = ""
    w.close()
