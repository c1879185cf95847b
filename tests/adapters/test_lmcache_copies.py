"""Single and batched copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from tests.helpers.memory import Laid, Memory, Tensor


@pytest.mark.parametrize("nbytes", [0, 1, 64, 65, 200])
@pytest.mark.parametrize("offset", [0, 16, 63])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_memcpy(place: int | None, nbytes: int, offset: int, direction: str) -> None:
    device = Laid("host" if place is None else "device", [(320,)], place, 1)
    host = Laid("host" if place is None else "pinned", [(320,)], place, 2)
    a, b = device.arrays[0][3 : 3 + nbytes], host.arrays[0][offset : offset + nbytes]
    ends = (host.addresses[0] + offset, device.addresses[0] + 3)
    if direction == "store":
        b[:] = a
        ops.lmcache_memcpy_async(*ends, nbytes, ops.D2H, offset, 64)
    else:
        a[:] = b
        ops.lmcache_memcpy_async(*ends[::-1], nbytes, ops.H2D, offset, 64)
    device.check()
    host.check()
    device.close()
    host.close()


def test_memcpy_over_neighbouring_registrations(device: int) -> None:
    page = 4096
    memory = np.random.default_rng(0).integers(0, 256, 4 * page, dtype=np.uint8)
    begin = -memory.ctypes.data % page
    where = memory.ctypes.data + begin
    target = Memory("device", np.zeros(2 * page, np.uint8), device)
    with kvraw.Registration(where, page, device), kvraw.Registration(where + page, page, device):
        ops.lmcache_memcpy_async(target.address, where + 100, page + 500, 0, 100, page)
        assert (target.read()[: page + 500] == memory[begin + 100 : begin + page + 600]).all()
    target.close()


def test_memcpy_of_tensors() -> None:
    a, b = Laid("host", [(64,)], None, 1), Laid("host", [(64,)], None, 2)
    a.arrays[0][:32] = b.arrays[0][:32]
    ops.lmcache_memcpy_async(a.tensors(4)[0], b.tensors(4)[0], 32, 0, 0, 64)
    a.check()
    with pytest.raises(TypeError, match="both addresses or both tensors"):
        ops.lmcache_memcpy_async(a.tensors(4)[0], b.addresses[0], 32, 0, 0, 64)
    with pytest.raises(ValueError, match="whole elements of dest"):
        ops.lmcache_memcpy_async(a.tensors(4)[0], b.tensors(4)[0], 33, 0, 0, 64)
    with pytest.raises(ValueError, match="and within it"):
        ops.lmcache_memcpy_async(a.tensors(4)[0], b.tensors(4)[0], 68, 0, 0, 64)
    with pytest.raises(ValueError, match="must be dense"):
        ops.lmcache_memcpy_async(Tensor(a.memory, 0, (4, 4), 1, (8, 1)), b.tensors(4)[0], 16, 0, 0, 64)


@pytest.mark.parametrize("apart", [True, False])
def test_large_copies_on_the_host(apart: bool) -> None:
    size = (9 << 20) + 5
    memory = np.random.default_rng(4).integers(0, 256, 2 * size + 7, dtype=np.uint8)
    at, want = (size + 3 if apart else 100), memory.copy()
    want[at : at + size] = memory[:size]
    start = int(memory.ctypes.data)
    ops.lmcache_memcpy_async(start + at, start, size, ops.D2H, 0, 1 << 26)
    np.testing.assert_array_equal(memory, want)


@pytest.mark.parametrize("alignment", [0, -64, 3, 96])
def test_bad_alignment(alignment: int) -> None:
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind, match="must be power of two"):
            ops.lmcache_memcpy_async(1 << 20, 1 << 21, 64, 0, 0, alignment)


def test_bad_ranges() -> None:
    with pytest.raises(ValueError, match=r"below 2\*\*64 together"):
        ops.lmcache_memcpy_async(1 << 20, 1 << 21, 64, 0, 2**64 - 8, 64)
    with pytest.raises(ValueError, match="nbytes is -1"):
        ops.lmcache_memcpy_async(1 << 20, 1 << 21, -1, 0, 0, 64)
    with pytest.raises(ValueError, match="dest is 0"):
        ops.lmcache_memcpy_async(0, 1 << 21, 64, 0, 0, 64)


def test_batched(place: int | None) -> None:
    a = np.random.default_rng(1).integers(0, 256, 4096, dtype=np.uint8)
    b = np.zeros(4096, np.uint8)
    src = [a.ctypes.data + k * 100 for k in range(40)]
    dst = [b.ctypes.data + (39 - k) * 100 for k in range(40)]
    sizes = [k % 7 * 10 for k in range(40)]
    ops.batched_memcpy(src, dst, sizes)
    want = np.zeros(4096, np.uint8)
    for k, n in enumerate(sizes):
        want[(39 - k) * 100 : (39 - k) * 100 + n] = a[k * 100 : k * 100 + n]
    np.testing.assert_array_equal(b, want)
    ops.batched_memcpy([], [], [])
    ops.batched_memcpy([0], [0], [0])


@pytest.mark.parametrize("count", [0, 1, 4, 5])
@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, lambda v: [np.uint64(x) for x in v], lambda v: [*map(np.int64, v)]]
)
def test_batched_kinds_of_numbers(count: int, kind: Callable[[Any], Any]) -> None:
    a, b = np.arange(1, 81, dtype=np.uint8), np.zeros(80, np.uint8)
    at, to = ([int(x.ctypes.data) + 16 * k for k in range(count)] for x in (a, b))
    ops.batched_memcpy(kind(at), kind(to), kind([16] * count))
    np.testing.assert_array_equal(b, np.where(np.arange(80) < 16 * count, a, 0))


@pytest.mark.parametrize("unit", [64, 1 << 20])
def test_batched_copies_that_depend_on_each_other(unit: int) -> None:
    a = np.random.default_rng(1).integers(0, 256, 5 * unit, dtype=np.uint8)
    want = a.copy()
    at = int(a.ctypes.data)
    for k in range(4):  # each copy reads what the one before wrote
        want[(k + 1) * unit : (k + 2) * unit] = want[k * unit : (k + 1) * unit].copy()
    ops.batched_memcpy([at + k * unit for k in range(4)], [at + (k + 1) * unit for k in range(4)], [unit] * 4)
    np.testing.assert_array_equal(a, want)
    shifted = a.copy()
    shifted[8:] = a[:-8]
    ops.batched_memcpy([at], [at + 8], [5 * unit - 8])  # a copy that overlaps itself
    np.testing.assert_array_equal(a, shifted)


def test_batched_bad_arguments() -> None:
    with pytest.raises(ValueError, match="equally sized"):
        ops.batched_memcpy([1], [1], [])
    with pytest.raises(TypeError, match="sizes holds a number outside"):
        ops.batched_memcpy([1], [1], [-1])
    with pytest.raises(TypeError, match="sizes holds a number outside"):
        ops.batched_memcpy([1], [1], np.array([-1]))
    with pytest.raises(ValueError, match="null address"):
        ops.batched_memcpy([0], [1], [1])
    a, b = np.ones(64, np.uint8), np.zeros(64, np.uint8)
    src, dst = ([int(x.ctypes.data) + 8 * k for k in range(6)] for x in (a, b))
    for sizes in (
        [3.9],
        [3.0, 3.0],
        [8, 8, 8, 8, 8, 3.9],
        (8, 8.5),
        np.array([8.0, 8.0]),
        np.full(2, 8.0, object),
    ):
        with pytest.raises(TypeError, match="sizes holds what is no integer"):
            ops.batched_memcpy(src[: len(sizes)], dst[: len(sizes)], sizes)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="src_ptrs holds what is no integer"):
        ops.batched_memcpy([float(src[0])], dst[:1], [8])  # type: ignore[list-item]
    assert not b.any()


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda x: np.array(x, object), lambda x: list(np.array(x))])
def test_batched_numbers_of_any_kind(kind: Callable[[list[int]], Any]) -> None:
    a, b = np.arange(96, dtype=np.uint8), np.zeros(96, np.uint8)
    src, dst = ([int(x.ctypes.data) + 16 * k for k in range(6)] for x in (a, b))
    ops.batched_memcpy(kind(src), kind(dst[::-1]), kind([16, 1, 0, 7, 16, 3]))
    want = np.zeros((6, 16), np.uint8)
    for k, n in enumerate([16, 1, 0, 7, 16, 3]):
        want[5 - k, :n] = a.reshape(6, 16)[k, :n]
    np.testing.assert_array_equal(b, want.ravel())


def test_pci_bus_id(device: int) -> None:
    found = ops.get_gpu_pci_bus_id(device)
    assert found is not None
    assert found == found.upper()
    assert len(found.split(":")) == 3
    for bad in (-1, 999):
        with pytest.raises(RuntimeError):
            ops.get_gpu_pci_bus_id(bad)


def test_streams_are_not_synchronised(fake: object) -> None:
    with DeviceScope(0):
        before = driver().calls["stream_synchronize"]  # type: ignore[attr-defined]
        a, b = Memory("device", np.zeros(64, np.uint8), 0), Memory("pinned", np.ones(64, np.uint8), 0)
        mid = driver().calls["stream_synchronize"]  # type: ignore[attr-defined]
        ops.lmcache_memcpy_async(a.address, b.address, 64, 0, 0, 64)
        assert driver().calls["stream_synchronize"] == mid >= before  # type: ignore[attr-defined]
    assert (a.read() == 1).all()
    a.close()
    b.close()
