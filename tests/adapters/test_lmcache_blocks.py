"""Transfers by block ids: every format, place and kind of argument, whole buffers against plain indexing."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw.adapters.lmcache import _memo
from tests.helpers.memory import Laid, Tensor, numbers
from tests.helpers.oracle import MLA, PAGED, Shape, move

FORMATS = [key for key in PAGED if isinstance(key[0], int)]
TOKENS = 4


def shape_of(number: int, planes: int) -> Shape:
    heads = 1 if number in MLA else 3
    return Shape(nl=2, nb=7, bs=2, nh=heads, d=6, planes=planes)


def describe(number: int, s: Shape, element: int = 2) -> ops.PageBufferShapeDesc:
    d = ops.PageBufferShapeDesc()
    d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size = (
        s.planes, s.nl, s.nb, s.bs, s.nh, s.d // element, element,
    )  # fmt: skip
    return d


class World:
    """A paged cache and objects, laid into memory."""

    def __init__(self, number: int, planes: int, device: int | None, objects: int, kind: str = "pinned") -> None:
        self.number, self.device = number, device
        self.shape = s = shape_of(number, planes)
        paged = PAGED[(number, planes)]
        self.paged = Laid("host" if device is None else "device", [paged.shape(s)] * paged.tensors(s), device, 1)
        kind = "host" if device is None else kind
        self.objects = Laid(kind, [(planes, s.nl, TOKENS, s.nh * s.d)] * objects, device, 2)

    @property
    def where(self) -> str:
        return "cpu" if self.device is None else f"cuda:{self.device}"

    def expect(self, direction: str, ids: list[int], skip: int = 0) -> None:
        move(
            self.number, self.shape, self.paged.arrays, self.objects.arrays, "2LTD", TOKENS,
            direction, "block", ids, max(skip, 0),
        )  # fmt: skip

    def check(self) -> None:
        self.paged.check()
        self.objects.check()

    def close(self) -> None:
        self.paged.close()
        self.objects.close()


def call(w: World, ids: Any, direction: Any, *, table: Any = None, objects: Any = None, skip: int = 0) -> None:
    ops.multi_layer_block_kv_transfer(
        w.paged.addresses if table is None else table,
        w.objects.addresses if objects is None else objects,
        ids, w.where, direction, describe(w.number, w.shape), TOKENS, w.number, skip,
    )  # fmt: skip


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize(("number", "planes"), FORMATS)
def test_every_format(place: int | None, number: int, planes: int, direction: str) -> None:
    w = World(number, planes, place, 3)
    ids = [6, 0, 3, 1, 5]  # the last object is filled half
    w.expect(direction, ids, 1)
    call(w, ids, ops.D2H if direction == "store" else ops.H2D, skip=1)
    w.check()
    w.close()


@pytest.mark.parametrize("kind", ["pinned", "device", "host"])
@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("on_device", [False, True])
def test_tensors_everywhere(place: int | None, kind: str, direction: str, on_device: bool) -> None:
    if place is None and kind != "host":
        pytest.skip("the host has one kind of memory")
    w = World(1, 2, place, 3, kind)
    ids = [6, 0, 3, 1, 5, 2]
    w.expect(direction, ids, 3)
    there = numbers(ids, "device", place) if on_device and place is not None else np.array(ids, np.int32)
    table = numbers(w.paged.addresses, "device", place) if on_device and place is not None else w.paged.tensors(2)
    for _ in range(2):  # the second call finds everything made ready
        call(w, there, int(direction == "store"), table=table, objects=w.objects.tensors(2), skip=3)
    w.check()
    w.close()


@pytest.mark.parametrize("direction", ["store", "load"])
def test_staging_buffers_are_looked_up_once(fake: Any, direction: str) -> None:
    w = World(1, 2, 0, 3, "device")
    ids = [6, 0, 3, 1, 5, 2]
    w.expect(direction, ids, 0)
    table, there = numbers(w.paged.addresses, "device", 0), numbers(ids, "device", 0)
    for _ in range(4):
        before = fake.calls["pointer_info"]
        call(w, there, int(direction == "store"), table=table)
    assert fake.calls["pointer_info"] == before
    w.check()
    w.close()


@pytest.mark.parametrize("engine", ["auto", "kernel", "staged"])
def test_engines_asked_for(fake: Any, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setenv("KVRAW_ENGINE", engine)
    for kind in ("pinned", "device"):
        w = World(1, 2, 0, 3, kind)
        w.expect("store", [6, 0, 3, 1, 5, 2], 0)
        if kind == "device" and engine == "staged":
            with pytest.raises(kvraw.PlacementError, match="both sides are device memory"):
                call(w, [6, 0, 3, 1, 5, 2], 1)
        else:
            call(w, [6, 0, 3, 1, 5, 2], 1)
            w.check()
        w.close()


def test_a_changed_table_is_read_again(place: int | None) -> None:
    w, other = World(1, 2, place, 1), World(1, 2, place, 1)
    table = numbers(w.paged.addresses, "host" if place is None else "device", place)
    w.expect("store", [3, 1], 0)
    call(w, [3, 1], 1, table=table)
    w.check()
    table.memory = numbers(other.paged.addresses, "host" if place is None else "device", place).memory
    s = w.shape
    move(1, s, other.paged.arrays, w.objects.arrays, "2LTD", TOKENS, "store", "block", [3, 1], 0)
    call(w, [3, 1], 1, table=table)
    w.check()
    w.close()
    other.close()


def test_what_was_made_of_tensors_goes_with_them(fake: Any) -> None:
    w = World(1, 2, 0, 1)
    table, tensors = numbers(w.paged.addresses, "device", 0), w.paged.tensors(2)
    for one in (table, tensors):
        call(w, [3, 1], 1, table=one)
    assert len(_memo._known) == 3  # the table by itself, and what both arguments were read as
    del one, table
    assert len(_memo._known) == 1
    tensors[1] = Tensor(w.paged.memory, w.paged.offsets[1], tensors[0].shape, 2)
    assert not _memo._known
    call(w, [3, 1], 1, table=tensors)
    w.close()


def test_objects_live_until_their_copy_is_over(fake: Any) -> None:
    w = World(1, 2, 0, 1)
    ids = numbers([3, 1], "device", 0)
    objects = w.objects.tensors(2)
    alive = weakref.ref(objects[0])
    call(w, ids, 1, objects=objects)
    del objects
    assert alive() is not None
    w.objects.memory.read()
    call(w, [3, 1], 1)  # asks what is over
    w.objects.memory.read()
    for _ in range(20):
        call(w, [3, 1], 1)
        w.objects.memory.read()
    assert alive() is None
    w.close()


def until_seen(w: World) -> None:
    for _ in range(4):  # the next call that finds the first one over
        call(w, [0], ops.D2H)


def test_skip_beyond_four_objects(place: int | None) -> None:
    w = World(2, 2, place, 7)
    ids = [0, 1, 2, 3, 4, 5, 6] * 2
    w.expect("store", ids, 11)
    call(w, ids, ops.D2H, skip=11)
    w.check()
    w.close()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("bad", [7, -1, 2**40])
def test_bad_ids(place: int | None, bad: int, on_device: bool) -> None:
    w = World(1, 2, place, 2)
    if place is None or not on_device:
        with pytest.raises(IndexError, match=rf"block_ids\[1\] is {bad}, must be in \[0, 7\)"):
            call(w, [0, bad], ops.H2D)
        w.check()
    else:
        w.expect("store", [0, 3], 0)
        w.expect("store", [0], 0)
        kept = w.objects.memory.read()
        call(w, numbers([0, bad], "device", place), ops.D2H)
        w.objects.memory.read()
        with pytest.raises(kvraw.BoundsError, match=rf"block_ids\[1\] is {bad}, must be in \[0, 7\)"):
            until_seen(w)
        row = w.shape.nh * w.shape.d
        assert (w.objects.memory.read()[64 + 2 * row : 64 + 4 * row] == kept[64 + 2 * row : 64 + 4 * row]).all()
        call(w, [0], ops.D2H)
    w.close()


def test_duplicate_destinations_are_not_refused(place: int | None) -> None:
    w = World(3, 1, place, 1)
    call(w, [2, 2], ops.H2D)
    row = w.shape.d * 2
    for layer, offset in enumerate(w.paged.offsets):
        got = w.paged.memory.read()[offset + 2 * row : offset + 3 * row]
        source = w.objects.arrays[0].reshape(w.shape.nl, 2, row)[layer]
        assert any((got == block).all() for block in source)
    w.close()


def test_padded_blocks(place: int | None) -> None:
    s = shape_of(3, 1)
    stride = s.bs * s.d + 10
    paged = Laid("host" if place is None else "device", [(s.nb, stride)] * s.nl, place, 1)
    objects = Laid("host" if place is None else "pinned", [(s.nl, TOKENS, s.d)] * 2, place, 2)
    ids = [5, 0, 6, 2]
    for at, block in enumerate(ids):
        for layer in range(s.nl):
            rows = paged.arrays[layer][block, : s.bs * s.d].reshape(s.bs, s.d)
            objects.arrays[at // 2][layer, at % 2 * 2 : at % 2 * 2 + 2] = rows
    d = describe(3, s)
    where = "cpu" if place is None else place
    tensors = [Tensor(paged.memory, o, (s.nb, s.bs, s.d // 2), 2, (stride // 2, s.d // 2, 1)) for o in paged.offsets]
    for table, on_error in ((paged.addresses, stride // 2), (tensors, 0)):
        d.block_stride_elems = on_error
        ops.multi_layer_block_kv_transfer(table, objects.addresses, ids, where, 1, d, TOKENS, 3, 0)
        paged.check()
        objects.check()
    paged.close()
    objects.close()


@pytest.mark.parametrize("direction", ["store", "load"])
def test_values_and_scales_in_one_page(place: int | None, direction: str) -> None:
    nl, nb, bs, width = 2, 5, 2, 12
    paged = Laid("host" if place is None else "device", [(nb, bs * width)] * nl, place, 1)
    objects = Laid("host" if place is None else "pinned", [(nl, TOKENS, width)] * 2, place, 2)
    ids = [4, 1, 0]
    for at, block in enumerate(ids):
        for layer in range(nl):
            for t in range(bs):
                page = paged.arrays[layer][block]
                values, scale = page[t * 8 : t * 8 + 8], page[bs * 8 + t * 4 : bs * 8 + t * 4 + 4]
                row = objects.arrays[at // 2][layer, at % 2 * bs + t]
                if direction == "store":
                    row[:8], row[8:] = values, scale
                else:
                    values[:], scale[:] = row[:8], row[8:]
    d = ops.PageBufferShapeDesc()
    d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size = 1, nl, nb, bs, 1, width, 1
    ops.multi_layer_block_kv_transfer(
        paged.addresses, objects.addresses, ids, "cpu" if place is None else place, direction == "store", d, TOKENS,
        ops.NL_X_NB_BSV_BSS, 0,
    )  # fmt: skip
    paged.check()
    objects.check()
    paged.close()
    objects.close()


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("kind", ["pinned", "host"])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 4), (2, 1, 4)], ids=str)
def test_planes_of_several_widths(place: int | None, direction: str, kind: str, sizes: tuple[int, int, int]) -> None:
    """Objects by address, in rows of all planes' bytes; `sizes` are bytes of an element."""
    nl, nb, bs, widths = 2, 5, 2, (6, 2, 4)
    paged = Laid("host" if place is None else "device", [(nb, bs, 1, w) for _ in range(nl) for w in widths], place, 1)
    objects = Laid("host" if place is None else kind, [(nl, TOKENS, 12)] * 2, place, 2)
    ids = [4, 1, 0]
    for at, block in enumerate(ids):
        for layer in range(nl):
            begin = 0
            for k, w in enumerate(widths):
                part = objects.arrays[at // 2][layer, at % 2 * bs : at % 2 * bs + bs, begin : begin + w]
                pages = paged.arrays[layer * 3 + k][block, :, 0]
                if direction == "store":
                    part[:] = pages
                else:
                    pages[:] = part
                begin += w
    t = [paged.tensors(sizes[k % 3])[k] for k in range(3 * nl)]
    d = ops.PageBufferShapeDesc()
    d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size = 1, nl, nb, bs, 1, 12 // sizes[1], sizes[1]
    ops.multi_layer_block_kv_transfer(
        [t[:3], t[3:]],
        objects.addresses,
        ids,
        "cpu" if place is None else place,
        direction == "store",
        d,
        TOKENS,
        17,
        0,
    )
    paged.check()
    objects.check()
    paged.close()
    objects.close()


def test_nothing_to_do(place: int | None) -> None:
    w = World(1, 2, place, 2)
    call(w, [], ops.D2H)
    call(w, [0, 1], ops.D2H, objects=[])
    call(w, [0, 1], ops.D2H, skip=2)
    call(w, [0, 1], ops.H2D, skip=99)
    w.check()
    w.expect("store", [3, 4, 5, 6])
    call(w, [3, 4, 5, 6, 0, 99], ops.D2H, skip=-1)  # ids beyond the last object are ignored
    w.check()
    w.close()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokens": 5}, RuntimeError, "lmcache_chunk_size is 5, must be a positive multiple of the block size 2"),
        ({"tokens": 0}, ValueError, "lmcache_chunk_size is 0"),
        ({"direction": 2}, ValueError, "Unsupported direction"),
        ({"direction": "D2H"}, TypeError, "direction is a str"),
        ({"number": 19}, RuntimeError, "Unsupported EngineKVFormat"),
        ({"table": [8]}, RuntimeError, "paged_buffer_ptrs has 1 addresses, format 1 with 2 layers takes 2"),
        ({"table": "x"}, TypeError, "must hold tensors"),
        ({"device": "xpu:0"}, TypeError, "must be a CUDA device or the CPU"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    w = World(1, 2, None, 2)
    a = {"table": w.paged.addresses, "device": "cpu", "direction": 1, "tokens": TOKENS, "number": 1, **change}
    with pytest.raises(error, match=message):
        ops.multi_layer_block_kv_transfer(
            a["table"], w.objects.addresses, [0, 1], a["device"], a["direction"], describe(1, w.shape), a["tokens"],
            a["number"], 0,
        )  # fmt: skip
    w.check()


def test_offsets_beyond_32_bits() -> None:
    # One layer whose blocks lie 3 GiB apart in a mapping that only the touched pages take memory of.
    import mmap

    stride = 3 << 30
    memory = mmap.mmap(
        -1, stride + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    )
    view = np.frombuffer(memory, np.uint8)
    view[stride : stride + 12] = np.arange(12)
    d = ops.PageBufferShapeDesc()
    d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size, d.block_stride_elems = 1, 1, 2, 2, 1, 6, 1, stride
    out = np.zeros(12, np.uint8)
    ops.multi_layer_block_kv_transfer([view.ctypes.data], [out.ctypes.data], [1], "cpu", 1, d, 2, 3, 0)
    assert out.tolist() == list(range(12))
    del view


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("engine", ["auto", "copy", "staged", "kernel", "auto, ids on the device"])
def test_objects_over_registrations_of_others(
    fake: Any, monkeypatch: pytest.MonkeyPatch, engine: str, direction: str
) -> None:
    # Somebody else pinned the objects in pieces of a page, of which kvraw keeps no books.
    from kvraw.runtime.context import DeviceScope

    monkeypatch.setenv("KVRAW_ENGINE", engine.split(",")[0])
    page, s = 4096, shape_of(1, 2)
    cache = Laid("device", [PAGED[(1, 2)].shape(s)] * s.nl, 0, 1)
    memory = np.random.default_rng(3).integers(0, 256, 5 * page, dtype=np.uint8)
    begin = -int(memory.ctypes.data) % page
    nbytes = 2 * s.nl * TOKENS * s.nh * s.d
    want = memory.copy()
    places = [begin + page - 60, begin + 2 * page - nbytes + 8]
    objects = [want[at : at + nbytes].reshape(2, s.nl, TOKENS, s.nh * s.d) for at in places]
    move(1, s, cache.arrays, objects, "2LTD", TOKENS, direction, "block", [6, 0, 3, 1], 0)
    start = int(memory.ctypes.data)
    with DeviceScope(0):
        for k in range(3):
            fake.host_register(start + begin + k * page, page)
        with kvraw.Stream(0) as stream:
            monkeypatch.setattr("kvraw.adapters.lmcache._blocks.current_stream", lambda device: stream.handle)
            ids = numbers([6, 0, 3, 1], "device", 0) if "," in engine else [6, 0, 3, 1]
            ops.multi_layer_block_kv_transfer(
                cache.addresses, [start + at for at in places], ids, 0, direction == "store", describe(1, s),
                TOKENS, 1, 0,
            )  # fmt: skip
            stream.synchronize()
            for k in range(3):
                fake.host_unregister(start + begin + k * page)
    cache.check()
    np.testing.assert_array_equal(memory, want)
    cache.close()
