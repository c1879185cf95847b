"""Descriptors of the copy engine: the same bytes as the formula, joined and cut without changing them."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvraw
from kvraw.arrays import IndexVector
from kvraw.copying import copy_engine, reference
from kvraw.copying.copy_engine import Descriptors
from kvraw.copying.operands import Operands
from kvraw.errors import DriverError
from kvraw.layouts.geometry import CacheLayout, Geometry, chunk_side, copy_plan, find_chunk_layout, find_format
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.host import registration
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.profile import examples
from tests.helpers.world import World


def nowhere(pointers: list[int], number: int, geometry: Geometry) -> kvraw.PagedCache:
    """A cache of addresses that nothing lies at: nothing is copied here."""
    return kvraw.PagedCache(CacheLayout(find_format(number), geometry), pointers, None)


def pairs(d: Descriptors) -> set[tuple[int, int]]:
    """Every (destination, source) byte."""
    out: set[tuple[int, int]] = set()
    for to, at, n in zip(d.dst.tolist(), d.src.tolist(), d.sizes.tolist(), strict=True):
        both = list(zip(range(to, to + n), range(at, at + n), strict=True))
        assert not out.intersection(both)
        out.update(both)
    return out


@given(
    format=st.sampled_from([0, 1, 2, 4, 6, 7, 9, 13, 16]),
    by=st.sampled_from(["block", "slot"]),
    layout=st.sampled_from(["2LTD", "T2D", "L2TD"]),
    ids=st.lists(st.integers(-1, 5), max_size=6),
    first=st.integers(0, 3),
)
@settings(max_examples=examples(150), deadline=None)
def test_describe_is_the_formula(format: int, by: str, layout: str, ids: list[int], first: int) -> None:
    row = find_format(format)
    geometry = Geometry(2, 6, 2, 2, 3, 1, planes=row.planes)
    count = CacheLayout(row, geometry).pointers
    paged = nowhere([(k + 1) << 32 for k in range(count)], format, geometry)
    side, flat = paged.layout.side(by), chunk_side(find_chunk_layout(layout), geometry, 4, by)
    plan = copy_plan(geometry, side, flat, by)
    values = np.array(ids if by == "slot" else [abs(i) for i in ids], np.int64)
    first = min(first, len(values))
    src = Operands(paged.bases, IndexVector(values, 0, len(values)))
    dst = Operands(np.array([(k + 1) << 44 for k in range(8)], np.uint64))
    got = copy_engine.describe(plan, src, dst, first, len(values) - first)
    source, target = reference.enumerate_runs(plan, src, dst, first, len(values) - first)
    want = Descriptors(target, source, np.full(len(source), plan.run, np.uint64))
    if len(set(values.tolist())) == len(values):
        assert pairs(got) == pairs(want) == pairs(copy_engine.merge(got))
    assert len(copy_engine.merge(got)) <= len(got)


def of(*rows: tuple[int, int, int]) -> Descriptors:
    return Descriptors(*(np.array(c, np.uint64) for c in zip(*rows, strict=True)))


def test_merge_joins_both_ways() -> None:
    up, down = [(100 + k * 8, 500 + k * 8, 8) for k in range(5)], [(900 - k * 8, 700 - k * 8, 8) for k in range(4)]
    apart = [(0, 40, 8), (8, 32, 8), (2000, 3000, 4), (2004, 3004, 6)]
    merged = copy_engine.merge(of(*up, *down, *apart))
    assert list(zip(merged.dst.tolist(), merged.src.tolist(), merged.sizes.tolist(), strict=True)) == [
        (100, 500, 40),
        (876, 676, 32),
        (0, 40, 8),
        (8, 32, 8),
        (2000, 3000, 10),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 300), st.integers(1, 90)), min_size=1, max_size=8),
    st.lists(st.integers(1, 600), max_size=6),
)
@settings(max_examples=examples(200))
def test_split_cuts_at_every_edge_and_nowhere_else(rows: list[tuple[int, int, int]], cuts: list[int]) -> None:
    to = 1000
    placed = []
    for gap, at, n in rows:
        to += gap
        placed.append((to, at, n))
        to += n
    d, edges = of(*placed), np.unique(np.array([*cuts, *[c + 1000 for c in cuts]], np.uint64))
    parts = copy_engine.split(d, edges)
    assert pairs(parts) == pairs(d)
    for to, at, n in zip(parts.dst.tolist(), parts.src.tolist(), parts.sizes.tolist(), strict=True):
        assert n > 0
        assert not any(x < e < x + n for e in edges.tolist() for x in (to, at))
    starts = {int(e) for e in edges}
    originals = {(a, b) for a, b, _ in placed}
    for to, at in zip(parts.dst.tolist(), parts.src.tolist(), strict=True):
        assert (to, at) in originals or to in starts or at in starts


@pytest.mark.parametrize("how", ["old driver", "capture", "legacy stream"])
def test_without_the_batch_call(how: str, fake: FakeDriver) -> None:
    world = World(0)
    stream: object = world.stream
    if how == "old driver":
        fake._version = 12000
    ids = [1, 3, 5, 7, 30, 2]
    if how == "capture":
        fake.capture(world.stream.handle, True)
    if how == "legacy stream":
        stream = 0
    kvraw.store(world.cache, world.chunks, ids, stream=stream, engine="copy")
    fake.capture(world.stream.handle, False)
    fake.stream_synchronize(world.stream.handle)
    fake.stream_synchronize(0)
    assert fake.calls["memcpy_batch_async"] == 0
    assert fake.calls["memcpy_2d_async"] > 0
    rows = np.concatenate([world.chunk(at) for at in range(2)], axis=2)[:, :, :6]
    np.testing.assert_array_equal(rows, world.paged[:, :, ids].transpose(1, 0, 2, 3, 4, 5))
    world.close()


def test_neighbours_go_as_one(fake: FakeDriver) -> None:
    world = World(0)
    kvraw.store(world.cache, world.chunks, [8, 9, 10, 11], stream=world.stream, engine="copy").wait()
    np.testing.assert_array_equal(world.chunk(0), world.paged[:, :, 8:12].transpose(1, 0, 2, 3, 4, 5))
    plan = kvraw.TransferPlan(world.cache, "store", chunk_tokens=16).plan
    ends = Operands(world.cache.bases, IndexVector(np.arange(8, 12), 0, 4)), Operands(np.array([1 << 20], np.uint64))
    merged = copy_engine.merge(copy_engine.describe(plan, *ends, 0, 4))
    assert merged.sizes.tolist() == [4 * plan.run_bytes] * plan.runs_per_item
    world.close()


@given(ids=st.permutations(range(8)), count=st.integers(1, 8), number=st.sampled_from([0, 4, 9]))
@settings(max_examples=examples(100), deadline=None)
def test_items_are_joined_as_their_runs_would_be(ids: list[int], count: int, number: int) -> None:
    geometry = Geometry(3, 8, 2, 2, 4, 1)
    pointers = CacheLayout(find_format(number), geometry).pointers
    paged = nowhere([0x10000 + 0x1000 * k for k in range(pointers)], number, geometry)
    flat = chunk_side(find_chunk_layout("2LTD"), geometry, 4, "block")
    plan = copy_plan(geometry, paged.layout.side("block"), flat, "block")
    index = np.array(ids[:count], np.int64)
    chunk = plan.item_bytes * 2
    bases = np.array([1 << 40, (1 << 40) + chunk, 1 << 44, 1 << 45], np.uint64)  # the first two are neighbours
    src, dst = Operands(paged.bases, IndexVector(index, 0, count)), Operands(bases)
    runs = []
    for steps in itertools.product(*(range(d.size) for d in reversed(plan.dims))):  # innermost last, then the items
        dims = list(zip(reversed(plan.dims), steps, strict=True))
        for item, block in enumerate(ids[:count]):
            s, d = plan.src_flat, plan.dst_flat
            (out, inner), (to_out, to_in) = divmod(block, s.page), divmod(item, d.page)
            at = int(paged.bases[out * s.table_outer + sum(k * x.src_table for x, k in dims)])
            to = int(bases[to_out * d.table_outer + sum(k * x.dst_table for x, k in dims)])
            at += out * s.outer + inner * s.inner + sum(k * x.src for x, k in dims)
            to += to_out * d.outer + to_in * d.inner + sum(k * x.dst for x, k in dims)
            runs.append((to, at, plan.run_bytes))
    want = copy_engine.merge(of(*runs), paged.bases)
    got = copy_engine.describe(plan, src, dst, 0, count, paged.bases)
    assert sorted(rows_of(got)) == sorted(rows_of(want))


@pytest.fixture(scope="module")
def compiled() -> None:
    pytest.importorskip("numba")
    copy_engine.COMPILED.compile()
    assert copy_engine.COMPILED.entry is not None


@given(
    number=st.sampled_from([0, 1, 2, 4, 6, 7, 9, 13, 16]),
    by=st.sampled_from(["block", "slot"]),
    layout=st.sampled_from(["2LTD", "T2D", "L2TD"]),
    ids=st.one_of(
        st.lists(st.integers(-1, 11), max_size=12), st.integers(1, 12).map(range), st.permutations(range(12))
    ),
    first=st.integers(0, 3),
    gap=st.sampled_from([0, 0, 64]),
    apart=st.booleans(),
    edges=st.lists(st.integers(0, 4000), max_size=5),
)
@settings(max_examples=examples(300), deadline=None)
def test_compiled_copies_are_those_of_numpy(
    compiled: None,
    number: int,
    by: str,
    layout: str,
    ids: list[int],
    first: int,
    gap: int,
    apart: bool,
    edges: list[int],
) -> None:
    row = find_format(number)
    geometry = Geometry(2, 12, 2, 2, 3, 1, planes=row.planes)
    count = CacheLayout(row, geometry).pointers
    step = 12 * 2 * geometry.token_bytes // count + gap
    paged = nowhere([0x100000 + k * step for k in range(count)], number, geometry)
    side, flat = paged.layout.side(by), chunk_side(find_chunk_layout(layout), geometry, 4, by)
    plan = copy_plan(geometry, side, flat, by)
    values = np.array(ids if by == "slot" else [abs(i) for i in ids], np.int64)
    first = min(first, len(values))
    chunk = 4 * geometry.token_bytes + gap
    src = Operands(paged.bases, IndexVector(values, 0, len(values)))
    dst = Operands(np.array([0x200000 + k * chunk for k in range(12)], np.uint64))
    cuts = [0x100000 + e for e in edges] + [0x200000 + e for e in edges[::2]]
    bases = (paged.bases,) if apart else ()
    for ends in ((src, dst), (dst, src)):
        turned = plan if ends[0] is src else copy_plan(geometry, flat, side, by)
        want = copy_engine.split(copy_engine.describe(turned, *ends, first, len(values) - first, *bases), cuts)
        got = copy_engine.DescriptorPlan(turned)(*ends, first, len(values) - first, apart=bases, edges=cuts)
        if len(set(values.tolist())) == len(values):
            assert pairs(got) == pairs(want)
        borders = [*cuts, *(paged.bases.tolist() if apart else ())]
        for to, at, n in rows_of(got):
            assert not any(begin < border < begin + n for begin in (to, at) for border in borders)
        # Neighbouring items on two pages may stay apart, though their bytes touch where pages do.
        crossings = sum(b == a + 1 for a, b in itertools.pairwise(values.tolist())) if by == "slot" else 0
        assert len(got) <= len(want) + crossings * turned.runs_per_item


def rows_of(d: Descriptors) -> list[tuple[int, int, int]]:
    return list(zip(d.dst.tolist(), d.src.tolist(), d.sizes.tolist(), strict=True))


def test_rows_of_one_copy_lie_in_one_registration(fake: FakeDriver) -> None:
    with (
        kvraw.HostPool(1 << 16, device=0, options=kvraw.HostOptions(step_bytes=1 << 14)) as pool,
        kvraw.DeviceBuffer(1 << 16, 0) as memory,
        kvraw.Stream(0) as stream,
        DeviceScope(0),
    ):
        places = np.arange(8, dtype=np.uint64) * np.uint64(8192)
        ends = places + np.uint64(pool.address), places + np.uint64(memory.address)
        for rows in (2, 8):
            fake.memset_async(memory.address, rows, 1 << 16, stream.handle)
            some = copy_engine.Descriptors(ends[0][:rows], ends[1][:rows], np.full(rows, 4096, np.uint64))
            copy_engine.enqueue(some, stream.handle, capturing=True)
            stream.synchronize()
            whole = pool.view(pool.address, 1 << 16).reshape(8, 2, 4096)
            assert (whole[:rows, 0] == rows).all()
            assert not whole[:, 1].any()
        assert fake.calls["memcpy_2d_async"] == 0
        assert fake.calls["memcpy_async"] == 10


@pytest.mark.parametrize("side", ["dst", "src"])
@pytest.mark.parametrize(
    ("shift", "pitch", "width", "edge", "whole"),
    [
        (0, 8192, 8192, None, True),  # to the last byte of the memory; rows that touch are rows still
        (0, 8192, 4096, None, True),
        (4096, 8192, 4096, None, True),
        (4097, 8192, 4095, None, True),
        (0, 8192, 8191, 7 * 8192 + 8191, True),  # an edge where the last row ends
        (1, 8192, 8191, 1, True),  # and one where the first begins
        (0, 8192, 8191, 7 * 8192 + 8190, True),  # the last row is cut; the others are one copy
        (0, 8192, 8191, 1, True),
        (0, 8192, 4096, 3 * 8192, False),  # where a row begins: its neighbours lie on both sides
        (0, 8192, 4096, 3 * 8192 + 5000, False),  # in the gap behind a row
    ],
)
def test_rows_of_one_copy_span_no_edge(
    fake: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    side: str,
    shift: int,
    pitch: int,
    width: int,
    edge: int | None,
    whole: bool,
) -> None:
    real, reached = FakeDriver.memcpy_2d_async, []

    def noted(self: FakeDriver, *a: int) -> None:
        reached.append({"dst": (a[0], a[0] + a[1] * (a[5] - 1) + a[4]), "src": (a[2], a[2] + a[3] * (a[5] - 1) + a[4])})
        real(self, *a)

    monkeypatch.setattr(FakeDriver, "memcpy_2d_async", noted)
    with kvraw.HostPool(1 << 17, device=0) as pool, kvraw.DeviceBuffer(1 << 16, 0) as memory, kvraw.Stream(0) as stream:
        rows = np.arange(8, dtype=np.uint64) * np.uint64(pitch)
        ends = {"dst": rows + np.uint64(pool.address), "src": rows + np.uint64(memory.address)}
        ends[side] += np.uint64(shift)
        start = int(ends[side][0]) - shift
        with DeviceScope(0):
            fake.memset_async(memory.address, 7, 1 << 16, stream.handle)
            some = copy_engine.Descriptors(ends["dst"], ends["src"], np.full(8, width, np.uint64))
            copy_engine.enqueue(some, stream.handle, capturing=True, edges=() if edge is None else (start + edge,))
        stream.synchronize()
        assert len(reached) == whole
        assert edge is None or not any(begin < start + edge < end for r in reached for begin, end in (r[side],))
        want = np.zeros(1 << 17, np.uint8)
        for at in rows.tolist():
            at += shift * (side == "dst")
            want[at : at + width] = 7
        np.testing.assert_array_equal(pool.view(pool.address, 1 << 17), want)


def test_rows_to_the_last_byte_of_an_allocation_and_one_over(fake: FakeDriver) -> None:
    with kvraw.DeviceBuffer(1 << 16, 0) as memory, DeviceScope(0):
        inside = functools.partial(copy_engine._in_one, fake, edges=())  # type: ignore[arg-type]
        assert inside(memory.address, 1 << 16)
        assert inside(memory.address + 1, (1 << 16) - 1)
        assert not inside(memory.address, (1 << 16) + 1)
        assert not inside(memory.address + 1, 1 << 16)


@pytest.mark.parametrize("pitch", [63, 64, 65])
def test_rows_that_overlap_by_a_byte_are_no_rows(fake: FakeDriver, pitch: int) -> None:
    """The driver refuses a pitch below the width; sources may overlap."""
    with kvraw.HostPool(1 << 16, device=0) as pool, kvraw.DeviceBuffer(1 << 12, 0) as memory, kvraw.Stream(0) as stream:
        source = np.arange(1 << 12, dtype=np.uint64).astype(np.uint8)
        pool.view(pool.address + 4096, 1 << 12)[:] = source
        to, at = (np.arange(6, dtype=np.uint64) * np.uint64(n) for n in (128, pitch))
        some = copy_engine.Descriptors(
            to + np.uint64(pool.address), at + np.uint64(memory.address), np.full(6, 64, np.uint64)
        )
        with DeviceScope(0):
            fake.memcpy_async(memory.address, pool.address + 4096, 1 << 12, stream.handle)
            copy_engine.enqueue(some, stream.handle, capturing=True)
        stream.synchronize()
        assert fake.calls["memcpy_2d_async"] == (pitch >= 64)
        for k in range(6):
            found = pool.view(pool.address + 128 * k, 128)
            np.testing.assert_array_equal(found, [*source[k * pitch : k * pitch + 64], *[0] * 64])


def test_copies_that_touch_are_joined_and_those_that_nearly_touch_are_not() -> None:
    for gap in (-1, 0, 1):
        for other in (-1, 0, 1):
            d = of((1000, 5000, 64), (1064 + gap, 5064 + other, 64))
            joined = copy_engine.merge(d)
            assert len(joined) == (1 if gap == other == 0 else 2)
            back = of((1064 + gap, 5064 + other, 64), (1000, 5000, 64))
            assert len(copy_engine.merge(back)) == len(joined)


def test_an_edge_at_either_end_of_a_copy_cuts_nothing() -> None:
    d = of((1000, 5000, 64))
    for edge in (999, 1000, 1064, 1065, 4999, 5000, 5064):
        assert pairs(copy_engine.split(d, [edge])) == pairs(d)
        assert len(copy_engine.split(d, [edge])) == 1
        assert not registration.spans(1000, 1064, [edge])
    for edge in (1001, 1063, 5001, 5063):
        assert copy_engine.split(d, [edge]).sizes.tolist() == [
            1 + (edge in (1063, 5063)) * 62,
            63 - (edge in (1063, 5063)) * 62,
        ]
        assert registration.spans(1000, 1064, [edge]) == (edge < 5000)


def test_a_refused_batch_names_the_callers_entry(fake: FakeDriver) -> None:
    with kvraw.HostPool(1 << 16, device=0) as pool, kvraw.DeviceBuffer(1 << 16, 0) as memory, kvraw.Stream(0) as stream:
        outside = int(np.zeros(8, np.uint8).ctypes.data)
        dst = [pool.address, pool.address + 4096, outside, pool.address + 8192]
        src = [memory.address + 4096 * k for k in range(4)]
        with pytest.raises(DriverError) as caught:
            kvraw.memcpy_batch(dst, src, [64, 0, 8, 64], stream=stream, device=0)
        assert caught.value.index == 2
        stream.synchronize()


def test_no_copy_grows_over_a_base_address() -> None:
    up = np.arange(0, 8 * 64, 64, dtype=np.uint64)
    for order in (slice(None), slice(None, None, -1)):
        d = Descriptors((up + 4096)[order], (up + 9000)[order], np.full(8, 64, np.uint64))
        assert len(copy_engine.merge(d)) == 1
        for apart in ([4096 + 128], [9000 + 128], [4096, 9000, 4096 + 128, 9000 + 128, 20000]):
            found = copy_engine.merge(d, *(np.array(part, np.uint64) for part in (apart[::2], apart[1::2])))
            assert sorted(zip(found.dst.tolist(), found.src.tolist(), found.sizes.tolist(), strict=True)) == [
                (4096, 9000, 128),
                (4096 + 128, 9000 + 128, 6 * 64),
            ]
