"""Pinned host memory of every kind, on the emulator and on a GPU: copies, cuts, growth, sharing."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kvraw
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.host.mapping import HostOptions
from kvraw.runtime.host.registration import boundaries
from kvraw.runtime.memory import locate
from tests.helpers.world import TOKENS, World

MIB = 1 << 20
SIZE = 4 * MIB


@pytest.fixture
def world(device: int) -> Iterator[World]:
    w = World(device)
    yield w
    w.close()


def pools(device: int) -> dict[str, Callable[[], kvraw.HostPool]]:
    array = np.zeros(SIZE + 4096, np.uint8)
    inside = int(array.ctypes.data) + -int(array.ctypes.data) % 4096

    def made(**options: object) -> Callable[[], kvraw.HostPool]:
        return lambda: kvraw.HostPool(SIZE, device=device, options=HostOptions(**options))  # type: ignore[arg-type]

    return {
        "anonymous": made(),
        "in steps": made(step_bytes=MIB),
        "growing": made(grow=True, first_bytes=MIB, step_bytes=MIB),
        "huge-2MiB": made(kind="huge-2MiB"),
        "bound": made(node="device"),
        "shared": made(kind="shared"),
        "pinned": made(kind="pinned"),
        "in place": lambda: kvraw.HostPool.from_pointer(inside, SIZE, device=device, owner=array, step_bytes=MIB),
    }


@pytest.mark.parametrize("kind", list(pools(0)))
def test_chunks_of_every_kind(world: World, kind: str) -> None:
    with pools(world.device)[kind]() as pool:
        info = pool.info()
        assert pool.pinned
        assert info["pinned_bytes"] == info["ready_bytes"]
        chunks = pool.chunks(2, world.cache.chunk_bytes(TOKENS))
        ids = [9, 0, 33, 2, 17]
        kvraw.store(world.cache, chunks, ids, stream=world.stream).wait()
        rows = np.concatenate([c.numpy().reshape(world.chunk(0).shape) for c in chunks], axis=2)[:, :, :5]
        np.testing.assert_array_equal(rows, world.paged[:, :, ids].transpose(1, 0, 2, 3, 4, 5))
        other = [4, 5, 6, 7, 8]
        kvraw.load(world.cache, chunks, other, stream=world.stream).wait()
        np.testing.assert_array_equal(world.now()[:, :, other], world.paged[:, :, ids])
        pool.wait_ready(60)
        assert pool.info()["pinned_bytes"] == SIZE
        with DeviceScope(world.device):
            found = driver().pointer_info(chunks[0].address)
        assert found is not None
        assert found.kind == "host"
        view = chunks[0].numpy()
        want = view.copy()
    gc.collect()
    np.testing.assert_array_equal(view, want)  # unpinned or not, the bytes stay while somebody looks at them
    if kind != "pinned":
        assert not locate(pool.address, 1).device_address


def test_copies_are_cut_where_registrations_meet(world: World) -> None:
    n = world.paged.nbytes
    with kvraw.HostPool(2 * MIB, device=world.device, options=HostOptions(step_bytes=MIB // 2)) as pool:
        (chunk,) = pool.chunks(1, 2 * MIB)
        base = np.uint64(chunk.address + MIB // 2 - n // 2)
        dst, size = np.array([base], np.uint64), np.array([n], np.uint64)
        rows, cuts = boundaries(dst, size)
        assert rows.tolist() == [0]
        assert cuts.tolist() == [chunk.address + MIB // 2]
        first = int(cuts[0]) - int(base)
        parts = [0, first], [first, n - first]
        host, paged = ([start + at for at in parts[0]] for start in (int(base), world.memory.address))
        kvraw.memcpy_batch(host, paged, parts[1], stream=world.stream, device=world.device).wait()
        np.testing.assert_array_equal(pool.view(int(base), n), world.paged.ravel())


def test_one_segment_in_two_buffers(world: World) -> None:
    options = HostOptions(kind="shared")
    with kvraw.HostPool(SIZE, device=world.device, options=options) as pool:
        (chunk,) = pool.chunks(1, world.cache.chunk_bytes(TOKENS))
        with kvraw.HostBuffer.attach(str(pool.name), device=world.device) as other:
            assert other.pinned
            kvraw.store(world.cache, [chunk], [3], stream=world.stream).wait()
            seen = other.view(other.address + chunk.address - pool.address, chunk.nbytes)
            np.testing.assert_array_equal(seen, chunk.numpy())
            chunk.numpy()[:] = 0
            kvraw.load(world.cache, [seen], [3], stream=world.stream, chunk_tokens=TOKENS).wait()
            assert not world.now()[:, :, 3].any()
        assert os.path.exists(f"/dev/shm/{pool.name}")
    assert not os.path.exists(f"/dev/shm/{pool.name}")


def test_registering_twice(world: World) -> None:
    with kvraw.HostPool(SIZE, pin=False) as pool:
        first = kvraw.Registration(pool.address, SIZE, world.device)
        second = kvraw.Registration(pool.address, SIZE, world.device)
        first.close()
        assert locate(pool.address, 1).device_address
        second.close()
        assert not locate(pool.address, 1).device_address


def test_a_pool_closes_under_transfers(world: World) -> None:
    for _ in range(3):
        pool = kvraw.HostPool(8 * MIB, device=world.device)
        chunks = pool.chunks(6, world.cache.chunk_bytes(TOKENS))
        for _ in range(8):
            kvraw.store(world.cache, chunks, np.arange(24), stream=world.stream)
        view = chunks[5].numpy()
        pool.free(chunks)
        pool.close(timeout=60)
        rows = view.reshape(world.chunk(0).shape)
        np.testing.assert_array_equal(rows, world.paged[:, :, 20:24].transpose(1, 0, 2, 3, 4, 5))


def test_a_pool_that_is_dropped_stays_pinned_under_a_transfer(world: World) -> None:
    pool = kvraw.HostPool(SIZE, device=world.device, options=HostOptions(step_bytes=MIB))
    (chunk,) = pool.chunks(1, world.cache.chunk_bytes(TOKENS))
    address, view = chunk.address, chunk.numpy()
    transfer = kvraw.store(world.cache, [view], [5, 6], stream=world.stream)
    del pool, chunk
    gc.collect()
    assert locate(address, 1).device_address
    transfer.wait()
    rows = view.reshape(world.chunk(0).shape)[:, :, :2]
    np.testing.assert_array_equal(rows, world.paged[:, :, 5:7].transpose(1, 0, 2, 3, 4, 5))
    del view, rows, transfer
    gc.collect()
    assert not locate(address, 1).device_address
