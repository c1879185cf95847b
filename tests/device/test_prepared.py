"""Plans from two sides, addresses and indices at each call: on the emulator, a GPU and the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

import kvraw
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import PinnedBuffer
from tests.helpers.backends import device_ids

ROWS, ROW, LAYERS = 50, 48, 3
# Per-layer tables on one side, [row, layer] on the other: gather rows by one index, place them by another.
PLAN = kvraw.CopyPlan(
    kvraw.Side(outer=ROW, table_layer=1, limit=ROWS, entries=LAYERS),
    kvraw.Side(outer=ROW * LAYERS, layer=ROW, limit=ROWS),
    layers=LAYERS, planes=1, tokens=1, heads=1, run=ROW,
)  # fmt: skip


class Rows:
    """Layers of rows on the device (or the host), and one pinned buffer of rows by row and layer."""

    def __init__(self, device: int | None) -> None:
        rng = np.random.default_rng(0)
        self.device = device
        self.layers = rng.integers(0, 256, (LAYERS, ROWS, ROW), dtype=np.uint8)
        self.pool = kvraw.HostPool(1 << 20, device=device)
        (self.mirror,), (self.flat,) = self.pool.chunks(1, self.layers.nbytes), self.pool.chunks(1, self.layers.nbytes)
        self.mirror.numpy()[:] = self.layers.ravel()
        self.flat.numpy()[:] = 7
        self.stream, address = None, self.mirror.address
        if device is not None:
            self.stream = kvraw.Stream(device)
            self.memory = kvraw.DeviceBuffer(self.layers.nbytes, device)
            address = self.memory.address
            with DeviceScope(device):
                driver().memcpy_async(address, self.mirror.address, self.layers.nbytes, self.stream.handle)
                self.stream.synchronize()
        self.bases = [address + k * ROWS * ROW for k in range(LAYERS)]

    def now(self) -> np.ndarray:
        return self.flat.numpy().reshape(ROWS, LAYERS, ROW)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()
        self.pool.close()


@pytest.fixture(params=["cpu", "emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    place = {"cpu": None, "emulator": 0, "gpu": 0}[request.param]
    if place is not None:
        request.getfixturevalue("gpu" if request.param == "gpu" else "fake")
    made = Rows(place)
    yield made
    made.close()


def expect(rows: Rows, src: list[int], dst: list[int]) -> np.ndarray:
    want = np.full((ROWS, LAYERS, ROW), 7, np.uint8)
    for a, b in zip(src, dst, strict=True):
        want[b] = rows.layers[:, a]
    return want


def test_two_indices(rows: Rows) -> None:
    src, dst = [4, 49, 0, 7], [1, 0, 49, 30]
    engines = ["kernel", "copy", "auto"] if rows.device is not None else ["cpu", "reference", "auto"]
    for engine in engines:
        rows.flat.numpy()[:] = 7
        copy = kvraw.PreparedCopy(PLAN, device=rows.device, engine=engine)
        copy(rows.bases, [rows.flat.address], 4, src_index=src, dst_index=dst, stream=rows.stream).wait()
        np.testing.assert_array_equal(rows.now(), expect(rows, src, dst))


def test_no_index_and_a_first_item(rows: Rows) -> None:
    copy = kvraw.PreparedCopy(PLAN, device=rows.device)
    copy(rows.bases, [rows.flat.address], 5, first=10, stream=rows.stream).wait()
    np.testing.assert_array_equal(rows.now(), expect(rows, list(range(10, 15)), list(range(10, 15))))


def test_indices_on_the_device(device: int) -> None:
    rows = Rows(device)
    src, dst = (4, 60, 0), (1, 0, 49)
    assert rows.stream is not None
    ids = [device_ids(x, device, rows.stream) for x in (src, dst)]
    copy = kvraw.PreparedCopy(PLAN, device=device)(
        rows.bases, [rows.flat.address], 3, src_index=ids[0], dst_index=ids[1], stream=rows.stream
    )
    with pytest.raises(kvraw.BoundsError, match=r"src_index\[1\] is 60, must be in \[0, 50\)"):
        copy.wait()
    np.testing.assert_array_equal(rows.now(), expect(rows, [4, 0], [1, 49]))
    rows.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src_index": [50]}, r"src_index\[0\] is 50, must be in \[0, 50\)"),
        ({"dst_index": [-1]}, r"dst_index\[0\] is -1"),
        ({"src_index": []}, "src_index has 0 values, must have at least 1"),
        ({"src": [8]}, "src has 1 base addresses, must have at least 3"),
        ({"count": -1}, "count is -1"),
    ],
)
def test_bad_arguments(rows: Rows, change: dict[str, object], message: str) -> None:
    given = {"src": rows.bases, "dst": [rows.flat.address], "count": 1, "stream": rows.stream, **change}
    with pytest.raises(kvraw.BoundsError, match=message):
        kvraw.PreparedCopy(PLAN, device=rows.device)(**given)
    assert (rows.now() == 7).all()


def test_engines_and_places_must_fit(device: int) -> None:
    with pytest.raises(kvraw.LayoutError, match="engine is 'cpu' with device 0"):
        kvraw.PreparedCopy(PLAN, device=0, engine="cpu")
    rows = Rows(device)
    array = np.zeros(ROWS * LAYERS * ROW, np.uint8)
    with pytest.raises(kvraw.PlacementError, match=r"dst\[0\] at 0x\w+ is pageable"):
        kvraw.PreparedCopy(PLAN, device=device)(rows.bases, [array.ctypes.data], 1, stream=rows.stream)
    with pytest.raises(kvraw.PlacementError, match=rf"src\[0\] is 0x\w+, memory of device {device}"):
        kvraw.PreparedCopy(PLAN, device=None)(rows.bases, [array.ctypes.data], 1)
    rows.close()


class Mapped:
    """Ids in pinned memory, as the device sees them, that say of themselves that a GPU reads them."""

    dtype = "int64"

    def __init__(self, values: list[int], device: int) -> None:
        self._memory = PinnedBuffer(max(8 * len(values), 8), device)
        (ctypes.c_int64 * len(values)).from_address(self._memory.address)[:] = values
        self.__cuda_array_interface__ = {
            "shape": (len(values),), "typestr": "<i8", "data": (self._memory.device_address, False), "version": 3,
        }  # fmt: skip


def test_ids_in_mapped_memory_and_none_at_all(device: int) -> None:
    rows = Rows(device)
    copy = kvraw.PreparedCopy(PLAN, device=device)
    src, dst = Mapped([4, 49], device), Mapped([1, 0], device)
    copy(rows.bases, [rows.flat.address], 2, src_index=src, dst_index=dst, stream=rows.stream).wait()
    np.testing.assert_array_equal(rows.now(), expect(rows, [4, 49], [1, 0]))
    none = Mapped([], device)
    none.__cuda_array_interface__["data"] = (0, False)  # as some libraries have it
    assert copy(rows.bases, [rows.flat.address], 0, src_index=none, dst_index=none, stream=rows.stream).engine == "none"
    rows.close()
