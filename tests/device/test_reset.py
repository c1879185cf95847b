"""Another library resets the device's context: what is made anew works, what was made before says so."""

from __future__ import annotations

import numpy as np
import pytest

import kvraw
from kvraw import codec
from kvraw.adapters import sglang_direct
from kvraw.adapters.lmcache import _blend_groups, _groups, _memo, _paged, _planned
from kvraw.copying import bounce, pointer_tables
from kvraw.copying.device_state import device_state
from kvraw.runtime import memory
from kvraw.runtime.context import DeviceScope
from tests.device.test_launches import TorchLike
from tests.emulator.fake_driver import FakeDriver
from tests.helpers import coder_oracle as oracle
from tests.helpers.codec_cases import Place
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


def test_pools_of_pages(fake: FakeDriver) -> None:
    w = World(0)
    pool = kvraw.HostKVPool.like(w.cache, 32, layout="page_first")
    slots = pool.alloc(8)
    pool.backup(w.cache, np.arange(8), slots, stream=w.stream).wait()
    kept = pool.numpy().copy()
    fake.reset(0)
    v = World(0)
    with pytest.raises(kvraw.ClosedError, match="the cache is gone: the context of device 0 was reset"):
        pool.load(w.cache, slots, np.arange(8), stream=v.stream)
    np.testing.assert_array_equal(pool.numpy(), kept)
    pool.load(v.cache, slots, np.arange(8), stream=v.stream).wait()
    np.testing.assert_array_equal(v.now()[:, :, :2], w.paged[:, :, :2])
    pool.close()
    v.close()
    w.pool.close(1.0)


@pytest.mark.parametrize("met_by", ["another call", "this call"])
def test_launches_that_were_made_ready(fake: FakeDriver, met_by: str) -> None:
    """They are kept by the tensors' shapes, which come again; so does the memory that calls work in."""
    values = np.random.default_rng(0).integers(0, 16, (2, 30, 40)).astype(np.uint8)
    for again in (False, True):
        if again and met_by == "another call":
            kvraw.Stream(0).close()
        place = None
        for _ in range(1 + again):
            try:
                place = Place(0)
                symbols, cdf = TorchLike(place, values), TorchLike(place, np.zeros((2, 40, 17), np.uint16))
                codec.write_cdf(symbols, cdf, stream=place.stream).wait()
                codec.encode(symbols, 16, stream=place.stream)
                break
            except kvraw.DriverError:
                assert again
        assert place is not None
        np.testing.assert_array_equal(cdf.array.fetch(), oracle.cdf(values, 16))
        if not again:
            fake.reset(0)
    place.close()


def test_the_context_that_was_made_anew_is_current(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no call of ours fails for the old one; the first to use an event of it does."""
    monkeypatch.setenv("KVRAW_NEIGHBOUR", "idle")  # no pace, whose words nobody waits for
    w = World(0)
    store(w)
    with DeviceScope(0):
        state = device_state(0)
    fake.reset(0)
    fake.context_push(fake.primary_retain(0))
    with pytest.raises(kvraw.KvrawError), DeviceScope(0):
        fake.event_record(state.completions.take_event(), 0)
    assert state.was_reset
    with DeviceScope(0):
        assert device_state(0) is not state
    fake.context_pop()
    v = World(0)
    store(v)
    v.close()
    w.pool.close(1.0)


def test_a_bound_call_in_the_context_that_was_made_anew(fake: FakeDriver) -> None:
    w = World(0)
    plan, ids, stream = kvraw.TransferPlan(w.cache, "store", chunk_tokens=16), np.arange(20), w.stream.handle
    for _ in range(4):
        plan(w.chunks[:5], ids, stream=stream).wait()
    fake.reset(0)
    fake.context_push(fake.primary_retain(0))
    with pytest.raises(kvraw.KvrawError):
        plan(w.chunks[:5], ids, stream=stream)
    v = World(0)
    with pytest.raises(kvraw.ClosedError, match="the cache is gone"):
        plan(w.chunks[:5], ids, stream=v.stream)
    store(v)
    fake.context_pop()
    v.close()
    w.pool.close(1.0)


def test_what_adapters_keep_is_forgotten(fake: FakeDriver) -> None:
    tables = [m._known for m in (_memo, _paged, _groups, _blend_groups)]
    tables += [_planned._bits, bounce._free, pointer_tables._tables]
    tables += [
        sglang_direct._by_value,
        sglang_direct._by_identity,
    ]
    key = fake
    for one in tables:
        one[key] = {}  # type: ignore[index]
    World(0)
    known = memory.known_memory(fake)  # type: ignore[arg-type]
    assert known.table[1]
    fake.reset(0)
    kvraw.Stream(0).close()
    assert not known.table[1]
    assert memory.known_memory(fake) is known  # type: ignore[arg-type]  # other devices' states hold it
    assert [one for one in tables if one.get(key) == {}] == []  # type: ignore[call-overload]
