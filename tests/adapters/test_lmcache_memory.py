"""Host memory: every pair, what is refused, and that nothing is left behind."""

from __future__ import annotations

import ctypes
import uuid
from pathlib import Path
from typing import Any

import pytest

import kvraw.adapters.lmcache as ops
from kvraw.adapters.lmcache import _host, _memory
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import locate

KINDS = ["pinned", "numa", "pinned_numa", "shm_pinned"]


def alloc(kind: str, size: int) -> int:
    extra = {"numa": (0,), "pinned_numa": (0,), "pinned": (0,)}.get(kind, ())
    return int(getattr(ops, f"alloc_{kind}_ptr")(size, *extra))


def free(kind: str, ptr: int, size: int) -> None:
    getattr(ops, f"free_{kind}_ptr")(*((ptr,) if kind == "pinned" else (ptr, size)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 4095, 4096, 100_000])
def test_every_pair(place: int | None, kind: str, size: int) -> None:
    live = dict(_memory._live)
    ptr = alloc(kind, size)
    assert ptr % 4096 == 0
    array = (ctypes.c_uint8 * size).from_address(ptr)
    assert bytes(array) == bytes(size)
    array[size - 1] = 7
    if place is not None:
        with DeviceScope(place):
            assert bool(locate(ptr, size).device_address) == (kind != "numa")
    free(kind, ptr, size)
    assert _memory._live == live
    with pytest.raises(RuntimeError, match="is unknown"):
        free(kind, ptr, size)


@pytest.mark.parametrize("kind", [*KINDS, "hugepage_pinned", "hugepage_pinned_numa"])
def test_null_and_unknown(kind: str) -> None:
    free(kind, 0, 0)
    with pytest.raises(RuntimeError, match=rf"free_{kind}_ptr: address 0x\w+ is unknown"):
        free(kind, 0xDEAD000, 1)
    with pytest.raises(ValueError, match="size is 0, must be positive"):
        getattr(ops, f"alloc_{kind}_ptr")(0)


def test_kinds_and_sizes_must_fit() -> None:
    ptr = ops.alloc_numa_ptr(4096, 0)
    with pytest.raises(RuntimeError, match="is of alloc_numa_ptr"):
        ops.free_pinned_ptr(ptr)
    with pytest.raises(RuntimeError, match=r"size is 8192, address 0x\w+ has 4096 bytes"):
        ops.free_numa_ptr(ptr, 8192)
    ops.free_numa_ptr(ptr)


def test_texts_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for node in (63, 64, 1000):
        with pytest.raises(RuntimeError, match="mbind failed: "):
            ops.alloc_numa_ptr(4096, node)
    with pytest.raises(RuntimeError, match="mbind failed: node -1"):
        ops.alloc_pinned_numa_ptr(4096, -1)
    with pytest.raises(RuntimeError, match="mmap failed: Cannot allocate memory"):
        ops.alloc_numa_ptr(1 << 60, 0)


def test_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    if not pool.exists() or int(pool.read_text()) < 1:
        with pytest.raises(RuntimeError, match="mmap failed: "):
            ops.alloc_hugepage_pinned_ptr(100, 0)
        real = _host.map_memory  # the rest of the way on ordinary pages
        monkeypatch.setattr(_host, "map_memory", lambda nbytes, huge=False: real(nbytes))
    for alloc_, free_ in (
        (ops.alloc_hugepage_pinned_ptr, ops.free_hugepage_pinned_ptr),
        (ops.alloc_hugepage_pinned_numa_ptr, ops.free_hugepage_pinned_numa_ptr),
    ):
        ptr = alloc_(100, 0)
        assert (ctypes.c_uint8 * (2 << 20)).from_address(ptr)[(2 << 20) - 1] == 0
        free_(ptr, 100)


def test_shared_segments() -> None:
    name = f"/kvraw-test-{uuid.uuid4().hex}"
    path = Path("/dev/shm") / name[1:]
    path.write_bytes(b"stale")
    ptr = ops.alloc_shm_pinned_ptr(8192, name)
    assert path.stat().st_size == 8192
    assert path.stat().st_mode & 0o777 == 0o600
    ctypes.memset(ptr, 9, 8192)
    assert path.read_bytes() == b"\x09" * 8192
    ops.free_shm_pinned_ptr(ptr, 8192, name)
    assert not path.exists()
    with pytest.raises(RuntimeError, match=r"No space left|Cannot allocate|File too large"):
        ops.alloc_shm_pinned_ptr(1 << 50, name)
    assert not path.exists()
    with pytest.raises(ValueError, match="a name without slashes"):
        ops.alloc_shm_pinned_ptr(8, "a/b")


@pytest.mark.parametrize("kind", ["pinned", "pinned_numa", "shm_pinned"])
def test_nothing_is_left_where_pinning_fails(fake: Any, kind: str) -> None:
    shared = set(Path("/dev/shm").iterdir())
    fake.fail("host_register", 1, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        alloc(kind, 4096)
    assert fake.live()["blocks"] == 0
    assert set(Path("/dev/shm").iterdir()) <= shared


def test_a_copy_in_flight_is_waited_for(fake: Any) -> None:
    from tests.helpers.memory import Laid

    laid = Laid("device", [(2, 3, 2, 1, 8)], 0, 1)
    ptr = ops.alloc_pinned_ptr(64, 0)
    d = ops.PageBufferShapeDesc()
    d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size = 2, 1, 3, 2, 1, 8, 1
    for _ in range(4):
        ops.multi_layer_block_kv_transfer(laid.addresses, [ptr], [2], 0, 1, d, 2, 1, 0)
    ops.free_pinned_ptr(ptr)
    assert not fake.violations
    assert driver() is fake
    laid.close()
