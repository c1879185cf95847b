"""The operations with the destination first, and the staged write-back: whole buffers compared."""

from __future__ import annotations

import numpy as np
import pytest

import kvraw
from kvraw.adapters import sglang
from tests.helpers.sglang_case import LAYERS, PAGE, TOKENS, bytes_of, ids, same, tokens_of
from tests.helpers.torch_like import TorchLike


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("verb", ["load", "store"])
def test_hicache_one_layer(w: TorchLike, verb: str, planes: int, dtype: str) -> None:
    """Between rows of one layer and the same layer's rows inside a token-major pool."""
    flat = [bytes_of(TOKENS, 32, seed=k) for k in range(planes)]
    pool = [bytes_of(TOKENS, LAYERS, 32, seed=k + 2) for k in range(planes)]
    mine, theirs = [w.put(w.kinds[0], x) for x in flat], [w.put(w.kinds[1], x) for x in pool]
    views = [t.select(1, 1) for t in theirs]
    reads, writes = [4, 9, 0, 23], [1, 2, 23, 5]
    at = [w.put(w.kinds[0], np.array(x, dtype)) for x in (writes, reads)]
    dst, src = (mine, views) if verb == "load" else (views, mine)
    name = "transfer_hicache_one_layer" + ("_mla" if planes == 1 else "")
    getattr(sglang, name)(*dst, at[0], *src, at[1], element_dim=32, unroll=4, block_quota=2)
    for x, y in zip(flat, pool, strict=True):
        if verb == "load":
            x[writes] = y[reads, 1]
        else:
            y[writes, 1] = x[reads]
    same(w, list(zip(mine + theirs, flat + pool, strict=True)))


def test_hicache_one_layer_checks(w: TorchLike) -> None:
    flat, pool = w.put(w.kinds[0], bytes_of(TOKENS, 32)), w.put(w.kinds[1], bytes_of(TOKENS, LAYERS, 32))
    view, wide = pool.select(1, 1), w.put(w.kinds[1], np.zeros((TOKENS, 32), np.int16))
    at = ids(w, [0], True)
    for dst, src, dim, message in [
        (flat, view, 20, "cache_src has rows of 32 elements, must have 20"),
        (flat, pool.select(2, 1), 32, "gaps inside a row"),
        (flat, flat, 36, r"cache_src has shape \(24, 32\), must hold whole rows of 36 elements"),
        (flat, wide, 32, "cache_src has elements of 2 bytes, must have 1 as the destination"),
    ]:
        with pytest.raises(kvraw.LayoutError, match=message):
            sglang.transfer_hicache_one_layer_mla(dst, at, src, at, element_dim=dim)
    with pytest.raises(kvraw.LayoutError, match="k and v of cache_src have strides of 96 and 32 elements"):
        sglang.transfer_hicache_one_layer(flat, flat, at, view, flat, at)


@pytest.mark.parametrize("planes", [1, 2])
def test_hicache_all_layer(w: TorchLike, planes: int) -> None:
    flat = [bytes_of(LAYERS, TOKENS, 32, seed=k) for k in range(planes)]
    pool = [bytes_of(TOKENS, LAYERS, 32, seed=k + 2) for k in range(planes)]
    mine, theirs = [w.put(w.kinds[0], x) for x in flat], [w.put(w.kinds[1], x) for x in pool]
    src = [w.table(w.kinds[0], [t[k] for k in range(LAYERS)]) for t in mine]
    dst = [w.table(w.kinds[0], [t.select(1, k) for k in range(LAYERS)]) for t in theirs]
    reads, writes = [4, 9, 0, 23], [1, 2, 23, 5]
    at = [w.put(w.kinds[0], np.array(x, np.int32)) for x in (writes, reads)]
    kv = "kv_" if planes == 2 else ""
    strides = {f"{kv}cache_src_stride_bytes": 32, f"{kv}cache_dst_stride_bytes": 32 * LAYERS}
    call = getattr(sglang, "transfer_hicache_all_layer" + ("_mla" if planes == 1 else ""))
    with pytest.raises(kvraw.LayoutError, match="element_size is needed where strides differ"):
        call(*dst, at[0], *src, at[1], **strides)
    call(*dst, at[0], *src, at[1], **strides, element_size=32)
    for x, y in zip(flat, pool, strict=True):
        y[writes] = x[:, reads].transpose(1, 0, 2)
    same(w, list(zip(mine + theirs, flat + pool, strict=True)))


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("room", [PAGE, PAGE + 1, 2 * PAGE, TOKENS])
@pytest.mark.parametrize("planes", [1, 2])
def test_staged_write_back(w: TorchLike, planes: int, room: int, dtype: str) -> None:
    """Staging memory for one page, for less than all, and for more; pages that follow each other and not."""
    flat = [bytes_of(LAYERS, TOKENS, 16, seed=k) for k in range(planes)]
    pool = [bytes_of(TOKENS, LAYERS, 16, seed=k + 2) for k in range(planes)]
    mine, theirs = [w.put(w.kinds[0], x) for x in flat], [w.put(w.kinds[1], x) for x in pool]
    staging = [w.put(w.kinds[0], bytes_of(room, LAYERS, 16)) for _ in range(planes)]
    src = [w.table(w.kinds[0], [t[k] for k in range(LAYERS)]) for t in mine]
    reads, writes = tokens_of([4, 0, 5, 1, 2]), tokens_of([1, 2, 5, 0, 3])
    at, to = w.put(w.kinds[0], np.array(reads, dtype)), w.put("host", np.array(writes))
    call = getattr(sglang, f"transfer_hicache_all_layer{'_mla' if planes == 1 else ''}_staged_lf_pf")
    call(*src, at, to, *staging, *theirs, page_size=PAGE)
    none = w.put(w.kinds[0], np.zeros(0, dtype)), w.put("host", np.zeros(0, np.int64))
    call(*src, *none, *staging, *theirs, page_size=PAGE)
    for x, y in zip(flat, pool, strict=True):
        y[writes] = x[:, reads].transpose(1, 0, 2)
    same(w, list(zip(mine + theirs, flat + pool, strict=True)))


def test_staged_write_back_checks(w: TorchLike) -> None:
    flat, pool = bytes_of(LAYERS, TOKENS, 16), bytes_of(TOKENS, LAYERS, 16)
    mine, theirs = w.put(w.kinds[0], flat), w.put(w.kinds[1], pool)
    staging = w.put(w.kinds[0], bytes_of(PAGE, LAYERS, 16))
    table = w.table(w.kinds[0], [mine[k] for k in range(LAYERS)])
    page, other, outside = (ids(w, tokens_of([k]), False) for k in (0, 1, 6))
    at, small = ids(w, tokens_of([2]), True), w.put(w.kinds[0], bytes_of(2, LAYERS, 16))
    for to, through, size, error, message in [
        (ids(w, [0, 1, 2], False), staging, PAGE, RuntimeError, "must have the same length"),
        (page, staging, 3, RuntimeError, "whole pages"),
        (ids(w, [1, 2, 3, 4], False), staging, PAGE, kvraw.BoundsError, "start at a multiple of 4"),
        (outside, staging, PAGE, kvraw.BoundsError, r"dst_indices\[0\] is 24, .* must be in \[0, 21\)"),
        (page, w.put(w.kinds[0], bytes_of(PAGE, LAYERS, 20)), PAGE, RuntimeError, "divisible by 8"),
        (page, w.put(w.kinds[0], bytes_of(PAGE, LAYERS, 64)), PAGE, kvraw.LayoutError, "must be tokens of 192 bytes"),
    ]:
        with pytest.raises(error, match=message):
            sglang.transfer_hicache_all_layer_mla_staged_lf_pf(table, at, to, through, theirs, page_size=size)
    if w.stream is not None:
        with pytest.raises(kvraw.PlacementError, match="staging holds 0 tokens in whole pages"):
            sglang.transfer_hicache_all_layer_mla_staged_lf_pf(table, at, other, small, theirs, page_size=PAGE)
        with pytest.raises(RuntimeError, match="must be a CPU tensor"):
            sglang.transfer_hicache_all_layer_mla_staged_lf_pf(table, at, at, staging, theirs, page_size=PAGE)
    same(w, [(mine, flat), (theirs, pool)])
