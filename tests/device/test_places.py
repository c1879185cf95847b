"""Memory that is not what was named, or ends too early, is refused ahead of a launch; what others pinned is used."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvraw
from kvraw.adapters import vllm
from kvraw.layouts.geometry import Geometry
from kvraw.runtime import driver as driver_module
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import locate
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.profile import examples
from tests.helpers.torch_like import TorchLike
from tests.helpers.world import World

G = Geometry(layers=2, blocks=16, block_size=4, heads=2, head_size=16, element_size=2)
LAYER = 2 * 16 * 4 * 2 * 32
K = 1024
TOKENS = 16


def test_tables_of_other_memory(device: int) -> None:
    host = np.zeros(2 * LAYER, np.uint8)
    with (
        kvraw.DeviceBuffer(2 * LAYER, device) as good,
        kvraw.HostPool(LAYER, device=device) as pool,
    ):
        first = good.address
        kvraw.PagedCache.from_pointers([first, first + LAYER], 1, G, device=device)
        count = driver().device_count()
        for second, where, error, text in (
            (int(host.ctypes.data), device, kvraw.PlacementError, r"pointers\[1\] is 0x.*, pageable host memory"),
            (pool.address, device, kvraw.PlacementError, r"pointers\[1\] is 0x.*, pinned host memory"),
            (first + LAYER, count, kvraw.PlacementError, rf"device is {count}, must be in \[0, {count}\)"),
            (first + LAYER, -1, kvraw.PlacementError, "device is -1, must be in"),
            (first + LAYER, 0.0, TypeError, "device is 0.0, must be an integer"),
            (first + (64 << 30), device, (kvraw.PlacementError, kvraw.BoundsError), r"pointers\[1\]"),
        ):
            with pytest.raises(error, match=text):
                kvraw.PagedCache.from_pointers([first, second], 1, G, device=where)  # type: ignore[arg-type]


def test_tables_over_the_end_and_of_another_device(fake: FakeDriver) -> None:
    with kvraw.DeviceBuffer(2 * LAYER, 0) as good, kvraw.DeviceBuffer(2 * LAYER, 1) as other:
        a = good.address
        with pytest.raises(
            kvraw.BoundsError, match=rf"pointers\[1\] is {a + LAYER + 32:#x}, with {LAYER} bytes it goes"
        ):
            kvraw.PagedCache.from_pointers([a, a + LAYER + 32], 1, G, device=0)
        with pytest.raises(
            kvraw.PlacementError, match=f"{other.address:#x} is memory of device 1, must be of device 0"
        ):
            kvraw.PagedCache.from_pointers([a, other.address], 1, G, device=0)
        asked = fake.calls["pointer_info"]
        cache = kvraw.PagedCache.from_pointers([a, a + LAYER], 1, G, device=0)
        assert fake.calls["pointer_info"] - asked <= 2  # and never again
        with kvraw.HostPool(1 << 20, device=0) as pool, kvraw.Stream(0) as stream:
            chunks = pool.chunks(4, cache.chunk_bytes(16))
            kvraw.store(cache, chunks, range(16), stream=stream).wait()
            asked = fake.calls["pointer_info"]
            kvraw.store(cache, chunks, range(16), stream=stream).wait()
            assert fake.calls["pointer_info"] == asked


def test_chunks_over_the_end(device: int) -> None:
    w = World(device)
    nbytes = w.cache.chunk_bytes(16)
    with kvraw.DeviceBuffer(nbytes, device) as memory:
        kvraw.store(w.cache, [memory.address], [1, 2, 3, 4], chunk_tokens=16, stream=w.stream).wait()
        end = locate(memory.address, 1).edges[-1]
        with pytest.raises(kvraw.BoundsError, match=r"chunks\[0\] is 0x.*goes over the end of its memory"):
            kvraw.store(w.cache, [end - nbytes + 64], [1, 2, 3, 4], chunk_tokens=16, stream=w.stream)
    w.close()


def test_memory_that_is_mapped_in_pieces(fake: FakeDriver) -> None:
    base = fake.map_in_pieces(0, LAYER // 2, 4)
    cache = kvraw.PagedCache.from_pointers([base, base + LAYER], 1, G, device=0)
    image = np.random.default_rng(0).integers(0, 256, 2 * LAYER, dtype=np.uint8)
    ctypes.memmove(base, image.ctypes.data, 2 * LAYER)
    with kvraw.HostPool(1 << 20, device=0) as pool, kvraw.Stream(0) as stream:
        (chunk,) = pool.chunks(1, cache.chunk_bytes(16))
        kvraw.store(cache, [chunk], [3, 0, 15, 7], stream=stream).wait()
        want = image.reshape(2, 2, 16, -1)[:, :, [3, 0, 15, 7]].swapaxes(0, 1)
        np.testing.assert_array_equal(chunk.numpy(), want.ravel())
    with pytest.raises(kvraw.BoundsError, match="goes over the end"):
        kvraw.PagedCache.from_pointers([base, base + LAYER + 64], 1, G, device=0)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("sizes", ["one", "many"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_batch_over_the_end(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, side: int, sizes: str, many: bool
) -> None:
    w = TorchLike(0).install(monkeypatch)
    tensors = [w.put(kind, np.zeros(1 << 20, np.uint8)) for kind in (("device", "pinned"), ("pinned", "device"))[side]]
    count = 200 if many else 4
    at = [np.array([t.data_ptr() + 4096 * k for k in range(count)]) for t in tensors]  # type: ignore[attr-defined]
    length = np.full(count, 64)
    if sizes == "many":
        length[1:] += 16 * np.arange(count - 1)
        length[0] = 0
    at[side][-2] = tensors[side].data_ptr() + (1 << 20) - int(length[-2]) + 16  # type: ignore[attr-defined]
    name = ("src_ptrs", "dst_ptrs")[side]
    with pytest.raises(kvraw.BoundsError, match=rf"{name}\[{count - 2}\] is 0x.*with {length[-2]} bytes it goes over"):
        vllm.swap_blocks_batch(*(w.put("host", x) for x in (*at, length)))
    assert not fake.calls["launch"] + fake.calls["memcpy_batch_async"]


def aligned(nbytes: int) -> tuple[np.ndarray, int]:
    """An array that begins at a page, and its address."""
    array = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    return array, int(array.ctypes.data)


class Foreign:
    """Host memory that somebody else registered, in pieces."""

    def __init__(self, device: int, ends: list[int]) -> None:
        self.array, self.base = aligned(ends[-1])
        self.device = device
        with DeviceScope(device):
            for begin, end in zip([0, *ends], ends, strict=False):
                driver().host_register(self.base + begin, end - begin)
        self.begins = [0, *ends[:-1]]

    def close(self) -> None:
        with DeviceScope(self.device):
            for begin in self.begins:
                driver().host_unregister(self.base + begin)


@pytest.mark.parametrize("captured", [False, True])
def test_batches_over_what_others_registered(fake: FakeDriver, captured: bool) -> None:
    f = Foreign(0, [64 * K, 128 * K, 256 * K])
    image = np.random.default_rng(0).integers(0, 256, 256 * K, dtype=np.uint8)
    with kvraw.DeviceBuffer(256 * K, 0) as memory, kvraw.Stream(0) as stream:
        ctypes.memmove(memory.address, image.ctypes.data, len(image))
        at, n = [48 * K, 0, 120 * K], [100 * K - 52 * K, 0, 100 * K]
        f.array[:] = 0
        fake.capture(stream.handle, captured)
        for _ in range(2):
            kvraw.memcpy_batch([f.base + x for x in at], [memory.address + x for x in at], n, stream=stream)
        fake.capture(stream.handle, False)
        stream.synchronize()
        want = np.zeros_like(image)
        for x, y in zip(at, n, strict=True):
            want[x : x + y] = image[x : x + y]
        np.testing.assert_array_equal(f.array, want)
        end = f.base + 256 * K  # cut there as well: what is behind it is named
        with pytest.raises(kvraw.DriverError) as caught:
            kvraw.memcpy_batch([f.base, f.base, end - 64], [memory.address] * 3, [64, 0, 128], stream=stream)
        assert caught.value.index == 2
        assert f"64 bytes at {memory.address + 64:#x} (device memory of device 0 [" in str(caught.value)
        assert f"to {end:#x} (pageable host memory)" in str(caught.value)
        stream.synchronize()
    f.close()


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.data())
def test_any_batch_over_any_registrations(pages: list[int], data: st.DataObject) -> None:
    fake = FakeDriver()
    before = driver_module.install(fake)  # type: ignore[arg-type]
    try:
        ends = np.cumsum(pages) * 4096
        size = int(ends[-1])
        f = Foreign(0, ends.tolist())
        cuts = sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=12)))
        at, n = cuts[:-1], np.diff(cuts).tolist()
        image = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
        with kvraw.DeviceBuffer(size, 0) as memory, kvraw.Stream(0) as stream:
            ctypes.memmove(memory.address, image.ctypes.data, size)
            f.array[:] = 7
            to, src = [f.base + x for x in at], [memory.address + x for x in at]
            kvraw.memcpy_batch(to, src, n, stream=stream).wait()
            np.testing.assert_array_equal(f.array[cuts[0] : cuts[-1]], image[cuts[0] : cuts[-1]])
            assert (f.array[: cuts[0]] == 7).all()
            assert (f.array[cuts[-1] :] == 7).all()
        f.close()
    finally:
        driver_module.install(before)
    assert not fake.violations


@pytest.mark.parametrize("ends", [[256 * K], [64 * K, 256 * K]], ids=["one", "two"])
@pytest.mark.parametrize("pin", [None, True])
def test_pools_over_what_others_registered(device: int, ends: list[int], pin: bool | None) -> None:
    w = World(device)
    f = Foreign(device, ends)
    with kvraw.HostPool.from_pointer(f.base, 256 * K, device=device if pin else None, pin=pin or False) as pool:
        chunks = pool.chunks(5, w.cache.chunk_bytes(TOKENS))
        for engine in ("kernel", "copy", "staged", "auto"):
            for chunk in chunks:
                chunk.numpy()[:] = 0
            kvraw.store(w.cache, chunks, range(20), stream=w.stream, engine=engine).wait()
            for at, chunk in enumerate(chunks):
                want = w.paged[:, :, 4 * at : 4 * at + 4].swapaxes(0, 1)
                np.testing.assert_array_equal(chunk.numpy(), want.ravel())
        assert pool.pinned
    with kvraw.HostBuffer.from_pointer(f.base, 64 * K, device=device) as buffer:
        assert buffer.device_shift == locate(f.base, 1).device_address - f.base
    assert locate(f.base, 256 * K).device_address  # not ours to unpin
    f.close()
    assert not locate(f.base, 1).device_address
    w.close()


def test_a_pool_over_a_part_that_others_registered(device: int) -> None:
    array, base = aligned(256 * K)
    with DeviceScope(device):
        driver().host_register(base + 64 * K, 64 * K)
    with kvraw.HostPool.from_pointer(base, 128 * K, device=device, owner=array) as pool:
        assert pool.pinned
        assert locate(base, 128 * K).device_address
    assert not locate(base, 1).device_address
    assert locate(base + 64 * K, 1).device_address
    with DeviceScope(device):
        driver().host_unregister(base + 64 * K)


def test_memory_of_our_own_is_not_taken_for_theirs(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registration that outlived its memory knows pages that are gone."""
    keep = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(keep))
    with DeviceScope(0):
        fake.host_register(address, 1 << 20)
    monkeypatch.setattr("kvraw.runtime.host.libc.map_anonymous", lambda *a, **k: address)
    monkeypatch.setattr("kvraw.runtime.host.libc.unmap", lambda *a: None)
    with pytest.raises(kvraw.DriverError, match=r"ALREADY_REGISTERED.*pinned host memory"):
        kvraw.HostPool(1 << 20, device=0)
    with DeviceScope(0):
        fake.host_unregister(address)


@pytest.mark.parametrize("side", ["dst", "src"])
def test_a_refused_batch_over_the_end_is_not_tried_again_in_pieces(device: int, side: str) -> None:
    """What lies behind device memory would be taken for host memory by the driver, which faults there."""
    w = World(device)
    with ExitStack() as stack:
        buffers = [stack.enter_context(kvraw.DeviceBuffer(4 << 20, device)) for _ in range(8)]
        buffers.sort(key=lambda one: one.address)
        for one in buffers[1::2]:  # nothing lies behind the others then
            one.close()
        memory = next(one for one in buffers[::2] if locate(one.address + one.nbytes, 1).device_address == 0)
        end = memory.address + memory.nbytes
        args = {"dst": [w.chunks[0].address] * 2, "src": [w.chunks[1].address] * 2}
        args[side] = [memory.address, end - 32]
        with pytest.raises(kvraw.DriverError) as caught:
            kvraw.memcpy_batch(args["dst"], args["src"], [64, 64], stream=w.stream)
        assert caught.value.index == 1
        if isinstance(driver(), FakeDriver):
            assert driver().calls["memcpy_batch_async"] == 1
    w.close()
