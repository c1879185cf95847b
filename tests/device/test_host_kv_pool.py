"""The pool of KV pages in host memory: slots, backup, load, load by layer; on the CPU, the emulator and a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import kvraw
from kvraw.layouts.geometry import Geometry
from tests.helpers import kv_oracle as oracle
from tests.helpers.backends import device_ids
from tests.helpers.torch_like import TorchLike

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 3, 2, 6, 4, 10
NAMES = {"layer_first": "lf", "page_first": "pf", "page_first_direct": "pfd", "page_head": "ph"}


@pytest.fixture(params=["cpu", "emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def w(request: pytest.FixtureRequest) -> Iterator[TorchLike]:
    if request.param == "cpu":
        yield TorchLike(None)
        return
    request.getfixturevalue("gpu" if request.param == "gpu" else "fake")
    made = TorchLike(0)
    yield made
    made.synchronize()


class Setting:
    """A cache of random bytes (K and V of all layers apart, layer by layer) and a pool for its tokens."""

    def __init__(
        self, w: TorchLike, layout: str, planes: int = 2, page: int = BLOCK, format: int | None = None
    ) -> None:
        self.w, self.page, self.planes, self.layout = w, page, planes, layout
        self.heads = HEADS if planes == 2 else 1
        rng = np.random.default_rng(0)
        g = Geometry(LAYERS, BLOCKS, BLOCK, self.heads, DIM, 2, planes=planes)
        shape = (LAYERS, planes, BLOCKS * BLOCK, self.heads, DIM * 2)
        self.cached = rng.integers(0, 256, shape, dtype=np.uint8)
        self.memory = w.put(w.kinds[0], self.cached)
        base, each = self.memory.data_ptr(), self.cached[0, 0].nbytes
        if planes == 2:  # one tensor per layer (1), or all K, then all V (9)
            order = [(layer, 0) for layer in range(LAYERS)]
            if format == 9:
                order = [(layer, plane) for plane in (0, 1) for layer in range(LAYERS)]
        else:
            order = [(layer, 0) for layer in range(LAYERS)]
        pointers = [base + (layer * planes + plane) * each for layer, plane in order]
        number = format or (1 if planes == 2 else 3)
        device = 0 if w.stream is not None else None
        self.cache = kvraw.PagedCache.from_pointers(pointers, number, g, device=device)
        self.pool = kvraw.HostKVPool.like(self.cache, 48, layout=layout, page_size=page)
        for plane in range(planes):
            view = self.pool.numpy(plane)
            view[:] = rng.integers(0, 256, view.shape, dtype=np.uint8)

    def host(self) -> list[np.ndarray]:
        """The planes as they are, shaped as the layout says by the oracle."""
        shape = oracle.shape(NAMES[self.layout], LAYERS, 48, self.page, self.heads, DIM * 2)
        return [self.pool.numpy(k).reshape(shape).copy() for k in range(self.planes)]

    def expect_host(self, before: list[np.ndarray], cache_slots: np.ndarray, slots: np.ndarray) -> None:
        for plane, want in enumerate(before):
            for a, b in zip(cache_slots, slots, strict=True):
                for layer in range(LAYERS):
                    oracle.row(want, NAMES[self.layout], b, layer, self.page)[...] = self.cached[layer, plane, a]
            np.testing.assert_array_equal(self.host()[plane], want)

    def expect_cache(self, slots: np.ndarray, cache_slots: np.ndarray, layers: range = range(LAYERS)) -> None:
        for plane, host in enumerate(self.host()):
            for a, b in zip(slots, cache_slots, strict=True):
                for layer in layers:
                    self.cached[layer, plane, b] = oracle.row(host, NAMES[self.layout], a, layer, self.page)
        np.testing.assert_array_equal(self.w.take(self.memory), self.cached)


def slots_of(blocks: list[int]) -> np.ndarray:
    return (np.array(blocks)[:, None] * BLOCK + np.arange(BLOCK)).ravel()


SETTINGS = [(layout, 2, format) for layout in NAMES for format in (1, 9)]
SETTINGS += [(layout, 1, None) for layout in NAMES if layout != "page_head"]


@pytest.mark.parametrize("page", [4, 8, 1])
@pytest.mark.parametrize(("layout", "planes", "format"), SETTINGS)
def test_backup_and_load(w: TorchLike, layout: str, planes: int, format: int | None, page: int) -> None:
    s = Setting(w, layout, planes, page, format)
    before = s.host()
    slots = s.pool.alloc(16)
    assert slots is not None
    order = np.random.default_rng(1).permutation(4)
    slots = slots.reshape(4, 4)[order].ravel() if page == 4 else slots
    source, target = slots_of([7, 0, 9, 3]), slots_of([2, 8, 1, 0])
    s.pool.backup(s.cache, source, slots, stream=w.stream).wait()
    s.expect_host(before, source, slots)
    s.pool.load(s.cache, slots, target, stream=w.stream).wait()
    s.expect_cache(slots, target)
    loose = slots[[3, 5, 6, 15]]
    s.pool.load(s.cache, loose, [39, 1, 17, 4], stream=w.stream).wait()
    s.expect_cache(loose, np.array([39, 1, 17, 4]))
    s.pool.close()


@pytest.mark.parametrize("together", [1, 2, LAYERS])
@pytest.mark.parametrize(("layout", "planes", "format"), SETTINGS)
def test_a_layer_is_there_before_the_next(
    w: TorchLike, layout: str, planes: int, format: int | None, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a launch loads some layers, and the last one what is left."""
    row = planes * (HEADS if planes == 2 else 1) * DIM * 2
    monkeypatch.setattr("kvraw.host_kv_pool._LAYERS_BYTES", together * 12 * row)
    s = Setting(w, layout, planes, format=format)
    slots, target = s.pool.alloc(12), slots_of([2, 8, 1])
    loading = s.pool.load_layers(s.cache, slots, target, stream=w.stream)
    for layer in range(LAYERS):
        if w.stream is not None:
            loading.wait_on(w.stream, layer)
            now = w.take(s.memory)
            want = np.stack(s.host())
            for a, b in zip(slots, target, strict=True):  # type: ignore[arg-type]
                for plane in range(planes):
                    row = oracle.row(want[plane], NAMES[layout], a, layer, s.page)
                    np.testing.assert_array_equal(now[layer, plane, b], row)
    loading.wait()
    assert loading.done()
    assert loading.done(0)
    s.expect_cache(slots, target)  # type: ignore[arg-type]
    s.pool.close()


def test_layers_end_in_order(fake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the emulator nothing runs until something waits: the first layer's wait leaves the last one undone."""
    monkeypatch.setattr("kvraw.host_kv_pool._LAYERS_BYTES", 1)
    w = TorchLike(0)
    s = Setting(w, "page_first")
    loading = s.pool.load_layers(s.cache, s.pool.alloc(8), slots_of([5, 6]), stream=w.stream)
    loading._completions[0].wait()
    assert loading.done(0)
    assert fake.live()["pending"] > 0  # type: ignore[attr-defined]
    loading.wait()
    s.pool.close()


def test_copies_that_are_kept_are_bounded(fake: object) -> None:
    w = TorchLike(0)
    s = Setting(w, "page_first")
    slots, target = s.pool.alloc(8), slots_of([4, 9])
    for k in range(80):
        s.pool.load(s.cache, slots, target, stream=w.stream, max_rate=1e9 + k).wait()
    assert len(s.pool._partners[s.cache].copies) <= 64
    s.expect_cache(slots, target)  # type: ignore[arg-type]
    s.pool.close()


def test_a_load_by_layer_is_behind_the_stream(w: TorchLike) -> None:
    s = Setting(w, "layer_first")
    slots = s.pool.alloc(8)
    s.pool.backup(s.cache, slots_of([0, 1]), slots, stream=w.stream)
    loading = s.pool.load_layers(s.cache, slots, slots_of([4, 9]), stream=w.stream)
    loading.wait()
    s.cached[:, :, slots_of([4, 9])] = s.cached[:, :, slots_of([0, 1])]
    np.testing.assert_array_equal(w.take(s.memory), s.cached)
    s.pool.close()


def test_slots_on_the_device(w: TorchLike) -> None:
    if w.stream is None:
        pytest.skip("the host has them")
    s = Setting(w, "page_first")
    slots = s.pool.alloc(8)
    before = s.host()
    on_device = device_ids(tuple(map(int, slots_of([3, 2]))), 0, w.stream)
    s.pool.backup(s.cache, on_device, slots, stream=w.stream).wait()
    s.expect_host(before, slots_of([3, 2]), slots)  # type: ignore[arg-type]
    with pytest.raises(kvraw.BoundsError, match=r"cache_slots\[0\] is 40, must be in \[0, 40\)"):
        s.pool.backup(s.cache, device_ids((40,), 0, w.stream), slots[:1], stream=w.stream).wait()  # type: ignore[index]
    s.pool.close()


def test_slots() -> None:
    pool = kvraw.HostKVPool(layout="page_first", tokens=24, page_size=4, layers=2, heads=1, head_size=8, element_size=1)
    assert pool.available == 24
    a, b = pool.alloc(8), pool.alloc(12)
    assert a is not None
    assert b is not None
    assert pool.alloc(8) is None
    assert pool.available == 4
    assert not set(a) & set(b)
    pool.free(a)
    with pytest.raises(ValueError, match=r"slot \d+ is not allocated \(freed twice\?\)"):
        pool.free(a)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(np.concatenate([b[:4], b[:4]]))
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(np.concatenate([b, a]))
    assert pool.available == 12
    for wrong in (b[:3], b[1:5], b[[1, 0, 2, 3]]):
        with pytest.raises(kvraw.BoundsError, match="slots must be all slots of whole pages of 4, in order"):
            pool.free(wrong)
    with pytest.raises(kvraw.BoundsError, match=r"slots\[0\] is 24, must be in \[0, 24\)"):
        pool.free([24, 25, 26, 27])
    with pytest.raises(kvraw.BoundsError, match="tokens is 6, must be a multiple of the page size, 4"):
        pool.alloc(6)
    pool.free(b)
    pool.free([])
    assert pool.available == 24
    everything = pool.alloc(24)
    assert everything is not None
    assert sorted(everything) == list(range(24))
    pool.close()


def test_checks() -> None:
    s = Setting(TorchLike(None), "page_first")
    before, cached = s.host(), s.cached.copy()
    slots = s.pool.alloc(8)
    assert slots is not None
    idle = next(t for t in range(48) if t not in slots)
    there = slots_of([0, 1])
    for call, args, message in [
        (s.pool.backup, (there, slots[:3]), "slots has 3 values, cache_slots 8"),
        (s.pool.backup, ([0], [idle]), rf"slots\[0\] is {idle}, a slot that is not allocated"),
        (s.pool.backup, ([0, 40], slots[:2]), r"cache_slots\[1\] is 40, must be in \[0, 40\)"),
        (s.pool.backup, ([0, -1], slots[:2]), r"cache_slots\[1\] is -1"),
        (s.pool.backup, ([0, 1], [slots[0]] * 2), "slots has .* more than once; each is written once"),
    ]:
        with pytest.raises(kvraw.BoundsError, match=message):
            call(s.cache, *args)
    with pytest.raises(kvraw.BoundsError, match="cache_slots has 0 more than once"):
        s.pool.load(s.cache, slots[:2], [0, 0])
    other = kvraw.HostKVPool.like(s.cache, 48, layout="page_first")
    other.layout = kvraw.HostKVPool(
        layout="page_first", tokens=48, page_size=4, layers=4, heads=2, head_size=DIM, element_size=2
    ).layout
    with pytest.raises(kvraw.LayoutError, match="the pool has layers 4, the cache 3"):
        other.backup(s.cache, [0], [0])
    with pytest.raises(kvraw.LayoutError, match="layout is 'page_last', must be one of"):
        kvraw.HostKVPool.like(s.cache, 48, layout="page_last")
    with pytest.raises(kvraw.LayoutError, match="layout is 'page_head' with planes 1"):
        kvraw.HostKVPool(
            layout="page_head", tokens=4, page_size=4, layers=1, heads=1, head_size=8, element_size=1, planes=1
        )
    with pytest.raises(kvraw.BoundsError, match="tokens is 6"):
        kvraw.HostKVPool.like(s.cache, 6, layout="page_first")
    for size in (0, -4):
        with pytest.raises(kvraw.BoundsError, match=f"page_size is {size}, must be positive"):
            kvraw.HostKVPool.like(s.cache, 48, layout="page_first", page_size=size)
    for plane in (-1, 2):
        with pytest.raises(kvraw.BoundsError, match=rf"plane is {plane}, must be in \[0, 2\)"):
            s.pool.numpy(plane)
    for use in (s.pool.load, s.pool.load_layers):
        with pytest.raises(kvraw.BoundsError, match="ctas is -1, must be >= 0"):
            use(s.cache, slots[:2], [0, 1], ctas=-1)
    with pytest.raises(TypeError, match=r"tokens is 8\.0, must be an integer"):
        s.pool.alloc(8.0)  # type: ignore[arg-type]
    at = s.cache.bases[:1]
    fused = kvraw.PagedCache.from_pointers(at, 11, Geometry(1, 2, 4, 3, 16, 2, planes=1), device=s.cache.device)
    with pytest.raises(kvraw.LayoutError, match="heads is 3 with planes 1, must be 1; of a fused cache"):
        kvraw.HostKVPool.like(fused, 8, layout="layer_first")

    for array, was in zip(s.host(), before, strict=True):
        np.testing.assert_array_equal(array, was)
    np.testing.assert_array_equal(s.w.take(s.memory), cached)
    s.pool.close()
    with pytest.raises(kvraw.ClosedError):
        s.pool.backup(s.cache, [0], [slots[0]])


def test_close_waits_for_a_call_that_has_not_enqueued_yet(fake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is there until what the call enqueues is over."""
    w = TorchLike(0)
    s = Setting(w, "page_first")
    slots, before = s.pool.alloc(4), s.host()
    view = s.pool.numpy(0)  # keeps the memory readable
    begun, go_on = threading.Event(), threading.Event()
    index = s.pool._index

    def slowly(*args: object) -> object:
        begun.set()
        assert go_on.wait(10)
        return index(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(s.pool, "_index", slowly)
    copying = threading.Thread(target=s.pool.backup, args=(s.cache, slots_of([3]), slots), kwargs={"stream": w.stream})
    copying.start()
    assert begun.wait(10)
    closing = threading.Thread(target=s.pool.close)
    closing.start()
    while not s.pool._pool._closed:
        time.sleep(0.001)
    with pytest.raises(kvraw.ClosedError, match="the pool is closed"):
        s.pool.load(s.cache, slots, slots_of([3]), stream=w.stream)
    assert closing.is_alive()
    go_on.set()
    for one in (copying, closing):
        one.join(10)
        assert not one.is_alive()
    want = before[0]
    for a, b in zip(slots_of([3]), slots, strict=True):  # type: ignore[arg-type]
        for layer in range(LAYERS):
            oracle.row(want, "pf", b, layer, s.page)[...] = s.cached[layer, 0, a]
    np.testing.assert_array_equal(view.reshape(want.shape), want)


def test_a_layer_that_fails_leaves_those_before_it_noted(fake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvraw.host_kv_pool._LAYERS_BYTES", 1)
    w = TorchLike(0)
    s = Setting(w, "page_first")
    slots, calls = s.pool.alloc(4), []
    launch = fake.launch  # type: ignore[attr-defined]

    def fails(*args: object) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise kvraw.DriverError("CUDA_ERROR_LAUNCH_FAILED", 719, "cuLaunchKernel")
        launch(*args)

    monkeypatch.setattr(fake, "launch", fails)
    with pytest.raises(kvraw.DriverError):
        s.pool.load_layers(s.cache, slots, slots_of([3]), stream=w.stream)
    assert sum(use.queue is not None for use in s.pool._pool._uses) == 1
    s.pool.close()


def test_nothing_to_load(w: TorchLike) -> None:
    s = Setting(w, "page_first")
    none = np.zeros(0, np.int64)
    loading = s.pool.load_layers(s.cache, none, none, stream=w.stream)
    loading.wait()
    assert loading.done(LAYERS - 1)
    s.pool.backup(s.cache, none, none, stream=w.stream).wait()
    s.pool.close()
    with pytest.raises(kvraw.ClosedError):
        s.pool.load_layers(s.cache, none, none, stream=w.stream)


def test_a_closed_pool_gives_nothing(w: TorchLike) -> None:
    s = Setting(w, "page_first")
    slots = s.pool.alloc(8)
    s.pool.close()
    for use in (
        lambda: s.pool.alloc(0),
        lambda: s.pool.free(slots),
        lambda: s.pool.available,
        lambda: s.pool.__enter__(),
        lambda: s.pool.numpy(),
        lambda: s.pool.backup(s.cache, [0], [0], stream=w.stream),
    ):
        with pytest.raises(kvraw.ClosedError, match="the pool is closed"):
            use()
    s.pool.close()
