"""What a descriptor says of the tensors of a transfer by block ids, and objects that are none."""

from __future__ import annotations

from typing import Any

import pytest

import kvraw.adapters.lmcache as ops
from tests.adapters.test_lmcache_blocks import TOKENS, World, call, describe, shape_of
from tests.helpers.memory import Laid, Tensor

IDS = [6, 0, 3]


def run(w: World, tensors: Any, direction: Any = ops.D2H, **change: int) -> None:
    d = describe(w.number, w.shape)
    for name, value in change.items():
        setattr(d, name, value)
    ops.multi_layer_block_kv_transfer(tensors, w.objects.addresses, IDS, w.where, direction, d, TOKENS, w.number, 0)


@pytest.mark.parametrize("direction", [ops.D2H, ops.H2D])
@pytest.mark.parametrize(
    ("number", "planes", "change", "message"),
    [
        (1, 2, {"nl": 1}, "shape_desc.nl is 1, the tensors have 2"),
        (9, 2, {"nl": 4}, "shape_desc.nl is 4, the tensors have 2"),
        (1, 2, {"bs": 4}, "shape_desc.bs is 4, the tensors have 2"),
        (2, 2, {"bs": 1}, "shape_desc.bs is 1, the tensors have 2"),
        (1, 2, {"nh": 2}, r"shape_desc.nh \* hs \* element_size is 12, the tensors have 18"),
        (6, 2, {"hs": 2}, "element_size is 12, the tensors have 18"),
        (3, 1, {"hs": 2}, "element_size is 4, the tensors have 6"),
        (1, 2, {"element_size": 4}, "element_size is 36, the tensors have 18"),
        (13, 1, {"hs": 2}, "element_size is 12, the tensors have 18"),
        (10, 1, {"nh": 1}, "element_size is 6, the tensors have 18"),
        (1, 2, {"kv_size": 1}, "kv_size is 1, format 1 has 2 planes"),
    ],
)
def test_counts_that_contradict_the_tensors(
    place: int | None, number: int, planes: int, change: dict[str, int], message: str, direction: Any
) -> None:
    w = World(number, planes, place, 2)
    with pytest.raises(ValueError, match=message):
        run(w, w.paged.tensors(2), direction, **change)
    w.check()
    w.close()


@pytest.mark.parametrize(
    ("number", "planes", "change"),
    [
        (1, 2, {"nb": 0}),
        (1, 2, {"nb": 99}),
        (1, 2, {"nl": 0, "nh": 0, "hs": 0}),
        (1, 2, {"nh": 9, "hs": 1}),
        (1, 2, {"hs": 6, "element_size": 1}),
        (3, 1, {"nh": 8}),
        (10, 2, {"hs": 6}),
        (11, 1, {"hs": 6}),
        (12, 1, {"kv_size": 2, "hs": 1, "element_size": 3}),
    ],
)
def test_counts_that_callers_may_give(place: int | None, number: int, planes: int, change: dict[str, int]) -> None:
    w = World(number, planes, place, 2)
    w.expect("store", IDS)
    run(w, w.paged.tensors(2), **change)
    w.check()
    w.close()


@pytest.mark.parametrize(
    ("number", "planes", "shape"),
    [(1, 2, (2, 14, 3, 3)), (1, 2, (2, 7, 2, 9)), (2, 2, (7, 2, 2, 9)), (5, 1, (7, 2, 3)), (9, 2, (14, 9))],
)
def test_flat_tensors(place: int | None, number: int, planes: int, shape: tuple[int, ...]) -> None:
    w = World(number, planes, place, 2)
    for direction, way in (("store", ops.D2H), ("load", ops.H2D)):
        w.expect(direction, IDS)
        run(w, [Tensor(w.paged.memory, offset, shape, 2) for offset in w.paged.offsets], way)
        w.check()
    w.close()


@pytest.mark.parametrize("kind", ["pinned", "device"])
@pytest.mark.parametrize("bad", [0, -8, 2**64 - 8])
def test_an_object_that_is_none(place: int | None, bad: int, kind: str) -> None:
    w = World(1, 2, place, 2, kind)
    bytes_of_one = 2 * w.shape.nl * TOKENS * w.shape.nh * w.shape.d
    with pytest.raises(ValueError, match=rf"lmcache_objects_ptrs\[1\] is {bad}, must be the address of {bytes_of_one}"):
        call(w, IDS, ops.D2H, objects=[w.objects.addresses[0], bad])
    with pytest.raises(ValueError, match=rf"lmcache_objects_ptrs\[1\] is {bad}"):  # what is asked about comes again
        call(w, IDS, ops.D2H, objects=[w.objects.addresses[0], bad])
    w.check()
    w.close()


def test_an_object_of_several_parts_that_is_none(place: int | None) -> None:
    s = shape_of(17, 1)
    paged = Laid("host" if place is None else "device", [(s.nb, s.bs, 1, 6)] * 4, place, 1)
    d = describe(17, s)
    t = paged.tensors(2)
    with pytest.raises(ValueError, match=r"lmcache_objects_ptrs\[0\] is 0"):
        ops.multi_layer_block_kv_transfer(
            [t[:2], t[2:]], [0], [1], "cpu" if place is None else place, ops.H2D, d, TOKENS, 17, 0
        )
    paged.check()
    paged.close()


def test_gaps_in_a_page_of_values_and_scales() -> None:
    paged, objects = Laid("host", [(7, 2, 16)] * 2, None, 1), Laid("host", [(2, TOKENS, 12)], None, 2)
    d = describe(14, shape_of(14, 1), 1)
    d.nh, d.hs = 1, 12
    tensors = [Tensor(paged.memory, offset, (7, 2, 12), 1, (32, 16, 1)) for offset in paged.offsets]
    with pytest.raises(ValueError, match="tokens of a page lie 16 bytes apart, must be 12"):
        ops.multi_layer_block_kv_transfer(tensors, objects.tensors(), [1], "cpu", ops.D2H, d, TOKENS, 14, 0)
    objects.check()
