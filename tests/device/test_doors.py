"""Every door to a copy reaches every engine of a GPU: the same bytes by each, also by the programs of later calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.copying.plan import CopyPlan, Side
from kvraw.runtime.completion import Operation
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from tests.helpers.backends import device_ids
from tests.helpers.staging import own_slots

ENGINES = ["kernel", "copy", "staged"]
LAYERS, PLANES, BLOCKS, BLOCK, HEADS, DIM = 3, 2, 12, 4, 2, 16
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]


@pytest.fixture
def place(device: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """A device whose staging slots hold a few items."""
    own_slots(monkeypatch, device, 4096)
    return device


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Streams beside its own of each call that was run as a program: those of staging slots."""
    found: list[int] = []
    real = Operation.run

    def run(self: Operation, *args: Any, streams: tuple[int, ...] = ()) -> bool:
        found.append(len(streams))
        return real(self, *args, streams=streams)

    monkeypatch.setattr(Operation, "run", run)
    return found


class Cache:
    """A cache of random bytes on a device: a tensor per layer, K and V apart."""

    def __init__(self, device: int) -> None:
        self.bytes = np.random.default_rng(0).integers(0, 256, (LAYERS, PLANES, BLOCKS * BLOCK, HEADS, DIM), np.uint8)
        self.device, self.stream = device, kvraw.Stream(device)
        self.memory, self.pool = kvraw.DeviceBuffer(self.bytes.nbytes, device), kvraw.HostPool(1 << 20, device=device)
        (self.mirror,) = self.pool.chunks(1, self.bytes.nbytes)
        self.put()
        each = self.bytes[0].nbytes
        self.cache = kvraw.PagedCache.from_pointers(
            [self.memory.address + k * each for k in range(LAYERS)],
            1,
            kvraw.Geometry(LAYERS, BLOCKS, BLOCK, HEADS, DIM, 1, planes=PLANES),
            device=device,
        )

    def _copy(self, to: int, source: int) -> None:
        with DeviceScope(self.device):
            driver().memcpy_async(to, source, self.bytes.nbytes, self.stream.handle)
        self.stream.synchronize()

    def put(self) -> None:
        self.mirror.numpy()[:] = self.bytes.ravel()
        self._copy(self.memory.address, self.mirror.address)

    def now(self) -> np.ndarray:
        self._copy(self.mirror.address, self.memory.address)
        return self.mirror.numpy().reshape(self.bytes.shape).copy()

    def close(self) -> None:
        self.stream.synchronize()
        self.pool.close()


@pytest.fixture
def cache(place: int) -> Iterator[Cache]:
    made = Cache(place)
    yield made
    made.close()


def slots_of(blocks: Any) -> np.ndarray:
    found: np.ndarray = (np.asarray(blocks)[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("by", ["page", "slot"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_host_kv_pool(cache: Cache, layout: str, by: str, engine: str, programs: list[int]) -> None:
    pool = kvraw.HostKVPool.like(cache.cache, BLOCKS * BLOCK, layout=layout)
    slots = pool.alloc(BLOCKS * BLOCK)
    assert slots is not None
    rng = np.random.default_rng(1)
    for _ in range(4):
        some = rng.permutation(BLOCKS)[:7]
        here, there = slots_of(rng.permutation(BLOCKS)[:7]), slots_of(some)
        if by == "slot":
            here = rng.permutation(here)
        cache.put()
        done = pool.backup(cache.cache, there, here, stream=cache.stream, engine=engine)
        done.wait()
        assert done.engine == engine
        target = slots_of(rng.permutation(BLOCKS)[:7])
        assert pool.load(cache.cache, here, target, stream=cache.stream, engine=engine).engine == engine
        want = cache.bytes.copy()
        want[:, :, target] = cache.bytes[:, :, there]
        np.testing.assert_array_equal(cache.now(), want)
        cache.put()
        pool.load_layers(cache.cache, here, target, stream=cache.stream, engine=engine).wait()
        np.testing.assert_array_equal(cache.now(), want)
    if engine == "kernel":
        assert programs
    elif engine == "staged":
        assert max(programs) >= 1  # later calls go through slots as programs
    pool.close()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("engine", ["kernel", "staged"])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_cache_slots_on_the_device(cache: Cache, layout: str, engine: str, on_device: bool) -> None:
    pool = kvraw.HostKVPool.like(cache.cache, BLOCKS * BLOCK, layout=layout)
    slots = pool.alloc(24)
    assert slots is not None
    ids = slots_of([7, 0, 11, 3, 4, 9])
    given = device_ids(tuple(map(int, ids)), 0, cache.stream) if on_device else ids
    pool.backup(cache.cache, given, slots, stream=cache.stream, engine=engine).wait()
    copy = pool.load(cache.cache, slots, slots_of([1, 2, 3, 4, 5, 6]), stream=cache.stream, engine=engine)
    assert copy.engine == engine
    want = cache.bytes.copy()
    want[:, :, slots_of([1, 2, 3, 4, 5, 6])] = cache.bytes[:, :, ids]
    np.testing.assert_array_equal(cache.now(), want)
    bad = device_ids((3, 4 * BLOCKS, 5), 0, cache.stream)
    with pytest.raises(kvraw.BoundsError, match=r"cache_slots\[1\] is 48, must be in \[0, 48\)"):
        pool.backup(cache.cache, bad, slots[:3], stream=cache.stream, engine=engine).wait()
    pool.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("way", ["store", "load"])
def test_slots_of_a_tensor_of_tokens(cache: Cache, way: str, first: int, engine: str) -> None:
    """Host memory [planes, layers, tokens, row] by tables of its planes and layers, as engines' connectors have it."""
    tokens, row = 37, HEADS * DIM
    (chunk,) = cache.pool.chunks(1, PLANES * LAYERS * tokens * row)
    flat = chunk.numpy().reshape(PLANES, LAYERS, tokens, row)
    flat[:] = np.random.default_rng(2).integers(0, 256, flat.shape, np.uint8)
    before = flat.copy()
    bases = [chunk.address + k * tokens * row for k in range(PLANES * LAYERS)]
    host = Side(outer=row, table_layer=1, table_plane=LAYERS, head=DIM, entries=PLANES * LAYERS)
    paged = cache.cache.layout.side("slot")
    sides = (paged, host) if way == "store" else (host, paged)
    copy = kvraw.PreparedCopy(CopyPlan(*sides, LAYERS, PLANES, 1, HEADS, DIM), device=0, engine=engine)
    want_cache, want_flat = cache.bytes.copy(), before.copy()
    for k in range(3):
        slots = np.random.default_rng(k).permutation(BLOCKS * BLOCK)[:tokens].astype(np.int64)
        if way == "store":
            done = copy(cache.cache.bases, bases, tokens - first, src_index=slots, first=first, stream=cache.stream)
            want_flat[:, :, first:] = cache.bytes.reshape(LAYERS, PLANES, -1, row)[:, :, slots[first:]].transpose(
                1, 0, 2, 3
            )
        else:
            done = copy(bases, cache.cache.bases, tokens - first, dst_index=slots, first=first, stream=cache.stream)
            want_cache.reshape(LAYERS, PLANES, -1, row)[:, :, slots[first:]] = before[:, :, first:].transpose(
                1, 0, 2, 3
            )
        done.wait()
        assert done.engine == engine
        np.testing.assert_array_equal(flat, want_flat)
        np.testing.assert_array_equal(cache.now(), want_cache)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("by", ["block", "slot"])
@pytest.mark.parametrize("chunk_layout", ["2LTD", "T2D", "L2TD"])
def test_transfer_plans(cache: Cache, chunk_layout: str, by: Any, engine: str) -> None:
    """Chunks that are larger than a slot, in each of their layouts, also of one block."""
    for tokens in (BLOCK, 3 * BLOCK):
        chunks = cache.pool.chunks(BLOCKS * BLOCK // tokens, cache.cache.chunk_bytes(tokens))
        blocks = np.random.default_rng(3).permutation(BLOCKS)
        ids = slots_of(blocks) if by == "slot" else blocks
        options = {"chunk_tokens": tokens, "by": by, "chunk_layout": chunk_layout, "engine": engine}
        for _ in range(3):
            store = kvraw.TransferPlan(cache.cache, "store", **options)
            store(chunks, ids, stream=cache.stream).wait()
            load = kvraw.TransferPlan(cache.cache, "load", **options)
            order = slots_of(blocks[::-1]) if by == "slot" else blocks[::-1].copy()
            assert load(chunks, order, stream=cache.stream).engine == engine
            want = cache.bytes.copy()
            want[:, :, slots_of(blocks[::-1])] = cache.bytes[:, :, slots_of(blocks)]
            np.testing.assert_array_equal(cache.now(), want)
            cache.put()
        cache.pool.free(chunks)


def test_auto_packs_for_long_runs_of_the_host(fake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that the host has in one piece go through staging slots; in pieces by layer, where they follow each other.

    And so do slots of a tensor of tokens.
    """
    monkeypatch.setenv("KVRAW_NEIGHBOUR", "idle")
    w = Cache(0)
    monkeypatch.setattr("kvraw.copying.bound_copy.BoundCopy.enqueue", lambda self, s, o, call, choice: choice)
    monkeypatch.setattr("kvraw.cache.require_on_device", lambda *args: None)
    shape = kvraw.Geometry(32, 64, 16, 8, 128, 2)
    step = 64 * 16 * shape.token_bytes // shape.layers
    cache = kvraw.PagedCache.from_pointers([w.memory.address + k * step for k in range(32)], 1, shape, device=0)
    cached = (np.random.default_rng(0).permutation(64)[:, None] * 16 + np.arange(16)).ravel()
    engines = {}
    for layout in LAYOUTS:
        with kvraw.HostKVPool.like(cache, 1024, layout=layout) as pool:
            slots = pool.alloc(1024)
            assert slots is not None
            for name, here in (("in order", slots), ("scattered", slots.reshape(64, 16)[::-1].ravel())):
                engines[layout, name] = pool.backup(cache, cached, here, stream=w.stream).engine
    short = engines.pop(("layer_first", "scattered"))
    assert short == "kernel"
    assert set(engines.values()) == {"staged"}

    row = shape.token_bytes // 64
    sides = cache.layout.side("slot"), Side(row, table_layer=1, table_plane=32, head=256, entries=64)
    copy = kvraw.PreparedCopy(CopyPlan(*sides, 32, 2, 1, 8, 256), device=0)
    bases = [w.mirror.address + k for k in range(64)]
    paged = kvraw.Reached(cache.bases, cache.bases, False)
    assert copy(paged, bases, 1024, src_index=cached, stream=w.stream).engine == "staged"
    assert copy(paged, bases, 16, src_index=cached, stream=w.stream).engine == "kernel"
    w.close()
