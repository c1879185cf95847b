"""Object-group plans and direct copies: order, checks, and whole buffers against plain indexing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw.adapters.lmcache import _planned
from kvraw.runtime import driver as driver_module
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.memory import Laid, numbers
from tests.helpers.oracle import PAGED, Shape, move

TOKENS, PER = 4, 2
S = Shape(nl=2, nb=9, bs=2, nh=2, d=8, planes=2)
BYTES = 2 * S.nl * TOKENS * S.nh * S.d


def describe(s: Shape = S) -> ops.PageBufferShapeDesc:
    d = ops.PageBufferShapeDesc()
    d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size = s.planes, s.nl, s.nb, s.bs, s.nh, s.d // 2, 2
    return d


class Plan:
    """Two batches through two staging buffers that are used again, from or to five objects in host memory."""

    def __init__(self, place: int | None, to_host: bool, number: int = 1) -> None:
        device, host = ("host", "host") if place is None else ("device", "pinned")
        self.place, self.to_host, self.number = place, to_host, number
        paged = PAGED[(number, 2)]
        self.cache = Laid(device, [paged.shape(S)] * paged.tensors(S), place, 1)
        self.host = Laid(host, [(2, S.nl, TOKENS, S.nh * S.d)] * 4, place, 2)
        self.temp = Laid(device, [(BYTES,)] * 2, place, 3)
        self.table = numbers(self.cache.addresses, device, place)
        self.ids = [8, 0, 3, 1, 5, 2, 7, 4]
        self.device_ids = numbers(self.ids, device, place)

    def group(self, **change: Any) -> ops.KernelGroupSpec:
        return ops.KernelGroupSpec(
            **{
                "paged_buffer_ptrs": self.table.data_ptr(),
                "lmcache_objects_ptrs": self.temp.addresses,
                "shape_desc": describe(),
                "lmcache_chunk_size": TOKENS,
                "engine_kv_format": self.number,
                "block_ids_base": self.device_ids.data_ptr(),
                "block_ids_capacity": len(self.ids),
                **change,
            }
        )

    def steps(self, skips: tuple[int, int] = (0, 0), **change: Any) -> list[ops.BatchStep]:
        out = []
        for batch, skip in enumerate(skips):
            staging = []
            for k in range(2):
                ends = (self.host.addresses[batch * 2 + k], self.temp.addresses[k])
                staging.append(ops.StagingCopy(*(ends if self.to_host else ends[::-1]), BYTES, 64 * k + 8))
            launch = {
                "group_idx": 0, "block_ids_offset": batch * 4, "total_blocks": 4, "num_objects": 2,
                "skip_prefix_n_blocks": skip, **change,
            }  # fmt: skip
            out.append(ops.BatchStep(staging, [ops.LaunchVar(**launch)]))
        return out

    def run(self, groups: Any = None, steps: Any = None, alignment: int = 64, direction: Any = None) -> None:
        ops.execute_object_group_transfer(
            int(self.to_host) if direction is None else direction,
            "cpu" if self.place is None else self.place,
            alignment,
            [self.group()] if groups is None else groups,
            self.steps() if steps is None else steps,
        )

    def close(self) -> None:
        for one in (self.cache, self.host, self.temp):
            one.close()


@pytest.mark.parametrize("number", [1, 0, 7, 9])
@pytest.mark.parametrize("to_host", [True, False])
def test_order_within_and_across_steps(place: int | None, to_host: bool, number: int) -> None:
    p = Plan(place, to_host, number)
    if to_host:
        # What a batch leaves in a staging buffer goes to its objects, the rows left out with it.
        temp = [t.reshape(2, S.nl, TOKENS, S.nh * S.d) for t in p.temp.arrays]
        for batch, skip in enumerate((1, 0)):
            move(number, S, p.cache.arrays, temp, "2LTD", TOKENS, "store", "block", p.ids[batch * 4 :][:4], skip)
            for k in range(2):
                p.host.arrays[batch * 2 + k][:] = temp[k]
    else:
        move(number, S, p.cache.arrays, p.host.arrays, "2LTD", TOKENS, "load", "block", p.ids, 1)
        for k in range(2):
            p.temp.arrays[k][:] = p.host.arrays[2 + k].ravel()
    p.run(steps=p.steps((1, 0)))
    for one in (p.cache, p.host, p.temp):
        one.check()
    p.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"steps": p.steps(group_idx=1)}, r"group_idx is 1, must be in \[0, 1\)"),
        (lambda p: {"steps": p.steps(group_idx=-1)}, "group_idx is -1"),
        (lambda p: {"steps": p.steps(num_objects=3)}, r"num_objects is 3, must be in \[1, 2\]"),
        (lambda p: {"steps": p.steps(num_objects=0)}, "num_objects is 0"),
        (lambda p: {"steps": p.steps(block_ids_offset=-1)}, "block_ids_offset is -1"),
        (lambda p: {"steps": p.steps(block_ids_offset=5)}, "must lie within the 8 ids"),
        (lambda p: {"steps": p.steps(total_blocks=-1)}, "total_blocks -1"),
        (lambda p: {"steps": p.steps(num_objects=1)}, "total_blocks is 4, 1 objects hold 2 blocks"),
        (lambda p: {"groups": [p.group(lmcache_chunk_size=3)]}, "must be a positive multiple of 2"),
        (lambda p: {"groups": [p.group(lmcache_objects_ptrs=[])]}, "lmcache_objects_ptrs is empty"),
        (lambda p: {"groups": [p.group(paged_buffer_ptrs=0)]}, "paged_buffer_ptrs is null"),
        (lambda p: {"groups": [p.group(engine_kv_format=99)]}, "Unsupported EngineKVFormat"),
        (lambda p: {"alignment": 0}, "must be power of two"),
        (lambda p: {"direction": 7}, "Unsupported direction"),
        (lambda p: {"steps": [*p.steps(), ops.BatchStep([ops.StagingCopy(0, 8, 64, 0)], [])]}, "dest is 0"),
    ],
)
def test_a_plan_is_checked_whole_before_anything_moves(
    place: int | None, change: Callable[[Plan], dict[str, Any]], message: str
) -> None:
    p = Plan(place, True)
    with pytest.raises(ValueError, match=message):
        p.run(**change(p))
    for one in (p.cache, p.host, p.temp):
        one.check()
    p.close()


@pytest.mark.parametrize("to_host", [True, False])
def test_bad_ids_on_the_host_are_found_before_anything_moves(to_host: bool) -> None:
    p = Plan(None, to_host)
    p.device_ids = numbers([8, 0, 3, 1, 9, 2, 7, 4], "host", None)
    with pytest.raises(IndexError, match=r"block_ids\[4\] is 9, must be in \[0, 9\)"):
        p.run()
    for one in (p.cache, p.host, p.temp):
        one.check()
    p.run(steps=p.steps(skips=(0, 1)))  # what is left out may be anything


@pytest.mark.parametrize("to_host", [True, False])
def test_pages_of_values_and_scales(place: int | None, to_host: bool) -> None:
    """Format 14: two layouts over one table of addresses."""
    layers, blocks, bs, values, scales = 2, 9, 2, 128, 4
    row = values + scales
    device = "host" if place is None else "device"
    cache = Laid(device, [(blocks, bs * row)] * layers, place, 1)
    objects = Laid(device, [(layers, TOKENS, row)] * 2, place, 2)
    table, ids = numbers(cache.addresses, device, place), [8, 0, 3, 5]
    there = numbers(ids, device, place)
    d = ops.PageBufferShapeDesc()
    d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size = 1, layers, blocks, bs, 1, row, 1
    for k, block in enumerate(ids):
        for layer, t in itertools.product(range(layers), range(bs)):
            page, token = cache.arrays[layer][block], objects.arrays[k // PER][layer, bs * (k % PER) + t]
            for a, b in (
                (page[values * t : values * (t + 1)], token[:values]),
                (page[bs * values + scales * t :][:scales], token[values:]),
            ):
                if to_host:
                    b[:] = a
                else:
                    a[:] = b
    group = ops.KernelGroupSpec(table.data_ptr(), objects.addresses, d, TOKENS, 14, there.data_ptr(), len(ids))
    step = ops.BatchStep([], [ops.LaunchVar(0, 0, 4, 2, 0)])
    where = "cpu" if place is None else place
    ops.execute_object_group_transfer(int(to_host), where, 64, [group], [step])
    for one in (cache, objects):
        one.check()
        one.close()


def test_bad_ids_are_reported(device: int) -> None:
    p = Plan(device, True)
    p.device_ids = numbers([8, 0, 9, 1, 5, 2, 7, 4], "device", device)
    p.run()
    p.host.memory.read()
    with pytest.raises(IndexError, match=r"block_ids\[2\] is 9, must be in \[0, 9\)"):
        p.run()
    p.close()


@pytest.mark.parametrize("to_host", [True, False])
def test_parts_are_timed(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, to_host: bool) -> None:
    stamps: dict[int, int] = {}
    record = FakeDriver.event_record

    def event_record(self: FakeDriver, event: int, stream: int) -> None:
        stamps[event] = len(stamps) if event not in stamps else max(stamps.values()) + 1
        record(self, event, stream)

    monkeypatch.setattr(FakeDriver, "event_record", event_record)
    monkeypatch.setattr(FakeDriver, "event_milliseconds", lambda self, start, end: float(stamps[end] - stamps[start]))
    ops.pop_completed_phase_timings()
    p = Plan(0, to_host)
    # A step of copies alone and one of nothing stand among the others.
    steps = [*p.steps(), ops.BatchStep(p.steps()[0].staging, []), ops.BatchStep()]
    ops.execute_object_group_transfer(int(to_host), 0, 64, [p.group()], steps, True, "s")
    p.run()  # not asked for
    p.host.memory.read()
    found = ops.pop_completed_phase_timings()
    order = [0, 1] if to_host else [1, 0]
    assert [f[0] for f in found] == [*order, *order, 1]
    assert all(f[1:3] == (int(to_host), 0) and f[4:6] == (2 * BYTES, "s") for f in found)
    assert all(f[3] == pytest.approx((f[7] - f[6]) * 1e3, abs=1e-3) and f[3] > 0 for f in found)
    assert all(a[7] <= b[6] for a, b in itertools.pairwise(found))
    assert ops.pop_completed_phase_timings() == []
    p.close()


@pytest.mark.gpu
def test_parts_are_timed_on_a_gpu(gpu: int) -> None:
    ops.pop_completed_phase_timings()
    begin = time.time()
    p = Plan(gpu, True)
    ops.execute_object_group_transfer(1, gpu, 64, [p.group()], p.steps(), True, "s")
    p.host.memory.read()
    found = ops.pop_completed_phase_timings()
    assert [f[0] for f in found] == [0, 1, 0, 1]
    assert all(0 < f[3] < 1e3 and begin - 1e-3 < f[6] < f[7] < time.time() + 1e-3 for f in found)
    p.close()


def test_another_table_in_the_place_of_a_known_one(device: int) -> None:
    # LMCache's kernel would take the second table as well: it reads a head of 8 bytes by 4. Where the first one's
    # alignment were taken for the second's, an access of 8 bytes would go wrong.
    p = Plan(device, True)
    p.run()
    off = Laid("device", [(*PAGED[(1, 2)].shape(S)[:-1], S.d)] * S.nl, device, 9)
    shifted = numbers([a + 4 for a in off.addresses], "pinned", device)
    with DeviceScope(device):
        driver().memcpy_async(p.table.data_ptr(), shifted.data_ptr(), 8 * S.nl, 0)
        driver().stream_synchronize(0)
    p.run()
    cache = off.memory.read()
    got = p.host.memory.read()[p.host.offsets[0] :][:BYTES].reshape(2, S.nl, TOKENS, S.nh * S.d)
    for plane, layer, t in itertools.product(range(2), range(S.nl), range(TOKENS)):
        row = ((plane * S.nb + p.ids[t // S.bs]) * S.bs + t % S.bs) * S.nh * S.d
        at = off.offsets[layer] + 4 + row
        np.testing.assert_array_equal(got[plane, layer, t], cache[at : at + S.nh * S.d])
    off.close()
    p.close()


def direct(p: Plan, second: Laid, **change: Any) -> tuple[list[Any], list[Any]]:
    """Two groups in each object: the keys and values of one cache, then those of another."""
    groups = [
        ops.DirectCopyGroupSpec(laid.addresses, describe(), p.number, TOKENS, at * BYTES, p.ids)
        for at, laid in enumerate((p.cache, second))
    ]
    objects = [
        ops.DirectCopyObject(**{
            "host_ptr": address, "host_offset": 24, "nbytes": 2 * BYTES, "chunk_idx": chunk,
            "skip_prefix_n_blocks": [chunk == 0, 0], **change,
        })
        for chunk, address in ((0, p.host.addresses[0]), (3, p.host.addresses[1]))
    ]  # fmt: skip
    return groups, objects


@pytest.mark.parametrize("number", [0, 1, 2, 4, 9])
@pytest.mark.parametrize("to_host", [True, False])
def test_direct_copies(place: int | None, to_host: bool, number: int) -> None:
    p = Plan(place, to_host, number)
    p.host.close()
    p.host = Laid("host" if place is None else "pinned", [(2 * BYTES,)] * 2, place, 2)
    second = Laid("host" if place is None else "device", p.cache.shapes, place, 5)
    groups, objects = direct(p, second)
    for (at, laid), (k, chunk) in itertools.product(enumerate((p.cache, second)), ((0, 0), (1, 3))):
        region = p.host.arrays[k][at * BYTES : (at + 1) * BYTES].reshape(2, S.nl, TOKENS, S.nh * S.d)
        ids, skip = p.ids[chunk * PER : chunk * PER + PER], int(chunk == 0 and at == 0)
        move(number, S, laid.arrays, [region], "2LTD", TOKENS, "store" if to_host else "load", "block", ids, skip)
    where = "cpu" if place is None else place
    ops.execute_direct_copy_transfer(int(to_host), where, 64, groups, objects)
    for one in (p.cache, second, p.host):
        one.check()
    second.close()
    p.close()


@pytest.mark.parametrize(("kind", "used"), [("pinned", "memcpy_batch_async"), ("host", "memcpy_async")])
def test_direct_copies_on_the_default_stream(fake: FakeDriver, kind: str, used: str) -> None:
    p = Plan(0, True)
    p.host.close()
    p.host = Laid(kind, [(2 * BYTES,)] * 2, 0, 2)
    groups, objects = direct(p, p.cache)
    before = fake.calls[used]
    ops.execute_direct_copy_transfer(1, 0, 1 << 20, groups, objects)
    assert (fake.calls[used] - before == 2) == (kind == "pinned")
    for k, (chunk, skip) in enumerate(((0, 1), (3, 0))):
        for at, left_out in ((0, skip), (1, 0)):
            region = p.host.arrays[k][at * BYTES : (at + 1) * BYTES].reshape(2, S.nl, TOKENS, S.nh * S.d)
            ids = p.ids[chunk * PER : chunk * PER + PER]
            move(1, S, p.cache.arrays, [region], "2LTD", TOKENS, "store", "block", ids, left_out)
    p.host.check()
    p.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skip_prefix_n_blocks": [3, 0]}, r"skip_prefix_n_blocks\[0\] is 3, must be in \[0, 2\]"),
        ({"skip_prefix_n_blocks": [0]}, "must have one per group"),
        ({"chunk_idx": 4}, "chunk_idx is 4, group 0 has ids for 8 blocks"),
        ({"chunk_idx": -1}, "chunk_idx is -1"),
        ({"nbytes": 2 * BYTES - 1}, "of an object of"),
    ],
)
def test_direct_copies_are_checked(change: dict[str, Any], message: str) -> None:
    p = Plan(None, True)
    with pytest.raises(ValueError, match=message):
        ops.execute_direct_copy_transfer(1, "cpu", 64, *direct(p, p.cache, **change))
    groups, objects = direct(p, p.cache)
    groups[0].block_ids = [0, 1, 2, 3, 4, 5, 6, 9]
    with pytest.raises(IndexError, match=r"block_ids of chunk 3\[1\] is 9"):
        ops.execute_direct_copy_transfer(1, "cpu", 64, groups, objects)
    groups[0].engine_kv_format = 6
    with pytest.raises(ValueError, match="format 6 cannot be copied block by block"):
        ops.execute_direct_copy_transfer(1, "cpu", 64, groups, objects)
    groups[0].engine_kv_format, groups[0].paged_layer_ptrs = 1, [8]
    with pytest.raises(ValueError, match="has 1 addresses"):
        ops.execute_direct_copy_transfer(1, "cpu", 64, groups, objects)
    p.host.check()


def test_what_can_be_copied_directly(fake: object) -> None:
    found = [int(f) for f in ops.EngineKVFormat if ops.direct_copy_format_supported(f)]
    assert found == [0, 1, 2, 3, 4, 5, 9, 11, 13]
    assert ops.batch_memcpy_supported()


def test_pieces_end_at_registrations() -> None:
    from kvraw.adapters.lmcache._direct import _edges

    obj = ops.DirectCopyObject(1000, 24, 200, 0, [])
    assert _edges(obj, 64).tolist() == [1040, 1104, 1168]
    assert _edges(ops.DirectCopyObject(1000, 0, 200, 0, []), 1 << 20).tolist() in ([], [1000 + (1 << 20)])
    assert np.all(_edges(obj, 64) > 1000)


@pytest.mark.parametrize("seed", range(6))
def test_a_table_is_read_behind_what_still_writes_it(seed: int) -> None:
    before = driver_module.install(FakeDriver(seed=seed))  # type: ignore[arg-type]
    _planned._bits.clear()
    try:
        with DeviceScope(0), kvraw.Stream(0) as stream, kvraw.DeviceBuffer(16, 0) as table:
            assert _planned._table_bits("paged_buffer_ptrs", table.address, 2, 0, None) == 8
            with kvraw.HostPool(4096, device=0) as pool:
                (source,) = pool.chunks(1, 16)
                source.numpy(np.uint64)[:] = 1 << 20 | 4, 1 << 21
                driver().memset_async(table.address, 0, 16, stream.handle)
                driver().memcpy_async(table.address, source.address, 16, stream.handle)
                assert _planned._table_bits("paged_buffer_ptrs", table.address, 2, 0, stream.handle) == 4
                assert _planned._table_bits("paged_buffer_ptrs", table.address, 2, 0, None) == 4
    finally:
        _planned._bits.clear()
        driver_module.install(before)
