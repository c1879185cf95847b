"""Two GPUs in one process: a cache's own is used whatever is current, and what belongs to the other is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw.adapters import sglang, tensors
from kvraw.layouts.geometry import Geometry
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from tests.adapters import test_lmcache_blocks as lmcache
from tests.adapters.test_lmcache_groups import Plan
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.backends import device_ids
from tests.helpers.memory import Laid, numbers
from tests.helpers.torch_like import TorchLike
from tests.helpers.world import TOKENS, World

GEOMETRY = Geometry(layers=2, blocks=64, block_size=4, heads=2, head_size=64, element_size=2)
ENGINES = ["kernel", "copy", "staged"]
APART = "of device 0, must be of device 1|of device 0, must be one of device 1|on device 0"


@pytest.fixture
def world(device: int) -> Iterator[World]:
    """On the second device, with the first one's context current."""
    if driver().device_count() < 2:
        pytest.skip("one device only")
    with DeviceScope(0):
        made = World(1, GEOMETRY, chunks=8)
        yield made
        assert driver().context_device() == 0
        made.close()


def stays(world: World) -> tuple[list[bytes], bytes]:
    return [bytes(c.numpy()) for c in world.chunks], world.now().tobytes()


def test_it_is_used_whatever_is_current(world: World) -> None:
    for engine in ENGINES:
        for c in world.chunks:
            c.numpy()[:] = 0
        kvraw.store(world.cache, world.chunks, np.arange(32), stream=world.stream, engine=engine).wait()
        rows = np.concatenate([world.chunk(at) for at in range(8)], axis=2)
        np.testing.assert_array_equal(rows, world.paged[:, :, :32].transpose(1, 0, 2, 3, 4, 5))
        assert driver().context_device() == 0
        other = np.arange(63, 31, -1)
        kvraw.load(world.cache, world.chunks, other, stream=world.stream, engine=engine).wait()
        np.testing.assert_array_equal(world.now()[:, :, other], world.paged[:, :, :32])


def test_a_copy_goes_by_its_stream(world: World) -> None:
    at = world.chunks[0].address
    kvraw.memcpy_batch([at + 64], [at], [64], stream=world.stream.handle).wait()
    assert bytes(world.chunks[0].numpy()[64:128]) == bytes(world.chunks[0].numpy()[:64])


def test_a_stream_of_the_other_is_refused(world: World) -> None:
    """A launch there would fault, and leave nothing that works on the other device."""
    before, other = stays(world), kvraw.Stream(0)
    prepared = kvraw.PreparedCopy(kvraw.TransferPlan(world.cache, "store", chunk_tokens=TOKENS).plan, device=1)
    for stream in (other, other.handle):
        for engine in ENGINES:
            with pytest.raises(kvraw.PlacementError, match="stream of device 0, must be one of device 1"):
                kvraw.store(world.cache, world.chunks, [0], stream=stream, engine=engine)
        with pytest.raises(kvraw.PlacementError, match="stream of device 0, must be one of device 1"):
            prepared(world.cache.bases, [world.chunks[0].address], 1, src_index=[0], stream=stream)
        with pytest.raises(kvraw.PlacementError, match="stream of device 0, must be one of device 1"):
            kvraw.memcpy_batch([8192], [8192], [8], stream=stream, device=1)
    other.synchronize()
    assert stays(world) == before


def test_memory_of_the_other_is_refused(world: World) -> None:
    before = stays(world)
    plan = kvraw.TransferPlan(world.cache, "store", chunk_tokens=TOKENS).plan
    with kvraw.DeviceBuffer(world.cache.chunk_bytes(TOKENS), 0) as there, kvraw.Stream(0) as stream:
        for engine in ("auto", "kernel", "copy"):
            for verb in (kvraw.store, kvraw.load):
                with pytest.raises(kvraw.PlacementError, match=APART):
                    verb(world.cache, [there.address], [0], chunk_tokens=TOKENS, stream=world.stream, engine=engine)
        prepared = kvraw.PreparedCopy(plan, device=1)
        with pytest.raises(kvraw.PlacementError, match=APART):
            prepared(world.cache.bases, [there.address], 1, src_index=[0], stream=world.stream)
        ids = device_ids((0, 1), 0, stream)
        with pytest.raises(kvraw.PlacementError, match=APART):
            kvraw.store(world.cache, world.chunks, ids, stream=world.stream)
        with pytest.raises(kvraw.PlacementError, match=APART):
            prepared(world.cache.bases, [world.chunks[0].address], 2, src_index=ids, stream=world.stream)
    assert stays(world) == before


def test_the_adapters_refuse_it_as_well(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = TorchLike(1).install(monkeypatch), TorchLike(0)
    rows = np.arange(64 * 32, dtype=np.int64).view(np.uint8).reshape(64, 256)
    mine, theirs, ids = here.put("device", rows), there.put("device", rows), here.put("device", np.arange(4))
    for ends in ((mine, theirs, mine, theirs), (theirs, mine, theirs, mine)):
        with pytest.raises(kvraw.PlacementError, match=APART):
            sglang.transfer_kv_per_layer(*ends, ids, ids, item_size=256)
    np.testing.assert_array_equal(here.take(mine), rows)
    np.testing.assert_array_equal(there.take(theirs), rows)

    for objects in (1, 20):
        w, other = lmcache.World(1, 2, 1, objects), lmcache.World(1, 2, 0, objects, "device")
        for direction in (ops.D2H, ops.H2D):
            for ids_there in (False, True):
                given: Any = numbers([0], "device", 1) if ids_there else [0]
                with pytest.raises(kvraw.PlacementError, match=APART):
                    lmcache.call(w, given, direction, objects=other.objects.addresses)
        w.check()
        other.check()
        w.close()
        other.close()


def test_a_row_of_tokens_on_the_other_is_refused(world: World) -> None:
    w, other = lmcache.World(1, 2, 1, 1), lmcache.World(1, 2, 0, 1, "device")
    slots: Any = numbers([0, 1, 2, 3], "device", 1)
    tokens = other.objects.tensors(2)[0]
    with pytest.raises(kvraw.PlacementError, match=APART):
        ops.multi_layer_kv_transfer(tokens, w.paged.tensors(2), slots, "cuda:1", 14, ops.D2H, 1)
    w.check()
    other.check()
    w.close()
    other.close()


def test_ids_of_the_other_in_the_adapters(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight to the kernel: slots, objects on the device, layouts in two parts, and an index of one side alone."""
    here, there = TorchLike(1).install(monkeypatch), TorchLike(0)
    w, tokens = lmcache.World(1, 2, 1, 2, "device"), Laid("device", [(2, 2, 3, 18)], 1, 3)
    slots: Any = numbers([5, 0, 3], "device", 0)
    with pytest.raises(kvraw.PlacementError, match="slot_mapping lies on device 0"):
        ops.multi_layer_kv_transfer(tokens.tensors(2)[0], w.paged.tensors(2), slots, "cuda:1", 14, ops.D2H, 1)
    ids: Any = numbers([3, 1], "device", 0)
    for _ in range(3):  # objects are known to lie on the device from the second time on
        with pytest.raises(kvraw.PlacementError, match=r"block_ids lies? on device 0"):
            lmcache.call(w, ids, ops.D2H)
    for other in ("src", "dst"):
        index = {name: (there if name == other else here).put("device", np.arange(2)) for name in ("src", "dst")}
        rows = here.put("device", np.zeros((4, 64), np.uint8))
        with pytest.raises(kvraw.PlacementError, match="indices lie on device"):
            sglang.transfer_kv_per_layer_mla(rows, rows, index["src"], index["dst"], 64)
    w.check()
    tokens.check()
    w.close()
    tokens.close()


def test_caches_and_objects_of_the_other_in_the_adapters(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = TorchLike(1).install(monkeypatch), TorchLike(0)
    cache, objects = Laid("device", [(7, 2, 36)] * 2, 1, 1), Laid("device", [(1, 2, 4, 36)] * 2, 0, 2)
    d = ops.PageBufferShapeDesc()
    d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size = 1, 2, 7, 2, 1, 36, 1
    mine: Any = numbers([3, 1], "device", 1)
    for paged, row, match in (
        (cache.addresses, objects.addresses, "objects: .* is memory of device 0"),
        (objects.addresses, cache.addresses, "not memory of device 1"),
    ):
        with pytest.raises(kvraw.PlacementError, match=match):
            ops.multi_layer_block_kv_transfer(paged, row, mine, "cuda:1", ops.D2H, d, 4, 14, 0)
    cache.check()
    objects.check()
    cache.close()
    objects.close()

    layers = [there.put("device", np.zeros((16, 64), np.uint8)) for _ in range(2)]
    table = here.put("host", np.array([one.data_ptr() for one in layers], np.uint64))
    dst, ids = here.empty("device", (16, 2, 64)), here.put("device", np.arange(4))
    with pytest.raises(kvraw.PlacementError, match="src: an address in its table is memory of device 0"):
        sglang.transfer_kv_all_layer_mla_lf_pf(table, dst, ids, ids, item_size=64, dst_layout_dim=128, num_layers=2)


def test_plans_with_parts_on_the_other(world: World) -> None:
    plan = Plan(1, False)
    ids, table = numbers(plan.ids, "device", 0), numbers(plan.cache.addresses, "device", 0)
    there = Laid("device", [tuple(s) for s in plan.cache.shapes], 0, 1)
    layers = numbers(there.addresses, "device", 1)
    for change in (
        {"block_ids_base": ids.data_ptr()},
        {"paged_buffer_ptrs": table.data_ptr()},
        {"paged_buffer_ptrs": layers.data_ptr()},
    ):
        with pytest.raises(kvraw.PlacementError, match=r"(on|of) device 0, must (lie on|be of) device 1"):
            plan.run(groups=[plan.group(**change)])
    there.check()
    there.close()
    plan.close()


def test_memory_that_comes_again_on_the_other(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked up for a tensor is not taken for one at the same address of another device."""
    first, second = TorchLike(0), TorchLike(1)
    handles = [w.stream.handle for w in (first, second) if w.stream is not None]
    monkeypatch.setattr(tensors, "_raw_stream", lambda device: handles[device])
    index, pinned = first.put("host", np.arange(3)), first.put("pinned", np.ones((4, 64), np.uint8))
    gone = first.empty("device", (4096, 64))
    sglang.transfer_kv_direct([pinned], [gone], index, index, 1)
    first.synchronize()
    again = second.empty("device", (4096, 64))
    again.base.address, kept = gone.base.address, again.base.address
    used: list[int] = []
    real = FakeDriver._push

    def push(self: FakeDriver, stream: int, *args: Any) -> None:
        used.append(stream)
        real(self, stream, *args)

    monkeypatch.setattr(FakeDriver, "_push", push)
    sglang.transfer_kv_direct([pinned], [again], index, index, 1)
    assert used
    assert handles[0] not in used
    monkeypatch.undo()
    again.base.address = kept
    for w in (first, second):
        w.synchronize()
