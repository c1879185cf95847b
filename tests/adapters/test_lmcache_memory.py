"""Host memory: every pair, what is refused, and that nothing is left behind."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw.adapters.lmcache import _memory
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver, driver_or_none
from kvraw.runtime.host import backing, libc, shm
from kvraw.runtime.memory import locate
from tests.helpers.leaks import segments

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
        real = libc.map_anonymous  # the rest of the way on ordinary pages
        monkeypatch.setattr(libc, "map_anonymous", lambda nbytes, **_: real(nbytes, align=2 << 20))
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


START = """
import os, signal, sys
import kvraw.adapters.lmcache as ops
from kvraw.runtime.host import shm
shm.FOLDER = sys.argv[1]
ptr = ops.alloc_shm_pinned_ptr(1 << 20, sys.argv[2])
print(os.listdir(shm.FOLDER), flush=True)
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of segments of its own: others of this machine are swept by whoever comes by."""
    path = Path(f"/dev/shm/kvraw-tests-{uuid.uuid4().hex}")
    path.mkdir()
    monkeypatch.setattr(shm, "FOLDER", str(path))
    yield path
    left = sorted(path.iterdir())
    shutil.rmtree(path)
    assert not left


@pytest.mark.parametrize("name", ["", "/lm-segment"])
@pytest.mark.parametrize("end", ["", "1 / 0", "os.kill(os.getpid(), signal.SIGTERM)", "os._exit(0)"])
def test_shared_segments_of_a_process_that_ends(folder: Path, name: str, end: str) -> None:
    command = [sys.executable, "-c", START + end, str(folder), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("kvraw-") == 1
    assert "/" in end or not done.stderr
    assert any(folder.iterdir()) == ("os." in end)  # what it had no chance to remove ...
    ops.free_shm_pinned_ptr(ops.alloc_shm_pinned_ptr(4096))  # ... the next one sweeps
    assert not any(folder.iterdir())


def test_a_free_takes_no_segment_that_another_process_made(folder: Path) -> None:
    ptr = ops.alloc_shm_pinned_ptr(4096, "lm-segment")
    code = START + "sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), "lm-segment"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout is not None
        assert b"lm-segment" in other.stdout.readline()
        ops.free_shm_pinned_ptr(ptr, 4096, "lm-segment")
        assert kvraw.sweep_shared_memory() == []
        assert (folder / "lm-segment").stat().st_size == 1 << 20
        other.communicate()
    assert other.returncode == 0


def test_a_shared_segment_that_cannot_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "taken").mkdir()
    with pytest.raises(RuntimeError, match=r"shm_open failed: 'taken', 4096 bytes: cannot replace"):
        ops.alloc_shm_pinned_ptr(4096, "taken")
    (folder / "taken").rmdir()
    monkeypatch.setattr(shm, "FOLDER", "/nowhere")
    with pytest.raises(RuntimeError, match=r"shm_open failed: 'x', 4096 bytes: .*/nowhere is not there"):
        ops.alloc_shm_pinned_ptr(4096, "x")


@pytest.mark.parametrize("place", [None, 0])
def test_pinned_memory_is_backed(place: int | None, request: pytest.FixtureRequest) -> None:
    """The first pass over it costs no page faults, with a driver or without one."""
    if place is not None:
        request.getfixturevalue("fake")
    elif driver_or_none() is not None:
        pytest.skip("there is a driver")
    size = 8 << 20
    ptr = ops.alloc_pinned_ptr(size)
    pages = [int(value[:-3]) for value in smaps(ptr, "Rss")]
    assert sum(pages) * 1024 >= size
    ops.free_pinned_ptr(ptr)


def smaps(address: int, key: str) -> list[str]:
    """What the kernel says of the mapping that an address lies in."""
    with open("/proc/self/smaps") as file:
        text = file.read()
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        begin, end = (int(x, 16) for x in part.split(" ", 1)[0].split("-"))
        if begin <= address < end:
            return re.findall(rf"^{key}: +(.*)$", part, re.M)
    return []


@pytest.mark.parametrize("kind", ["pinned", "pinned_numa", "numa", "shm_pinned"])
def test_more_than_the_control_group_may_have(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(backing, "cgroup_limit", lambda: 4096)
    error = MemoryError if kind == "pinned" else RuntimeError
    with pytest.raises(error, match=r"8192 bytes of host memory.*the control group's limit is 4096 bytes"):
        alloc(kind, 8192)


@pytest.mark.parametrize("kind", ["pinned_numa", "shm_pinned"])
def test_memory_that_the_driver_keeps_stays_mapped(fake: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    unmapped: list[int] = []
    real = libc.unmap
    monkeypatch.setattr(libc, "unmap", lambda *a: (unmapped.append(a[1]), real(*a))[1])
    monkeypatch.setenv("KVRAW_REGISTER_BYTES", str(2 << 20))
    fake.fail("host_register", 2, "CUDA_ERROR_OUT_OF_MEMORY")
    fake.fail("host_unregister", 1, "CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        alloc(kind, 4 << 20)
    assert 4 << 20 not in unmapped


@pytest.mark.parametrize("kind", ["pinned", "pinned_numa", "shm_pinned"])
def test_nothing_is_left_where_pinning_fails(fake: Any, kind: str) -> None:
    shared = segments()
    fake.fail("host_register", 1, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        alloc(kind, 4096)
    assert fake.live()["blocks"] == 0
    assert segments() == shared


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
