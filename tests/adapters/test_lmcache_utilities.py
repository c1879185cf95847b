"""Gather and scatter of whole engines' tensors, and the layout that is read from them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import kvraw.adapters.lmcache as ops
from tests.helpers.memory import Laid, Tensor
from tests.helpers.oracle import PAGED, Shape, move

S = {
    2: Shape(nl=2, nb=9, bs=4, nh=2, d=8, planes=2),
    1: Shape(nl=2, nb=9, bs=4, nh=1, d=8, planes=1),
}
FUSED = Shape(nl=2, nb=9, bs=4, nh=2, d=8, planes=1)
ONE_HEAD = Shape(nl=2, nb=9, bs=4, nh=1, d=8, planes=2)
ONE_TOKEN = Shape(nl=2, nb=9, bs=1, nh=2, d=8, planes=2)
PER = 2
# number, shape, hints, format that is asked for
CASES: list[tuple[int, Shape, dict[str, Any], int | None]] = [
    (1, S[2], {"kv_layout": "NHD"}, None),
    (2, S[2], {"kv_layout": "NHD"}, None),
    (6, S[2], {"kv_layout": "HND"}, None),
    (7, S[2], {"kv_layout": "HND"}, None),
    (1, ONE_HEAD, {"kv_layout": "NHD"}, None),
    (7, ONE_HEAD, {"kv_layout": "HND"}, None),
    (2, ONE_TOKEN, {"kv_layout": "NHD"}, None),
    (6, ONE_TOKEN, {"kv_layout": "HND"}, None),
    (6, ONE_TOKEN, {}, 6),
    (3, S[1], {}, None),
    (10, FUSED, {"kv_layout": "HND"}, None),
    (11, FUSED, {"kv_layout": "NHD"}, None),
    (12, FUSED, {"kv_layout": "BLHNC"}, None),
    (13, FUSED, {"kv_layout": "BLNHC"}, None),
    (12, FUSED, {"kv_layout": "LBHNC"}, None),
    (13, FUSED, {"kv_layout": "LBNHC"}, None),
    (0, S[2], {}, None),
    (0, S[2], {"kv_layout": "NHD"}, None),
    (8, S[2], {"kv_layout": "HND"}, None),
    (0, S[2], {}, 0),
    (8, S[2], {}, 8),
    (4, S[2], {"tokens_per_block": 4}, 4),
    (5, S[1], {"tokens_per_block": 4}, 5),
    (9, S[2], {}, 9),
    (18, FUSED, {}, 18),
]


class World:
    def __init__(self, number: int, s: Shape, place: int | None, chunks: int, kind: str = "pinned") -> None:
        self.number, self.s = number, s
        paged = PAGED[(number, s.planes)]
        self.cache = Laid("host" if place is None else "device", [paged.shape(s)] * paged.tensors(s), place, 1)
        shape = (s.nl, PER * s.bs, s.nh * s.d)
        self.chunks = Laid("host" if place is None else kind, [(s.planes, *shape)] * chunks, place, 2)

    @property
    def caches(self) -> dict[str, Tensor]:
        return {f"layer.{k}": t for k, t in enumerate(self.cache.tensors(2))}

    def expect(self, direction: str, ids: list[int], skip: int = 0, chunks: list[int] | None = None) -> None:
        arrays = self.chunks.arrays if chunks is None else [self.chunks.arrays[k] for k in chunks]
        move(self.number, self.s, self.cache.arrays, arrays, "2LTD", PER * self.s.bs, direction, "block", ids, skip)

    def check(self) -> None:
        self.cache.check()
        self.chunks.check()

    def close(self) -> None:
        self.cache.close()
        self.chunks.close()


@pytest.mark.parametrize(("number", "s", "hints", "asked"), CASES)
@pytest.mark.parametrize("kind", ["pinned", "host"])
def test_gather_and_scatter(
    place: int | None, number: int, s: Shape, hints: dict[str, Any], asked: int | None, kind: str
) -> None:
    if place is None and kind == "pinned":
        pytest.skip("the host has one kind of memory")
    ids = [8, 0, 3, 1, 5, 2, 7]  # the last chunk is not whole: it is left out
    w = World(number, s, place, 3, kind)
    w.expect("store", ids[:6])
    out = w.chunks.tensors(2)
    assert ops.gather_paged_kv_to_cpu(w.caches, ids, PER, hints, asked, out) is out
    w.check()
    w.close()
    w = World(number, s, place, 3, kind)
    w.expect("load", ids[:6], 3)
    ops.scatter_cpu_to_paged_kv(w.caches, ids, w.chunks.tensors(2), PER, 3 * s.bs, hints, asked)
    w.check()
    w.close()


def test_some_chunks(place: int | None) -> None:
    w = World(1, S[2], place, 4)
    ids = [8, 0, 3, 1, 5, 2, 7, 4]
    out = w.chunks.tensors(2)
    w.expect("store", [3, 1, 7, 4], chunks=[0, 1])
    got = ops.gather_paged_kv_to_cpu(w.caches, ids, PER, {"kv_layout": "NHD"}, None, out, [1, 3])
    assert got == out[:2]
    w.check()
    for bad in ([4], [-1]):
        with pytest.raises(ValueError, match=r"must be in \[0, 4\)"):
            ops.gather_paged_kv_to_cpu(w.caches, ids, PER, {"kv_layout": "NHD"}, None, out, bad)
    with pytest.raises(ValueError, match=r"out length \(1\) must be at least"):
        ops.gather_paged_kv_to_cpu(w.caches, ids, PER, {"kv_layout": "NHD"}, None, out[:1])
    assert ops.gather_paged_kv_to_cpu(w.caches, [], PER, {"kv_layout": "NHD"}, None, []) == []
    w.check()
    w.close()


def test_a_skip_over_more_than_four_chunks(place: int | None) -> None:
    w = World(1, S[2], place, 6)
    s = S[2]
    ids = [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]
    w.expect("load", ids, 10)
    ops.scatter_cpu_to_paged_kv(w.caches, [*ids, 77], w.chunks.tensors(2), PER, 10 * s.bs, {"kv_layout": "NHD"})
    w.check()
    w.close()


def test_a_skip_of_part_of_a_block_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    w = World(1, S[2], None, 1)
    w.expect("load", [2, 3], 1)
    ops.scatter_cpu_to_paged_kv(w.caches, [2, 3], w.chunks.tensors(2), PER, 6, {"kv_layout": "NHD"})
    w.check()
    assert "not block-aligned" in caplog.text
    ops.scatter_cpu_to_paged_kv(w.caches, [], [], PER)
    with pytest.raises(ValueError, match=r"block_ids length \(1\) must be at least"):
        ops.scatter_cpu_to_paged_kv(w.caches, [2], w.chunks.tensors(2), PER)


def test_padded_pool(place: int | None) -> None:
    s = S[1]
    stride = s.bs * s.d + 6
    cache = Laid("host" if place is None else "device", [(s.nb, stride)] * s.nl, place, 1)
    chunks = Laid("host" if place is None else "pinned", [(s.nl, PER * s.bs, s.d)], place, 2)
    for (at, block), layer in itertools.product(enumerate([7, 2]), range(s.nl)):
        rows = cache.arrays[layer][block, : s.bs * s.d].reshape(s.bs, s.d)
        chunks.arrays[0][layer, at * s.bs : (at + 1) * s.bs] = rows
    caches = {
        str(o): Tensor(cache.memory, o, (s.nb, s.bs, s.d // 2), 2, (stride // 2, s.d // 2, 1)) for o in cache.offsets
    }
    ops.gather_paged_kv_to_cpu(caches, [7, 2], PER, None, None, chunks.tensors(2))
    chunks.check()
    ops.scatter_cpu_to_paged_kv(caches, [7, 2], chunks.tensors(2), PER)
    cache.check()
    cache.close()
    chunks.close()


@pytest.mark.parametrize("kv_layout", ["BLHNC", "BLNHC"])
def test_layers_of_a_pool_of_all_layers(place: int | None, kv_layout: str) -> None:
    """[block, layer, ...] in one piece of memory: each layer's blocks lie apart."""
    s, heads_first = FUSED, kv_layout == "BLHNC"
    inner = (s.nh, s.bs, s.d) if heads_first else (s.bs, s.nh, s.d)
    pool = Laid("host" if place is None else "device", [(s.nb, s.nl, *inner)], place, 1)
    chunks = Laid("host" if place is None else "pinned", [(s.nl, PER * s.bs, s.nh * s.d)], place, 2)
    shape, step = (s.nb, *inner[:2], s.d // 2), s.nh * s.bs * s.d // 2
    strides = (s.nl * step, inner[1] * s.d // 2, s.d // 2, 1)
    caches = {str(k): Tensor(pool.memory, pool.offsets[0] + 2 * step * k, shape, 2, strides) for k in range(s.nl)}
    hints = {"kv_layout": kv_layout}
    assert ops.compute_kv_layout(caches, hints)[:3] == (s.bs, s.nl, s.nh * s.d // 2)
    assert ops.compute_kv_layout(caches, hints)[4] == (12 if heads_first else 13)
    for (at, block), layer in itertools.product(enumerate([7, 2]), range(s.nl)):
        rows = pool.arrays[0][block, layer]
        rows = rows.transpose(1, 0, 2) if heads_first else rows
        chunks.arrays[0][layer, at * s.bs : (at + 1) * s.bs] = rows.reshape(s.bs, -1)
    ops.gather_paged_kv_to_cpu(caches, [7, 2], PER, hints, None, chunks.tensors(2))
    chunks.check()
    for (at, block), layer in itertools.product(enumerate([3, 0]), range(s.nl)):
        rows = chunks.arrays[0][layer, at * s.bs : (at + 1) * s.bs].reshape(s.bs, s.nh, s.d)
        pool.arrays[0][block, layer] = rows.transpose(1, 0, 2) if heads_first else rows
    ops.scatter_cpu_to_paged_kv(caches, [3, 0], chunks.tensors(2), PER, 0, hints)
    pool.check()
    pool.close()
    chunks.close()


@pytest.mark.parametrize(("number", "s", "hints", "asked"), [c for c in CASES if c[3] is None])
def test_layout(place: int | None, number: int, s: Shape, hints: dict[str, Any], asked: int | None) -> None:
    w = World(number, s, place, 1)
    got = ops.compute_kv_layout(w.caches, hints)
    assert got == (s.bs, s.nl, s.nh * s.d // 2, "bfloat16", number)
    assert got[4] is ops.EngineKVFormat(number)
    with pytest.raises(ValueError, match="kv_caches is empty"):
        ops.compute_kv_layout({})
    w.close()


def test_pairs_and_layers_of_the_same_tensors() -> None:
    w = World(9, Shape(nl=1, nb=9, bs=4, nh=2, d=8, planes=2), None, 1)
    a, b = w.cache.tensors(2)
    pairs, layers, hints = {"l0": (a, b)}, {"l0": a, "l1": b}, {"kv_layout": "NHD"}
    found = [ops.compute_kv_layout(caches, hints)[1] for caches in (pairs, layers, pairs)]
    assert found == [1, 2, 1]
    w.close()
