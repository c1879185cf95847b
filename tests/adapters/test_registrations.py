"""Host memory that somebody else registered, piece by piece: no copy spans an end, and what changed since is seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw.adapters import copies, deferred_errors, sglang, sglang_direct, tensors, vllm
from kvraw.adapters.lmcache import _objects
from kvraw.copying import pointer_tables
from kvraw.copying.addresses import resolve
from kvraw.copying.device_state import device_state
from kvraw.runtime.context import DeviceScope
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.torch_like import Tensor, TorchLike

PAGE = 4096


class Pieces:
    """Pages of host memory, the first of which are registered one by one."""

    def __init__(self, fake: FakeDriver, w: TorchLike, pages: int, registered: int) -> None:
        self._memory = np.random.default_rng(0).integers(0, 256, (pages + 1) * PAGE, dtype=np.uint8)
        begin = -int(self._memory.ctypes.data) % PAGE
        self.bytes = self._memory[begin : begin + pages * PAGE]
        self.address, self._fake, self._w = int(self.bytes.ctypes.data), fake, w
        self.begun: list[int] = []
        for page in range(registered):
            self.register(page)

    def register(self, page: int, count: int = 1) -> None:
        with DeviceScope(0):
            self._fake.host_register(self.address + page * PAGE, count * PAGE)
        self.begun.append(page)

    def unregister(self, page: int) -> None:
        self._w.synchronize()
        with DeviceScope(0):
            self._fake.host_unregister(self.address + page * PAGE)
        self.begun.remove(page)

    def tensor(self, offset: int, shape: tuple[int, int]) -> Tensor:
        base: Any = SimpleNamespace(
            kind="host", address=self.address, nbytes=len(self.bytes), world=self._w, host=lambda: self.bytes
        )
        return Tensor(base, offset, shape, (shape[1], 1), "uint8")

    def close(self) -> None:
        for page in list(self.begun):
            self.unregister(page)


@pytest.fixture
def w(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchLike]:
    deferred_errors._found[0].clear()
    vllm._pieces.cache_clear()
    sglang_direct._by_value.clear()
    made = TorchLike(0).install(monkeypatch)
    yield made
    made.synchronize()
    vllm._pieces.cache_clear()
    sglang_direct._by_value.clear()


def swap(w: TorchLike, src: list[int], dst: list[int], sizes: list[int], current: bool = True) -> None:
    given = [w.put("host", np.array(x, np.int64)) for x in (src, dst, sizes)]
    with DeviceScope(0) if current else contextlib.nullcontext():  # torch's context mostly is
        vllm.swap_blocks_batch(*given)


@pytest.mark.parametrize("current", [True, False])
@pytest.mark.parametrize("sizes", [[64, 64], [64, 48, 16, 24, 32, 40]])
def test_vllm_neighbours_on_both_sides_of_an_end(
    fake: FakeDriver, w: TorchLike, monkeypatch: pytest.MonkeyPatch, sizes: list[int], current: bool
) -> None:
    monkeypatch.setenv("KVRAW_ENGINE", "copy")
    host, device = Pieces(fake, w, 2, 2), w.put("device", np.zeros(2048, np.uint8))
    at = [PAGE - 64, PAGE, *range(0, 1000, 200)][: len(sizes)]
    to = [0, 64, *range(200, 1200, 200)][: len(sizes)]
    swap(w, [host.address + a for a in at], [device.data_ptr() + b for b in to], sizes, current)
    want = np.zeros(2048, np.uint8)
    for a, b, n in zip(at, to, sizes, strict=True):
        want[b : b + n] = host.bytes[a : a + n]
    np.testing.assert_array_equal(w.take(device), want)
    host.close()


@pytest.mark.parametrize("sizes", [[64, 300], [300, 64, 16, 24, 32, 40]])
@pytest.mark.parametrize("to_host", [True, False])
def test_vllm_a_range_whose_tail_is_pageable(fake: FakeDriver, w: TorchLike, to_host: bool, sizes: list[int]) -> None:
    host, filled = Pieces(fake, w, 2, 1), np.random.default_rng(1).integers(0, 256, 4096, dtype=np.uint8)
    device = w.put("device", filled)
    at = [PAGE - 200 if n == 300 else 100 * k for k, n in enumerate(sizes)]
    ends = [host.address + a for a in at], [device.data_ptr() + 400 * k for k in range(len(sizes))]
    want = host.bytes.copy()
    for k, (a, n) in enumerate(zip(at, sizes, strict=True)):
        cut = filled[400 * k : 400 * k + n], want[a : a + n]
        cut[to_host][:] = cut[not to_host]
    swap(w, *(ends[::-1] if to_host else ends), sizes)
    w.synchronize()
    np.testing.assert_array_equal(host.bytes, want)
    np.testing.assert_array_equal(w.take(device), filled)
    host.close()


def test_vllm_addresses_that_are_none(w: TorchLike) -> None:
    device = w.empty("device", (256,))
    with pytest.raises(kvraw.BoundsError, match=r"src_ptrs\[1\] is 0"):
        swap(w, [0, 0], [device.data_ptr()] * 2, [0, 8])


@pytest.mark.parametrize("mixed", [False, True])
def test_what_is_found_of_ranges(fake: FakeDriver, w: TorchLike, mixed: bool) -> None:
    host, device = Pieces(fake, w, 3, 2), w.empty("device", (256,))
    at = np.array([host.address + PAGE, device.data_ptr(), host.address + PAGE - 64], np.uint64)
    with DeviceScope(0):
        found = resolve(at, np.array([8, 256, 64], np.uint64) if mixed else 64)
    assert (found.devices, found.link, found.pageable) == (frozenset([0]), True, False)
    assert set(found.edges) == {host.address + PAGE, host.address + 2 * PAGE, device.data_ptr() + 256}
    over = resolve(at, np.array([PAGE + 1, 256, 64], np.uint64) if mixed else PAGE + 65, ends=True)
    assert over.pageable
    host.close()


def test_lmcache_objects_side_by_side(fake: FakeDriver, w: TorchLike) -> None:
    host = Pieces(fake, w, 2, 2)
    row = _objects.reach([host.address + PAGE - 64, host.address + PAGE], 64, 0)
    assert row.link
    assert set(row.edges) == {host.address + PAGE, host.address + 2 * PAGE}
    host.close()


@pytest.mark.parametrize("to_host", [True, False])
def test_lmcache_objects_side_by_side_are_no_one_copy(
    fake: FakeDriver, w: TorchLike, monkeypatch: pytest.MonkeyPatch, to_host: bool
) -> None:
    """One layer whose blocks follow each other on both sides: only the end of a registration keeps them apart."""
    assert w.stream is not None
    handle = w.stream.handle
    monkeypatch.setenv("KVRAW_ENGINE", "copy")
    monkeypatch.setattr(tensors, "_raw_stream", lambda device: handle)
    host, array = Pieces(fake, w, 2, 2), np.random.default_rng(1).integers(0, 256, (4, 2, 16), dtype=np.uint8)
    cache, d = w.put("device", array), ops.PageBufferShapeDesc()
    d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size = 1, 1, 4, 2, 1, 16, 1
    objects = [host.address + PAGE - 64, host.address + PAGE]
    rows = host.bytes[PAGE - 64 : PAGE + 64].reshape(4, 2, 16)
    want = (array if to_host else rows).copy()
    ops.multi_layer_block_kv_transfer([cache.data_ptr()], objects, [0, 1, 2, 3], 0, int(to_host), d, 4, 3, 0)
    np.testing.assert_array_equal(w.take(cache), want)
    np.testing.assert_array_equal(rows, want)
    host.close()


@pytest.mark.parametrize("to_host", [True, False])
def test_sglang_runs_over_an_end(fake: FakeDriver, w: TorchLike, to_host: bool) -> None:
    host = Pieces(fake, w, 2, 2)
    rows, array = host.tensor(0, (128, 64)), np.random.default_rng(1).integers(0, 256, (128, 64), dtype=np.uint8)
    device, index = w.put("device", array), w.put("host", np.arange(40, 90))
    ends, moved = ([device], [rows]) if to_host else ([rows], [device]), slice(40, 90)
    ranges = host.bytes.reshape(128, 64), array
    want = [x.copy() for x in ranges]
    want[not to_host][moved] = want[to_host][moved]
    sglang.transfer_kv_direct(*ends, index, index, 1)
    w.synchronize()
    np.testing.assert_array_equal(ranges[0], want[0])
    np.testing.assert_array_equal(w.take(device), want[1])
    want[not to_host][:] = want[to_host]
    sglang.transfer_embedding_ranges_direct(ends[0][0], ends[1][0], [0], [0], [128])
    w.synchronize()
    np.testing.assert_array_equal(ranges[0], want[0])
    np.testing.assert_array_equal(w.take(device), want[1])
    host.close()


def test_sglang_direct_memory_that_is_pinned_otherwise_since(fake: FakeDriver, w: TorchLike) -> None:
    host = Pieces(fake, w, 2, 0)
    host.register(0, 2)
    rows, device = host.tensor(0, (128, 64)), w.put("device", np.zeros((128, 64), np.uint8))
    index = w.put("host", np.arange(128))
    for pages in ([0, 1], [0], []):
        for _ in range(3):  # from the third on it is bound
            host.bytes += 1
            sglang.transfer_kv_direct([rows], [device], index, index, 1)
            np.testing.assert_array_equal(w.take(device), host.bytes.reshape(128, 64))
        host.close()
        host.bytes += 1
        for page in pages:
            host.register(page)
    sglang.transfer_kv_direct([rows], [device], index, index, 1)
    np.testing.assert_array_equal(w.take(device), host.bytes.reshape(128, 64))


@pytest.mark.parametrize("engine", ["kernel", "copy"])
@pytest.mark.parametrize("to_host", [True, False])
def test_vllm_blocks_in_memory_that_is_pinned_otherwise_since(
    fake: FakeDriver, w: TorchLike, monkeypatch: pytest.MonkeyPatch, to_host: bool, engine: str
) -> None:
    monkeypatch.setenv("KVRAW_ENGINE", engine)
    host = Pieces(fake, w, 2, 0)
    host.register(0, 2)
    rows, array = host.tensor(0, (128, 64)), np.random.default_rng(2).integers(0, 256, (128, 64), dtype=np.uint8)
    device, order = w.put("device", array), np.random.default_rng(3).permutation(128)
    mapping = w.put("host", np.stack([np.arange(128), order], 1))
    ends = (device, rows) if to_host else (rows, device)
    for pages in ([0, 1], [0], [], [0, 1]):
        for _ in range(3):
            host.bytes += 1
            vllm.swap_blocks(*ends, 64, mapping)
            w.synchronize()
            if to_host:
                np.testing.assert_array_equal(host.bytes.reshape(128, 64)[order], array)
            else:
                np.testing.assert_array_equal(w.take(device)[order], host.bytes.reshape(128, 64))
        host.close()
        for page in pages:
            host.register(page)
    host.close()


def test_sglang_kernel_asks_about_both_planes(fake: FakeDriver, w: TorchLike) -> None:
    host = Pieces(fake, w, 2, 0)
    host.register(0, 2)
    keys, values = host.tensor(0, (64, 64)), host.tensor(PAGE, (64, 64))
    device = [w.put("device", np.zeros((64, 64), np.uint8)) for _ in range(2)]
    index = w.put("device", np.arange(5))
    call = keys, device[0], values, device[1], index, index, 64
    sglang.transfer_kv_per_layer(*call)
    host.close()
    host.register(0)
    with pytest.raises(kvraw.PlacementError, match="pageable host memory"):
        sglang.transfer_kv_per_layer(*call)
    host.close()


def test_sglang_kernel_memory_that_is_pinned_otherwise_since(fake: FakeDriver, w: TorchLike) -> None:
    """The launch that was bound to it is not run any more: the driver's number of the memory is another."""
    host = Pieces(fake, w, 1, 1)
    rows, array = host.tensor(0, (64, 64)), np.random.default_rng(1).integers(0, 256, (64, 64), dtype=np.uint8)
    device, index = w.put("device", array), w.put("device", np.arange(64))
    seen = set[int]()
    for _ in range(3):
        seen.add(fake.pointer_number(host.address))
        for _ in range(2):
            host.bytes += 1
            sglang.transfer_kv_per_layer_mla(rows, device, index, index, 64)
            np.testing.assert_array_equal(w.take(device), host.bytes.reshape(64, 64))
        host.unregister(0)
        with pytest.raises(kvraw.PlacementError, match="pageable host memory"):
            sglang.transfer_kv_per_layer_mla(rows, device, index, index, 64)
        host.register(0)
    assert len(seen) == 3
    host.close()


def test_tensors_that_are_given_other_memory_or_another_shape(w: TorchLike) -> None:
    group = [w.empty("device", (8, 16)) for _ in range(5)]
    made: list[int] = []

    def make() -> Any:
        made.append(1)
        return sglang_direct.Known(None, copies.bound_copies((), ()), (0, 0))

    for _ in range(2):
        sglang_direct.known(("test",), ("src", "dst"), group, group, make)
    group[3].shape, group[3]._strides = (16, 8), (8, 1)
    sglang_direct.known(("test",), ("src", "dst"), group, group, make)
    assert len(made) == 2
    state, table = device_state(0), w.put("device", np.array([4096, 8192], np.uint64))
    assert w.stream is not None
    with DeviceScope(0):
        pointer_tables.device_table_bits(table, state, w.stream.handle)
        w.synchronize()
        state.completions.drain()
        assert pointer_tables.device_table_bits(table, state, w.stream.handle) == 4096 | 8192
        table.base = w.put("device", np.array([4096, 8], np.uint64)).base
        assert pointer_tables.device_table_bits(table, state, w.stream.handle) == 8  # not known yet
        w.synchronize()
