"""What a kernel finds in ids that only the GPU sees, the next operation on that device raises, once, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw.adapters import sglang, tensors, vllm
from kvraw.copying import pointer_tables
from kvraw.copying.bound_copies import BoundCopies
from kvraw.copying.device_state import device_state
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.memory import Laid, Tensor, numbers
from tests.helpers.torch_like import TorchLike

ROW = 64
BAD = r"src_indices\[1\] is 99, must be in \[0, 8\)"


class Rows:
    """Rows on the device and in pinned memory, and indices of both kinds."""

    def __init__(self, w: TorchLike) -> None:
        self.w = w
        self.src = w.put("device", np.arange(8 * ROW, dtype=np.int64).astype(np.uint8).reshape(8, ROW))
        self.dst, self.host = w.empty("device", (8, ROW)), w.put("pinned", np.ones((8, ROW), np.uint8))
        self.bad, self.good = w.put("device", np.array([1, 99])), w.put("device", np.array([1, 2]))
        self.here = w.put("host", np.array([1, 2]))

    def kernel(self, index: Any) -> None:
        sglang.transfer_kv_per_layer_mla(self.src, self.dst, index, self.good, ROW)

    def swap(self) -> None:
        vllm.swap_blocks(self.host, self.dst, ROW, self.w.put("host", np.array([[0, 1]])))

    def swap_batch(self) -> None:
        vllm.swap_blocks_batch(
            *(self.w.put("host", np.array([x])) for x in (self.host.data_ptr(), self.dst.data_ptr(), ROW))
        )


@pytest.fixture
def rows(device: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rows]:
    w = TorchLike(device).install(monkeypatch)
    assert w.stream is not None
    handle = w.stream.handle
    monkeypatch.setattr(tensors, "_raw_stream", lambda at: handle)
    yield Rows(w)
    w.synchronize()


LATER: dict[str, Callable[[Rows], None]] = {
    "a kernel": lambda r: r.kernel(r.good),
    "a kernel without indices": lambda r: sglang.transfer_kv_per_layer_mla(
        r.src, r.dst, *[r.w.put("device", np.zeros(0, np.int64))] * 2, ROW
    ),
    "direct": lambda r: sglang.transfer_kv_direct([r.host], [r.dst], r.here, r.here, 1),
    "swap_blocks": Rows.swap,
    "swap_blocks_batch": Rows.swap_batch,
    "LMCache": lambda r: ops.lmcache_memcpy_async(r.dst.data_ptr(), r.host.data_ptr(), 8, ops.H2D, 0, 64),
}


@pytest.mark.parametrize("name", LATER)
def test_any_operation_raises_it_once(rows: Rows, name: str, caplog: pytest.LogCaptureFixture) -> None:
    rows.kernel(rows.bad)
    rows.w.synchronize()
    before = rows.w.take(rows.dst).copy()
    with pytest.raises(kvraw.BoundsError, match=BAD):
        LATER[name](rows)
    np.testing.assert_array_equal(rows.w.take(rows.dst), before)
    LATER[name](rows)
    with DeviceScope(rows.w.device):
        device_state(rows.w.device).completions.drain()
    assert ["is 99" in r.getMessage() for r in caplog.records] == [True]


def test_slots_of_lmcache(rows: Rows) -> None:
    """By the way that knows nothing of plans: straight to the kernel."""
    device = rows.w.device
    cache, tokens = Laid("device", [(7, 2, 36)] * 2, device, 1), Laid("device", [(1, 2, 3, 36)], device, 3)
    layers = [Tensor(cache.memory, at, (7, 2, 36)) for at in cache.offsets]
    bad, good = numbers([5, 99, 3], "device", device), numbers([5, 0, 3], "device", device)

    def move(slots: Any) -> None:
        ops.multi_layer_kv_transfer(tokens.tensors(1)[0], layers, slots, f"cuda:{device}", 14, ops.D2H, 14, 2)
        rows.w.synchronize()

    move(bad)
    with pytest.raises(kvraw.BoundsError, match=r"slot_mapping\[1\] is 99, must be in \[0, 14\)"):
        move(good)
    for _ in range(4):  # the format is two layouts, and each copy met the slot
        move(good)
    cache.close()
    tokens.close()


def test_a_part_of_an_operation_stops_no_other(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    w, tokens, page = rows.w, 16, 4
    layers = [w.put("device", np.full((tokens, ROW), k + 1, np.uint8)) for k in range(2)]
    table, staging = w.table("device", layers), w.empty("device", (page, 2, ROW))
    dst = w.put("pinned", np.zeros((tokens, 2, ROW), np.uint8))
    index = np.arange(tokens)
    index[1] = -1
    src, to = w.put("device", index), w.put("host", np.arange(tokens))
    real = BoundCopies.enqueue

    def slowly(*args: Any) -> Any:
        done = real(*args)
        w.synchronize()
        return done

    monkeypatch.setattr(BoundCopies, "enqueue", slowly)
    sglang.transfer_hicache_all_layer_mla_staged_lf_pf(table, src, to, staging, dst, page_size=page, element_size=ROW)
    w.synchronize()
    found = w.take(dst)
    assert (found[2:, 0] == 1).all()
    assert (found[2:, 1] == 2).all()
    with pytest.raises(kvraw.BoundsError, match=r"src_indices\[1\] is -1"):
        rows.kernel(rows.good)


def test_nothing_is_asked_or_raised_in_a_capture(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though an error waits to be raised, and a table's addresses are on their way."""
    w = TorchLike(0).install(monkeypatch)
    assert w.stream is not None
    rows = Rows(w)
    rows.kernel(rows.bad)
    w.synchronize()
    table, to = w.table("device", [rows.src]), w.table("device", [rows.dst])
    args = (table, to, rows.good, rows.good)
    with pytest.raises(kvraw.BoundsError, match=BAD):
        sglang.transfer_kv_all_layer_mla(*args, item_size=ROW, num_layers=1)
    sglang.transfer_kv_all_layer_mla(*args, item_size=ROW, num_layers=1)  # asks for the tables
    assert pointer_tables._tables[id(table)].pending is not None
    rows.kernel(rows.bad)
    w.synchronize()
    before = fake.calls["event_done"]
    fake.capture(w.stream.handle, True)
    sglang.transfer_kv_all_layer_mla(*args, item_size=ROW, num_layers=1)
    fake.capture(w.stream.handle, False)
    assert fake.calls["event_done"] == before
    with pytest.raises(kvraw.BoundsError, match=BAD):
        rows.kernel(rows.good)


def test_a_long_capture_takes_no_memory(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the driver would refuse: every launch in a graph keeps its status words."""
    w = TorchLike(0).install(monkeypatch)
    assert w.stream is not None
    rows = Rows(w)
    rows.kernel(rows.good)
    w.synchronize()
    before = {name: fake.calls[name] for name in ("host_alloc", "mem_alloc", "event_create")}
    fake.capture(w.stream.handle, True)
    for _ in range(300):
        rows.kernel(rows.good)
    fake.capture(w.stream.handle, False)
    assert {name: fake.calls[name] for name in before} == before
    fake.capture(w.stream.handle, True)
    rows.kernel(rows.bad)
    fake.capture(w.stream.handle, False)
    w.synchronize()  # the emulator's capture runs at once: a replay
    with pytest.raises(kvraw.BoundsError, match=BAD):
        rows.kernel(rows.good)
    with DeviceScope(0):
        assert len(device_state(0).completions.captured) == 301
    assert driver() is fake
