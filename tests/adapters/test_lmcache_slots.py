"""Transfers by slots: every operation and format, places of tokens and slots, negative slots and skipped tokens."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import kvraw.adapters.lmcache as ops
from tests.helpers.memory import Laid, Tensor, numbers
from tests.helpers.oracle import PAGED, Shape, move

MULTI = [key for key in PAGED if isinstance(key[0], int) and key[0] != 16]
SLOTS = [5, -1, 13, 0, 8, -7, 3]


def shape_of(number: int, heads: int = 2) -> Shape:
    return Shape(nl=2, nb=7, bs=2, nh=1 if number in (3, 5) else heads, d=8, planes=0)


def kinds(place: int | None) -> tuple[str, str]:
    return ("host", "host") if place is None else ("device", "pinned")


def slots_at(place: int | None, on_device: bool, values: list[int] = SLOTS) -> Any:
    return numbers(values, "device", place) if on_device and place is not None else np.array(values, np.int64)


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize(("number", "planes"), MULTI)
def test_multi_layer(place: int | None, number: int, planes: int, direction: str) -> None:
    s = Shape(**{**shape_of(number).__dict__, "planes": planes})
    paged, flat = kinds(place)
    cache = Laid(paged, [PAGED[(number, planes)].shape(s)] * PAGED[(number, planes)].tensors(s), place, 1)
    rows = Laid(flat, [(planes, s.nl, len(SLOTS), s.nh * s.d)], place, 2)
    move(number, s, cache.arrays, rows.arrays, "2LTD", len(SLOTS), direction, "slot", SLOTS, 2)
    half = number in (10, 12) and planes == 1  # head_size is one half of a fused head then
    ops.multi_layer_kv_transfer(
        rows.tensors(2)[0], numbers(cache.addresses, paged, place), slots_at(place, True),
        "cpu" if place is None else place, s.nb * s.bs, int(direction == "store"), number,
        s.bs, s.d // (4 if half else 2), 2,
    )  # fmt: skip
    cache.check()
    rows.check()
    cache.close()
    rows.close()


@pytest.mark.parametrize("said", [(0, 0, 0), (10**7, 3, 5), (14, 2, 2), (14, 2, 4), (6, 1, -1)])
@pytest.mark.parametrize(("number", "planes"), [key for key in PAGED if isinstance(key[0], int)])
def test_tensors_say_more_than_arguments(
    place: int | None, number: int, planes: int, said: tuple[int, int, int]
) -> None:
    s = Shape(**{**shape_of(number).__dict__, "planes": planes})
    paged, flat = kinds(place)
    cache = Laid(paged, [PAGED[(number, planes)].shape(s)] * PAGED[(number, planes)].tensors(s), place, 1)
    rows = Laid(flat, [(planes, s.nl, len(SLOTS), s.nh * s.d)], place, 2)
    move(number, s, cache.arrays, rows.arrays, "2LTD", len(SLOTS), "store", "slot", SLOTS, 0)
    where = "cpu" if place is None else place
    ops.multi_layer_kv_transfer(
        rows.tensors(2)[0], cache.tensors(2), slots_at(place, True), where, said[0], ops.D2H, number, *said[1:]
    )
    cache.check()
    rows.check()
    cache.close()
    rows.close()


def view_of(laid: Laid, array: np.ndarray) -> Tensor:
    """A view of what was laid, as a tensor of elements of 2 bytes."""
    shape, offset = (*array.shape[:-1], array.shape[-1] // 2), array.ctypes.data - laid.expected.ctypes.data
    return Tensor(laid.memory, offset, shape, 2, (*(n // 2 for n in array.strides[:-1]), 1))


# Format, planes, bytes of what a tensor is a view of, the view, and where a slot of a plane is in it.
VIEWS: list[tuple[int, int, tuple[int, ...], Any, Any]] = [
    (1, 2, (2, 14, 22), np.s_[..., :16], lambda a, k, s: a[k, s]),
    (1, 2, (2, 14, 2, 12), np.s_[..., 2:10], lambda a, k, s: a[k, s]),
    (1, 2, (2, 7, 2, 22), np.s_[..., :16], lambda a, k, s: a[k, s // 2, s % 2]),
    (2, 2, (7, 2, 2, 22), np.s_[..., :16], lambda a, k, s: a[s // 2, k, s % 2]),
    (3, 1, (14, 22), np.s_[:, 2:18], lambda a, k, s: a[s]),
    (4, 2, (14, 3, 16), np.s_[:, 1], lambda a, k, s: a[s]),
    (5, 1, (7, 2, 22), np.s_[..., :16], lambda a, k, s: a[s // 2, s % 2]),
    (9, 2, (14, 2, 16), np.s_[:, 1], lambda a, k, s: a[s]),
    (9, 2, (14, 2, 12), np.s_[..., :8], lambda a, k, s: a[s]),
    (9, 2, (2, 14, 8), np.s_[...], lambda a, k, s: a[:, s]),
    (11, 2, (14, 2, 2, 12), np.s_[..., :8], lambda a, k, s: a[s, :, k]),
    (12, 1, (7, 2, 3, 8), np.s_[:, :, :2], lambda a, k, s: a[s // 2, :, s % 2]),
    (13, 1, (14, 2, 12), np.s_[..., :8], lambda a, k, s: a[s]),
    (18, 1, (8, 2, 16), np.s_[:7], lambda a, k, s: a[s // 2, s % 2]),
]


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("case", range(len(VIEWS)))
def test_flat_tensors_with_strides(place: int | None, case: int, direction: str) -> None:
    number, planes, shape, view, at = VIEWS[case]
    nl, apart = 2, number in (4, 9)  # K and V are tensors of their own
    cache = Laid(kinds(place)[0], [shape] * (nl * planes if apart else nl), place, 1)
    rows = Laid(kinds(place)[1], [(planes, nl, len(SLOTS), 16)], place, 2)
    for (t, slot), k, layer in itertools.product(enumerate(SLOTS), range(planes), range(nl)):
        if slot >= 0:
            a, b = at(cache.arrays[k * nl * apart + layer][view], k, slot), rows.arrays[0][k, layer, t]
            if direction == "store":
                b[:] = a.ravel()
            else:
                a[...] = b.reshape(a.shape)
    tensors = [view_of(cache, array[view]) for array in cache.arrays]
    if shape[0] == 2 and number == 9:  # heads outside the tokens
        tensors = [
            Tensor(t.memory, t._offset, (t.shape[1], t.shape[0], t.shape[2]), 2, (t._strides[1], t._strides[0], 1))
            for t in tensors
        ]
    where = "cpu" if place is None else place
    way = int(direction == "store")
    ops.multi_layer_kv_transfer(rows.tensors(2)[0], tensors, slots_at(place, True), where, 0, way, number)
    cache.check()
    rows.check()
    if number == 9:
        ops.multi_layer_kv_transfer_unilateral(rows.tensors(2)[0], tensors, slots_at(place, True), where, 0, way, 1)
        cache.check()
        rows.check()
    cache.close()
    rows.close()


def test_one_layer_of_flat_tensors(place: int | None) -> None:
    cache = Laid(kinds(place)[0], [(14, 22)] * 2, place, 1)
    rows = Laid(kinds(place)[1], [(len(SLOTS), 16), (2, len(SLOTS), 16), (2, 1, len(SLOTS), 16)], place, 2)
    for (at, slot), k in itertools.product(enumerate(SLOTS), range(2)):
        if slot >= 0:
            rows.arrays[1][k, at] = rows.arrays[2][k, 0, at] = cache.arrays[k][slot, :16]
            if k == 0:
                rows.arrays[0][at] = cache.arrays[k][slot, :16]
    tensors, slots = [view_of(cache, a[:, :16]) for a in cache.arrays], slots_at(place, True)
    one, two, all_layers = rows.tensors(2)
    ops.single_layer_kv_transfer(one, tensors[0], slots, ops.D2H, 3)
    ops.single_layer_kv_transfer_sgl(two, *tensors, slots, ops.D2H)
    ops.load_and_reshape_flash(all_layers, *tensors, slots, 0)
    cache.check()
    rows.check()
    cache.close()
    rows.close()


def test_tensors_beyond_the_layers_and_lists_of_addresses(place: int | None) -> None:
    cache = Laid(kinds(place)[0], [(2, 14, 16)] * 3, place, 1)
    rows = Laid(kinds(place)[1], [(2, 1, len(SLOTS), 16)], place, 2)
    given: Any
    for layer, number, given in ((0, 1, cache.tensors(2)), (1, 0, cache.tensors(2)[1:2]), (2, 1, cache.addresses[2:])):
        for at, slot in enumerate(SLOTS):
            if slot >= 0:
                rows.arrays[0][:, 0, at] = cache.arrays[layer][:, slot]
        where = "cpu" if place is None else place
        ops.multi_layer_kv_transfer(rows.tensors(2)[0], given, slots_at(place, True), where, 14, ops.D2H, number)
        rows.check()
    cache.check()
    cache.close()
    rows.close()


@pytest.mark.parametrize("kind", ["pinned", "device", "host"])
@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("on_device", [False, True])
def test_places(place: int | None, kind: str, direction: str, on_device: bool) -> None:
    if place is None and kind != "host":
        pytest.skip("the host has one kind of memory")
    s = Shape(nl=2, nb=7, bs=2, nh=2, d=6, planes=2)
    cache = Laid(kinds(place)[0], [(2, s.nb, s.bs, s.nh, s.d)] * s.nl, place, 1)
    rows = Laid(kind, [(2, s.nl, len(SLOTS), s.nh * s.d)], place, 2)
    move(1, s, cache.arrays, rows.arrays, "2LTD", len(SLOTS), direction, "slot", SLOTS, 0)
    for table in (cache.tensors(2), [Tensor(t.memory, t._offset, (2, 14, 6), 2) for t in cache.tensors(2)]):
        ops.multi_layer_kv_transfer(
            rows.tensors(2)[0], table, slots_at(place, on_device), "cpu" if place is None else place, 14,
            int(direction == "store"), ops.NL_X_TWO_NB_BS_NH_HS,
        )  # fmt: skip
    cache.check()
    rows.check()
    cache.close()
    rows.close()


@pytest.mark.parametrize("direction", ["store", "load"])
def test_cross_layer_table_of_layers(direction: str) -> None:
    s = Shape(nl=3, nb=5, bs=2, nh=1, d=8, planes=2)
    cache = Laid("host", [(2, s.nb, s.bs, s.nh, s.d)] * s.nl, None, 1)
    rows = Laid("host", [(2, s.nl, 3, s.d)], None, 2)
    move(1, s, cache.arrays, rows.arrays, "2LTD", 3, direction, "slot", [4, -1, 9], 0)
    table = numbers(cache.addresses, "host", None)
    ops.multi_layer_kv_transfer(
        rows.tensors(2)[0], table, np.array([4, -1, 9]), "cpu", 10, int(direction == "store"), 0, s.bs
    )
    cache.check()
    rows.check()


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize(("number", "planes"), [(1, 2), (5, 1)])
def test_unilateral(place: int | None, number: int, planes: int, direction: str) -> None:
    nl, slots, width = 2, 14, 10  # a width that is no multiple of 8
    cache = Laid(kinds(place)[0], [(slots, width)] * (nl * planes), place, 1)
    rows = Laid(kinds(place)[1], [(planes, nl, len(SLOTS), width)], place, 2)
    for (at, slot), plane, layer in itertools.product(enumerate(SLOTS), range(planes), range(nl)):
        if slot >= 0:
            a, b = cache.arrays[plane * nl + layer][slot], rows.arrays[0][plane, layer, at]
            (b if direction == "store" else a)[:] = a if direction == "store" else b
    ops.multi_layer_kv_transfer_unilateral(
        rows.tensors(2)[0], cache.tensors(2), slots_at(place, True), "cpu" if place is None else place, slots,
        int(direction == "store"), number,
    )  # fmt: skip
    cache.check()
    rows.check()
    cache.close()
    rows.close()


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 6, 7, 10, 11])
def test_single_layer(place: int | None, number: int, direction: str, token_major: bool) -> None:
    planes = 1 if number in (3, 5, 10, 11) else 2
    s = Shape(nl=1, nb=7, bs=2, nh=1 if number in (3, 5) else 2, d=6, planes=planes)
    cache = Laid(kinds(place)[0], [PAGED[(number, planes)].shape(s)], place, 1)
    hidden, count = s.nh * s.d, len(SLOTS)
    shape = (count, hidden) if planes == 1 else (count, 2, hidden) if token_major else (2, count, hidden)
    rows = Laid(kinds(place)[1], [shape], place, 2)
    array = rows.arrays[0].reshape(1, 1, count, hidden) if planes == 1 else rows.arrays[0]
    if planes == 2:
        array = array[:, None] if token_major else array[:, None, :, :]
    layout = "T2D" if token_major and planes == 2 else "2LTD"
    move(number, s, cache.arrays, [array], layout, count, direction, "slot", SLOTS, 0)
    ops.single_layer_kv_transfer(
        rows.tensors(2)[0], cache.tensors(2)[0], slots_at(place, True), int(direction == "store"), number, token_major
    )
    cache.check()
    rows.check()
    cache.close()
    rows.close()


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_single_layer_with_two_tensors(place: int | None, direction: str, token_major: bool) -> None:
    s = Shape(nl=1, nb=7, bs=2, nh=2, d=6, planes=2)
    cache = Laid(kinds(place)[0], [(s.nb, s.bs, s.nh, s.d)] * 2, place, 1)
    count = len(SLOTS)
    rows = Laid(kinds(place)[1], [(count, 2, 12) if token_major else (2, count, 12)], place, 2)
    array = rows.arrays[0][:, None] if token_major else rows.arrays[0][:, None, :, :]
    move(9, s, cache.arrays, [array], "T2D" if token_major else "2LTD", count, direction, "slot", SLOTS, 0)
    ops.single_layer_kv_transfer_sgl(
        rows.tensors(2)[0], *cache.tensors(2), slots_at(place, True), int(direction == "store"), token_major
    )
    cache.check()
    rows.check()
    cache.close()
    rows.close()


@pytest.mark.parametrize("direction", ["store", "load"])
def test_flash(place: int | None, direction: str) -> None:
    # Slot -1 must leave its row, and the last slot of the last block, as they are.
    s = Shape(nl=1, nb=7, bs=2, nh=2, d=6, planes=2)
    cache = Laid(kinds(place)[0], [(s.nb, s.bs, s.nh, s.d)] * 2, place, 1)
    rows = Laid(kinds(place)[1], [(2, 3, len(SLOTS), 12)], place, 2)
    move(9, s, cache.arrays, [rows.arrays[0][:, 1:2]], "2LTD", len(SLOTS), direction, "slot", SLOTS, 0)
    call = ops.load_and_reshape_flash if direction == "store" else ops.reshape_and_cache_back_flash
    call(rows.tensors(2)[0], *cache.tensors(2), slots_at(place, True), 1)
    cache.check()
    rows.check()
    cache.close()
    rows.close()


def test_bad_arguments() -> None:
    cache = Laid("host", [(2, 7, 2, 2, 6)] * 2, None, 1)
    rows = Laid("host", [(2, 2, 4, 12)], None, 2)
    key_value, table = rows.tensors(2)[0], numbers(cache.addresses, "host", None)

    def call(slots: Any = (0, 1, 2, 3), number: int = 1, table: Any = table, **more: Any) -> None:
        ops.multi_layer_kv_transfer(key_value, table, np.array(slots), "cpu", 14, 1, number, **more)

    with pytest.raises(IndexError, match=r"slot_mapping\[2\] is 14"):
        call((0, 1, 14, 3))
    with pytest.raises(ValueError, match="slot_mapping has 2 slots for 4 tokens"):
        call((0, 1))
    with pytest.raises(RuntimeError, match="block_size is 0, must be positive for format 2"):
        call(number=2)
    with pytest.raises(RuntimeError, match="head_size is 5, must divide 6"):
        call(number=6, block_size=2, head_size=5)
    with pytest.raises(RuntimeError, match="key_value has 2 planes, format 3 has 1"):
        call(number=3)
    with pytest.raises(TypeError, match=r"Expected torch\.Tensor or list"):
        call(table=7)
    with pytest.raises(RuntimeError, match="a layer of it is no single tensor"):
        ops.single_layer_kv_transfer(key_value, cache.tensors(2)[0], np.array([0]), 1, 9)
    k, v = Laid("host", [(7, 2, 2, 6)], None, 1).tensors(2)[0], Laid("host", [(7, 2, 2, 8)], None, 1).tensors(2)[0]
    with pytest.raises(RuntimeError, match=r"tensors\[1\] \(shape .* differs from"):
        ops.single_layer_kv_transfer_sgl(key_value, k, v, np.array([0]), 1)
    cache.check()
    rows.check()


@pytest.mark.parametrize(
    ("shape", "item", "message"),
    [
        ((2, 2, 4, 24), 2, "has 48 bytes in elements of 2, must have 24, dense"),
        ((2, 2, 4, 6), 2, "has 12 bytes in elements of 2, must have 24"),
        ((2, 2, 4, 6), 4, "has 24 bytes in elements of 4, must have 24, dense, in elements of 2"),
        ((2, 3, 4, 12), 2, "key_value has 3 layers, the paged tensors have 2"),
        ((2, 4, 12), 2, r"key_value has shape \(2, 4, 12\), must be \[planes, layers, tokens, hidden\]"),
    ],
)
@pytest.mark.parametrize("direction", [ops.D2H, ops.H2D])
def test_tokens_must_be_those_of_the_tensors(
    place: int | None, shape: tuple[int, ...], item: int, message: str, direction: Any
) -> None:
    cache = Laid(kinds(place)[0], [(2, 7, 2, 2, 12)] * 2, place, 1)
    rows = Laid(kinds(place)[1], [(2, 3, 4, 24 * 2)], place, 2)
    tokens = Tensor(rows.memory, rows.offsets[0], shape, item)
    for number, given in ((1, cache.tensors(2)), (6, cache.tensors(2))):
        with pytest.raises(ValueError, match=message):
            ops.multi_layer_kv_transfer(
                tokens, given, slots_at(place, True, [0, 1, 2, 3]), "cpu" if place is None else place, 14,
                direction, number, 2, 6,
            )  # fmt: skip
    cache.check()
    rows.check()
    cache.close()
    rows.close()


@pytest.mark.parametrize("shape", [(2, 14), (14, 2, 2, 6, 1), (3, 14, 2, 6)])
def test_tensors_of_other_shapes(shape: tuple[int, ...]) -> None:
    cache = Laid("host", [(3 * 14 * 24,)], None, 1)
    rows = Laid("host", [(2, 1, 1, 24)], None, 2)
    tensor = Tensor(cache.memory, cache.offsets[0], shape, 2)
    with pytest.raises(ValueError, match="format 1 takes tensors PBTHD or PSHD or PBTD or PSD, not of shape"):
        ops.multi_layer_kv_transfer(rows.tensors(2)[0], [tensor], np.array([0]), "cpu", 14, 1, 1)
    flat = Tensor(cache.memory, cache.offsets[0], (14, 12), 2)
    with pytest.raises(ValueError, match="must have 2 or 3 axes"):
        ops.single_layer_kv_transfer_sgl(rows.tensors(2)[0], flat, flat, np.array([0]), 1)
    with pytest.raises(ValueError, match=r"must be \[2, layers, tokens, hidden\]"):
        ops.load_and_reshape_flash(tensor, tensor, tensor, np.array([0]), 0)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_values_and_scales_in_one_page(place: int | None, direction: str) -> None:
    nl, nb, bs, width = 2, 7, 2, 12
    cache = Laid(kinds(place)[0], [(nb, bs * width)] * nl, place, 1)
    rows = Laid(kinds(place)[1], [(1, nl, len(SLOTS), width)], place, 2)
    for (at, slot), layer in itertools.product(enumerate(SLOTS), range(nl)):
        if slot >= 0:
            page, t = cache.arrays[layer][slot // bs], slot % bs
            values, scale = page[t * 8 : t * 8 + 8], page[bs * 8 + t * 4 : bs * 8 + t * 4 + 4]
            row = rows.arrays[0][0, layer, at]
            if direction == "store":
                row[:8], row[8:] = values, scale
            else:
                values[:], scale[:] = row[:8], row[8:]
    table = numbers(cache.addresses, kinds(place)[0], place)
    ops.multi_layer_kv_transfer(
        rows.tensors(1)[0], table, slots_at(place, True), "cpu" if place is None else place, nb * bs,
        int(direction == "store"), 14, bs,
    )  # fmt: skip
    cache.check()
    rows.check()
    cache.close()
    rows.close()


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 4), (2, 1, 4)], ids=str)
def test_planes_of_several_widths(place: int | None, direction: str, sizes: tuple[int, int, int]) -> None:
    nl, nb, bs, widths = 2, 7, 2, (6, 2, 4)
    cache = Laid(kinds(place)[0], [(nb, bs, 1, w) for _ in range(nl) for w in widths], place, 1)
    rows = Laid(kinds(place)[1], [(1, nl, len(SLOTS), 12)], place, 2)
    for (at, slot), layer in itertools.product(enumerate(SLOTS), range(nl)):
        begin = 0
        for k, w in enumerate(widths):
            a = cache.arrays[layer * 3 + k][slot // bs, slot % bs, 0]
            b = rows.arrays[0][0, layer, at, begin : begin + w]
            begin += w
            if slot >= 0:
                (b if direction == "store" else a)[:] = a if direction == "store" else b
    t = [cache.tensors(sizes[k % 3])[k] for k in range(3 * nl)]
    ops.multi_layer_kv_transfer(
        rows.tensors(2)[0], [t[:3], t[3:]], slots_at(place, True), "cpu" if place is None else place, nb * bs,
        int(direction == "store"), 17, bs,
    )  # fmt: skip
    cache.check()
    rows.check()
    cache.close()
    rows.close()
