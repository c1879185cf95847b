"""A format that nobody hands in: one row makes it known to discovery, to the engines and to LMCache's operations."""

from __future__ import annotations

from typing import Any

import pytest

import kvraw
import kvraw.adapters.lmcache as ops
from kvraw.adapters.lmcache import _types
from kvraw.layouts.formats import FORMATS, Format
from kvraw.memo import Memo
from tests.adapters.test_lmcache_blocks import TOKENS, World, call
from tests.adapters.test_lmcache_slots import SLOTS, slots_at
from tests.helpers.memory import Laid, numbers
from tests.helpers.oracle import PAGED, PagedOracle, Shape, move, per_layer

NUMBER = 77
# Of each token, K of all heads, then V of all heads.
ROW = Format(NUMBER, "NL_X_NB_BS_TWO_NH_HS", "L", "BTPHD", "L/BTPHD vllm", direct=True)
IDS = [6, 0, 3, 1, 5, 2]


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, NUMBER, ROW)
    monkeypatch.setattr(_types, "_ways", Memo(8))
    oracle = PagedOracle(per_layer, lambda s: (s.nb, s.bs, 2, s.nh, s.d), lambda a, s, l, k, b, t, h: a[l][b, t, k, h])
    monkeypatch.setitem(PAGED, (NUMBER, 2), oracle)


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize(
    "hints", [{"format": NUMBER}, {"format": ROW.name}, {"block_size": 4, "num_heads": 3}], ids=str
)
def test_a_cache_of_it(place: int | None, hints: dict[str, Any], direction: str) -> None:
    s, ids = Shape(nl=2, nb=7, bs=4, nh=3, d=6, planes=2), [6, 0, 3, 1]
    paged = Laid("host" if place is None else "device", [PAGED[NUMBER, 2].shape(s)] * s.nl, place, 1)
    chunks = Laid("host" if place is None else "pinned", [(2, s.nl, 8, s.nh * s.d)] * 2, place, 2)
    move(NUMBER, s, paged.arrays, chunks.arrays, "2LTD", 8, direction, "block", ids, 0)
    cache = kvraw.PagedCache.from_tensors(paged.tensors(2), **hints)
    assert cache.layout.format == ROW
    move_blocks = kvraw.store if direction == "store" else kvraw.load
    stream = None if place is None else kvraw.Stream(place)
    move_blocks(cache, chunks.addresses, ids, chunk_tokens=8, stream=stream).wait()
    paged.check()
    chunks.check()
    if stream is not None:
        stream.close()
    paged.close()
    chunks.close()


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("by", ["addresses", "tensors"])
def test_blocks_of_it(place: int | None, by: str, direction: str) -> None:
    w = World(NUMBER, 2, place, 3)
    w.expect(direction, IDS, 1)
    table = w.paged.addresses if by == "addresses" else w.paged.tensors(2)
    call(w, IDS, int(direction == "store"), table=table, skip=1)
    w.check()
    w.close()


@pytest.mark.parametrize("by", ["addresses", "tensors"])
def test_slots_of_it(place: int | None, by: str) -> None:
    w = World(NUMBER, 2, place, 0)
    s, kind = w.shape, "host" if place is None else "device"
    rows = Laid("host" if place is None else "pinned", [(2, s.nl, len(SLOTS), s.nh * s.d)], place, 2)
    move(NUMBER, s, w.paged.arrays, rows.arrays, "2LTD", len(SLOTS), "store", "slot", SLOTS, 0)
    table = numbers(w.paged.addresses, kind, place) if by == "addresses" else w.paged.tensors(2)
    ops.multi_layer_kv_transfer(
        rows.tensors(2)[0], table, slots_at(place, True), "cpu" if place is None else place, s.nb * s.bs, ops.D2H,
        NUMBER, s.bs, s.d // 2,
    )  # fmt: skip
    w.paged.check()
    rows.check()
    w.close()
    rows.close()


def test_what_lmcache_asks_of_it() -> None:
    made = _types.formats_of(FORMATS)
    assert getattr(made, ROW.name) == made(NUMBER) == NUMBER
    assert (ops.is_layer_list(NUMBER), ops.is_cross_layer(NUMBER), ops.is_mla(NUMBER)) == (True, False, False)
    assert ops.direct_copy_format_supported(NUMBER)
    caches = {str(k): t for k, t in enumerate(World(NUMBER, 2, None, 0).paged.tensors(2))}
    out = Laid("host", [(2, 2, TOKENS, 18 // 2 * 2)], None, 2)
    ops.gather_paged_kv_to_cpu(caches, [6, 0], TOKENS // 2, None, NUMBER, out.tensors(2))
    w = World(NUMBER, 2, None, 0)
    move(NUMBER, w.shape, w.paged.arrays, out.arrays, "2LTD", TOKENS, "store", "block", [6, 0], 0)
    out.check()
