"""LaunchCache by ids on the device that are bound: on the emulator and on a GPU, whole buffers compared."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.copying.device_state import DeviceState, device_state
from kvraw.copying.indexed import IndexedLaunch
from kvraw.copying.kernel import KernelPlan
from kvraw.copying.operands import DeviceTable
from kvraw.copying.plan import CopyPlan, Side
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.torch_like import TorchLike

ROWS, ROW, LAYERS = 16, 24, 3


class World:
    """Rows of layers on the device and in pinned memory, and a launch from one to the other."""

    def __init__(self, device: int, width: int, table: bool = False, index_of: str = "both") -> None:
        self.w, self.device = TorchLike(device), device
        rng = np.random.default_rng(0)
        self.arrays = [rng.integers(0, 256, (LAYERS, ROWS, ROW), dtype=np.uint8) for _ in "ab"]
        self.src, self.dst = (self.w.put(k, a) for k, a in zip(("device", "pinned"), self.arrays, strict=True))
        self.dtype = f"int{8 * width}"
        side = Side(outer=ROW, table_layer=1, limit=ROWS, entries=LAYERS)
        plan = CopyPlan(side, side, layers=LAYERS, planes=1, tokens=1, heads=1, run=ROW)
        with DeviceScope(device):
            self.state: DeviceState = device_state(device)
            self.number = driver().pointer_number(self.dst.data_ptr())
        pieces = [
            np.array([t.base.device_address + k * ROWS * ROW for k in range(LAYERS)], np.uint64)
            for t in (self.src, self.dst)
        ]
        tables: list[Any] = list(pieces)
        if table:
            self.table = self.w.put("device", pieces[0])
            tables[0] = DeviceTable(self.table.data_ptr(), LAYERS, 8)
        widths = (width, width) if index_of == "both" else (width, 0)
        self.pinned = (self.dst.data_ptr(), self.number)
        with DeviceScope(device):
            self.launch = IndexedLaunch(
                self.state, KernelPlan(plan), (tables[0], tables[1]), widths, pinned=[self.pinned]
            )
        self.on_error: list[Exception] = []
        self.kept: list[Any] = []

    def run(self, src: list[int], dst: list[int], scope: bool = True) -> Any:
        assert self.w.stream is not None
        ids = [self.w.put("device", np.array(x, self.dtype)) for x in (src, dst)]
        self.kept += ids
        args = self.w.stream.handle, ids[0].data_ptr(), ids[1].data_ptr(), len(src)
        if not scope:
            return self.launch.enqueue(*args, on_error=self.on_error.append, refs=ids)
        with DeviceScope(self.device):
            return self.launch.enqueue(*args, on_error=self.on_error.append, refs=ids)

    def expect(self, src: list[int], dst: list[int]) -> None:
        self.arrays[1][:, dst] = self.arrays[0][:, src]
        for tensor, array in zip((self.src, self.dst), self.arrays, strict=True):
            np.testing.assert_array_equal(self.w.take(tensor), array)


@pytest.fixture(params=[8, 4])
def width(request: pytest.FixtureRequest) -> int:
    """Bytes of an id."""
    return int(request.param)


@pytest.mark.parametrize("table", [False, True])
def test_ids_and_counts_that_change(device: int, width: int, table: bool) -> None:
    world = World(device, width, table)
    for src, dst in (
        ([3, 1, 2], [0, 5, 9]),
        ([7], [1]),
        (list(range(ROWS)), list(range(ROWS))[::-1]),
        ([2, 4], [4, 2]),
    ):
        assert world.run(src, dst) is not None
        world.expect(src, dst)
    assert not world.on_error


def test_items_that_are_their_own_ids(device: int, width: int) -> None:
    world = World(device, width, index_of="source")
    world.run([5, 3, 9], [0, 0, 0])
    world.expect([5, 3, 9], [0, 1, 2])


def test_a_bad_id_is_left_out_and_reported(device: int, width: int) -> None:
    world = World(device, width)
    done = world.run([3, ROWS, 2], [0, 5, 9])
    world.expect([3, 2], [0, 9])
    done.wait()
    assert isinstance(done.error, kvraw.BoundsError)
    assert str(done.error).startswith(f"src_index[1] is {ROWS}, must be in [0, {ROWS})")
    assert world.on_error == [done.error]
    assert world.run([1], [1]).error is None


def test_where_it_is_not_launched(fake: FakeDriver) -> None:
    """Nothing is enqueued, and nothing of the operation is left."""
    world = World(0, 8)
    assert world.w.stream is not None
    world.run([1], [2])
    world.expect([1], [2])
    before = fake.calls["launch"]
    with DeviceScope(1):
        assert world.run([3], [4], scope=False) is None
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(world.run([3], [4], scope=False)))
    with DeviceScope(0):
        ids = [world.w.put("device", np.array([k])) for k in (3, 4)]
    world.w.put = lambda kind, array: ids[int(array[0]) - 3]  # type: ignore[method-assign]
    thread.start()
    thread.join()
    assert found == [None]
    fake.capture(world.w.stream.handle, True)
    assert world.run([3], [4]) is None
    fake.capture(world.w.stream.handle, False)
    assert fake.calls["launch"] == before
    assert world.run([3], [4]) is not None
    world.expect([3], [4])
    with DeviceScope(0):
        world.state.completions.drain()


def test_memory_that_was_pinned_anew(fake: FakeDriver) -> None:
    """At the same address, with another number: whoever made the launch makes another."""
    world = World(0, 8)
    memory = np.zeros(8192, np.uint8)
    at = -(-int(memory.ctypes.data) // 4096) * 4096
    with DeviceScope(0):
        fake.host_register(at, 4096)
        number = fake.pointer_number(at)
        side = Side(outer=ROW, limit=ROWS)
        plan = KernelPlan(CopyPlan(side, side, layers=1, planes=1, tokens=1, heads=1, run=ROW))
        tables = np.array([world.src.data_ptr()], np.uint64), np.array([fake.host_device_address(at)], np.uint64)
        world.launch = IndexedLaunch(world.state, plan, tables, (8, 8), pinned=[(at, number)])
    assert world.run([1], [2]) is not None
    world.w.synchronize()
    with DeviceScope(0):
        fake.host_unregister(at)
        assert world.run([1], [2]) is None
        fake.host_register(at, 4096)
    assert world.run([1], [2]) is None
    with DeviceScope(0):
        fake.host_unregister(at)


def test_tables_that_are_too_long(fake: FakeDriver) -> None:
    side = Side(outer=ROW, table_layer=1, limit=ROWS, entries=300)
    plan = KernelPlan(CopyPlan(side, side, layers=300, planes=1, tokens=1, heads=1, run=ROW))
    table = np.full(300, 4096, np.uint64)
    with (
        DeviceScope(0),
        pytest.raises(kvraw.BoundsError, match="tables have 600 base addresses, must have at most 448"),
    ):
        IndexedLaunch(device_state(0), plan, (table, table), (8, 8))
