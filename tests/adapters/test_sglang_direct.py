"""The direct operations and the later ones: on the CPU, the emulator and a GPU, whole buffers compared."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import kvraw
from kvraw.adapters import sglang, sglang_direct, tensors
from tests.helpers import kv_oracle as oracle
from tests.helpers.sglang_case import LAYERS, PAGE, TOKENS, bytes_of, ids, same, tokens_of
from tests.helpers.torch_like import TorchLike

WAYS = ["device to pinned", "pinned to device", "device to pageable", "pageable to device", "on the device", "host"]


def kinds_of(w: TorchLike, way: str) -> tuple[str, str]:
    if w.stream is None or way == "host":
        return "host", "host"
    if way == "on the device":
        return "device", "device"
    src, _, dst = way.partition(" to ")
    names = {"pageable": "host"}
    return names.get(src, src), names.get(dst, dst)


@pytest.mark.parametrize("where", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("whole", [False, True])
def test_tokens(w: TorchLike, way: str, where: tuple[bool, bool], whole: bool) -> None:
    """Runs that ascend on both sides, on one, and on none, or whole pages; K and V of different item sizes."""
    src_kind, dst_kind = kinds_of(w, way)
    shapes = [(TOKENS, 2, 5)] * LAYERS + [(TOKENS, 3, 8)] * LAYERS
    a = [bytes_of(*s, seed=k) for k, s in enumerate(shapes)]
    b = [bytes_of(*s, seed=k + 50) for k, s in enumerate(shapes)]
    src, dst = [w.put(src_kind, x) for x in a], [w.put(dst_kind, x) for x in b]
    reads, writes = tokens_of([2, 3, 0, 5]), tokens_of([1, 2, 4, 0])
    if not whole:
        reads[9], reads[10] = reads[10], reads[9]
    sglang.transfer_kv_direct(src, dst, ids(w, reads, where[0]), ids(w, writes, where[1]), PAGE)
    for x, y in zip(a, b, strict=True):
        y[writes] = x[reads]
    same(w, list(zip(src + dst, a + b, strict=True)))


def test_tokens_of_views_with_gaps(w: TorchLike) -> None:
    kinds = w.kinds
    a, b = bytes_of(TOKENS, LAYERS, 8), bytes_of(LAYERS, TOKENS, 8, seed=1)
    src, dst = w.put(kinds[1], a), w.put(kinds[0], b)
    views = [src.select(1, k) for k in range(LAYERS)], [dst[k] for k in range(LAYERS)]
    sglang.transfer_kv_direct(*views, ids(w, [3, 4, 5, 1], False), ids(w, [0, 1, 2, 9], False), 1)
    b[:, [0, 1, 2, 9]] = a[[3, 4, 5, 1]].transpose(1, 0, 2)
    same(w, [(src, a), (dst, b)])
    flat, narrow = dst.select(2, 0), w.put(kinds[0], bytes_of(TOKENS, 2))
    with pytest.raises(kvraw.LayoutError, match=r"src_layers\[0\] has .*: gaps inside a row"):
        sglang.transfer_kv_direct([flat], [narrow], ids(w, [0], False), ids(w, [1], False), 1)


@pytest.mark.parametrize("axis", [1, 2, 3])
@pytest.mark.parametrize("gaps", ["src", "dst", "both"])
def test_tokens_with_gaps_inside(w: TorchLike, gaps: str, axis: int) -> None:
    """Between pairs of heads, heads and elements, on one side and on both; the layer beside them has none."""
    wide, dense = [TOKENS, 3, 2, 6], bytes_of(TOKENS, 3, 2, 6, seed=1)
    wide.insert(axis + 1, 2)
    arrays, parts, views = [], [], []
    for k, name in enumerate(("src", "dst")):
        a = bytes_of(*wide, seed=k) if gaps in (name, "both") else dense.copy()
        t = w.put(w.kinds[k], a)
        arrays.append((t, a))
        parts.append(np.moveaxis(a, axis + 1, 0)[1] if a.ndim == 5 else a)
        views.append(t.select(axis + 1, 1) if a.ndim == 5 else t)
    more = [bytes_of(TOKENS, 40, seed=k + 9) for k in (0, 1)]
    beside = [w.put(kind, a) for kind, a in zip(w.kinds, more, strict=True)]
    reads, writes = [3, 4, 5, 1], [0, 1, 2, 9]
    for _ in range(2):
        sglang.transfer_kv_direct(
            [views[0], beside[0]], [views[1], beside[1]], ids(w, reads, False), ids(w, writes, True), 1
        )
    parts[1][writes], more[1][writes] = parts[0][reads], more[0][reads]
    same(w, [*arrays, *zip(beside, more, strict=True)])


@pytest.mark.parametrize("page", [1, 3, 4, 24])
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", ["load", "store"])
def test_pages(w: TorchLike, verb: str, way: str, planes: int, page: int) -> None:
    sizes = [(2, 6), (2, 6)] if page != 3 else [(2, 6), (3, 5)]  # K and V alike, and not
    pages = TOKENS // page
    flat = [bytes_of(LAYERS, TOKENS, h, d, seed=1) for h, d in sizes[:planes]]
    paged = [bytes_of(*oracle.shape("pfd", LAYERS, TOKENS, page, h, d), seed=2) for h, d in sizes[:planes]]
    src_kind, dst_kind = kinds_of(w, way)
    order = np.random.default_rng(3).permutation(pages)
    reads, writes = order[: min(3, pages)], order[::-1][: min(3, pages)]
    index = [[int(p) * page + k for p in x for k in range(page)] for x in (reads, writes)]
    made = [ids(w, index[0], False), ids(w, index[1], True)]
    if verb == "store":
        layers = [w.put(src_kind, x) for x in flat]
        buffers = [w.put(dst_kind, x) for x in paged]
        sglang.transfer_kv_all_layer_direct_lf_pf(
            [t[k] for t in layers for k in range(LAYERS)], buffers, made[0], made[1], page
        )
        for x, y in zip(flat, paged, strict=True):
            oracle.move(x, "lf", y, "pfd", *index, list(range(LAYERS)), page)
    else:
        buffers = [w.put(src_kind, x) for x in paged]
        layers = [w.put(dst_kind, x) for x in flat]
        for layer in (2, 0):
            sglang.transfer_kv_per_layer_direct_pf_lf(
                buffers, [t[layer] for t in layers], made[0], made[1], layer, page
            )
            for x, y in zip(paged, flat, strict=True):
                oracle.move(x, "pfd", y, "lf", *index, [layer], page)
    same(w, list(zip(layers + buffers, flat + paged, strict=True)))


def test_a_first_token_anywhere_on_the_layer_side(w: TorchLike) -> None:
    flat, paged = bytes_of(LAYERS, TOKENS, 8), bytes_of(6, LAYERS, PAGE, 8, seed=1)
    layers, buffer = w.put(w.kinds[0], flat), w.put(w.kinds[1], paged)
    args = ids(w, [3, 4, 5, 6], False), ids(w, tokens_of([2]), False)
    sglang.transfer_kv_all_layer_direct_lf_pf([layers[k] for k in range(LAYERS)], [buffer], *args, PAGE)
    paged[2] = flat[:, 3:7]
    same(w, [(layers, flat), (buffer, paged)])


def test_nothing_to_copy(w: TorchLike) -> None:
    paged = w.put(w.kinds[1], bytes_of(6, LAYERS, PAGE, 8))
    flat = [w.put(w.kinds[0], bytes_of(TOKENS, 8))] * LAYERS
    none = ids(w, [], False)
    sglang.transfer_kv_direct(flat, flat, none, none, 1)
    sglang.transfer_kv_direct([], [], ids(w, [1], False), ids(w, [1], False), 1)
    sglang.transfer_kv_all_layer_direct_lf_pf(flat, [paged], none, none, PAGE)
    sglang.transfer_kv_per_layer_direct_pf_lf([paged], flat[:1], none, none, 0, PAGE)


def test_checks(w: TorchLike) -> None:
    a, b = (w.put(kind, np.zeros((TOKENS, 8), np.uint8)) for kind in w.kinds)
    page = w.put(w.kinds[1], np.zeros((6, LAYERS, PAGE, 8), np.uint8))
    one, two = ids(w, [0], False), ids(w, [0, 1], False)
    whole = ids(w, [0, 1, 2, 3], False)
    int32 = w.put("host", np.zeros(1, np.int32))

    def direct(*args: object) -> None:
        sglang.transfer_kv_direct(*args)  # type: ignore[arg-type]

    def load(*args: object) -> None:
        sglang.transfer_kv_per_layer_direct_pf_lf(*args)  # type: ignore[arg-type]

    same_number = "Source and destination layers must have the same number of layers"
    for call, args, error, message in [
        (direct, ([a], [b, b], one, one, 1), RuntimeError, same_number),
        (direct, ([a], [b], one, two, 1), RuntimeError, "Source and destination indices must have the same length"),
        (direct, ([a], [b], one, one, 0), RuntimeError, "Page size must be positive"),
        (direct, ([a], [b], one, one, 2), RuntimeError, "Source indices size must be divisible by page size"),
        (direct, ([a], [b], int32, int32, 1), RuntimeError, "Source indices must be of type long"),
        (direct, ([a], [b], ids(w, [TOKENS], False), one, 1), kvraw.BoundsError, r"src_indices\[0\] is 24, must be in"),
        (direct, ([a], [b], one, ids(w, [-1], False), 1), kvraw.BoundsError, r"dst_indices\[0\] is -1"),
        (direct, ([a], [page], one, one, 1), kvraw.LayoutError, r"a token of src_layers\[0\] has 8 bytes"),
        (load, ([page], [a], one, two, 0, 1), RuntimeError, "must have the same length"),
        (load, ([page], [a], whole, whole, 0, -4), RuntimeError, "Page size must be positive"),
        (load, ([page], [a], whole, whole, 0, 3), RuntimeError, "must be divisible by page size"),
        (
            load,
            ([page], [a], ids(w, [1, 2, 3, 4], False), whole, 0, PAGE),
            kvraw.BoundsError,
            "start at a multiple of 4",
        ),
        (load, ([page], [a], whole, ids(w, [0, 1, 3, 2], False), 0, PAGE), kvraw.BoundsError, "must ascend by 1"),
        (load, ([page], [a], whole, whole, 3, PAGE), kvraw.BoundsError, "must hold layers 3 to 4"),
        (load, ([page], [a], whole, whole, 0, 2), kvraw.BoundsError, "page_size, 2, tokens"),
        (load, ([page] * 3, [a], whole, whole, 0, PAGE), kvraw.LayoutError, "src_ptrs has 3 buffers"),
        (
            load,
            ([page], [a], ids(w, tokens_of([6]), False), whole, 0, PAGE),
            kvraw.BoundsError,
            r"is 24, with the 4 tokens of a page, must be in \[0, 24\)",
        ),
        (load, ([page], [a], whole, ids(w, tokens_of([6]), False), 0, PAGE), kvraw.BoundsError, r"in \[0, 21\)"),
    ]:
        with pytest.raises(error, match=message):
            call(*args)  # type: ignore[operator]
    for tensor in (a, b, page):
        assert not w.take(tensor).any()


def test_lists_of_all_layers_that_change(w: TorchLike) -> None:
    """They are known by identity: a tensor given other memory in place, another in its stead, and one that is gone."""
    count, kinds = 10, w.kinds
    a = [bytes_of(TOKENS, 8, seed=k) for k in range(count)]
    b = [bytes_of(TOKENS, 8, seed=k + 50) for k in range(count)]
    src, dst = [w.put(kinds[0], x) for x in a], [w.put(kinds[1], x) for x in b]
    reads, writes = ids(w, [3, 4, 9], False), ids(w, [0, 1, 2], False)
    sglang_direct._by_identity.clear()
    for change in ("", "", "in place", "another", "gone"):
        if change == "in place":
            a[4] = bytes_of(TOKENS, 8, seed=100)
            src[4].base = w.put(kinds[0], a[4]).base
        elif change == "another":
            a[5] = bytes_of(TOKENS, 8, seed=101)
            src[5] = w.put(kinds[0], a[5])
        elif change == "gone":
            del src[7], dst[7], a[7], b[7]
        sglang.transfer_kv_direct(src, dst, reads, writes, 1)
        for x, y in zip(a, b, strict=True):
            y[:3] = x[[3, 4, 9]]
        same(w, list(zip(src + dst, a + b, strict=True)))
    if w.stream is not None:
        tensors.device_state(0).completions.drain()
    assert len(sglang_direct._by_identity) == 1  # those with tensors that are gone are forgotten
    del src, dst
    gc.collect()
    assert not sglang_direct._by_identity


def test_the_default_stream(fake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch call refuses it: a stream of kvraw's own takes the copies, in its order."""
    w = TorchLike(0)
    monkeypatch.setattr(tensors, "_raw_stream", lambda device: 0)
    a, b = bytes_of(TOKENS, 64), bytes_of(TOKENS, 64, seed=1)
    src, dst, back = w.put("device", a), w.put("pinned", b), w.put("device", b)
    reads, writes = ids(w, [5, 3, 9, 1], False), ids(w, [0, 2, 4, 6], False)
    sglang.transfer_kv_direct([src], [dst], reads, writes, 1)
    sglang.transfer_kv_direct([dst], [back], writes, reads, 1)
    tensors.device_state(0).completions.drain()
    assert fake.calls["memcpy_batch_async"] == 2  # type: ignore[attr-defined]
    after = b.copy()
    after[[0, 2, 4, 6]] = a[[5, 3, 9, 1]]
    np.testing.assert_array_equal(w.take(dst), after)
    b[[5, 3, 9, 1]] = a[[5, 3, 9, 1]]
    np.testing.assert_array_equal(w.take(back), b)


@pytest.mark.parametrize("way", WAYS)
def test_embedding_ranges(w: TorchLike, way: str) -> None:
    kinds = kinds_of(w, way)
    a, b = bytes_of(TOKENS, 2, 9), bytes_of(TOKENS, 2, 9, seed=1)
    src, dst = w.put(kinds[0], a), w.put(kinds[1], b)
    with pytest.raises(kvraw.BoundsError, match=r"dst_starts\[1\] is 22 with 3 rows, must end by 24"):
        sglang.transfer_embedding_ranges_direct(src, dst, [0, 1], [0, 22], [1, 3])
    with pytest.raises(kvraw.BoundsError, match=rf"src_starts\[0\] is 5 with {2**63 - 1} rows, must end by 24"):
        sglang.transfer_embedding_ranges_direct(src, dst, [5], [0], [2**63 - 1])  # their sum is no int64
    for bad in ([1.5], np.array([1.5])):
        with pytest.raises(TypeError, match="lengths holds float64, must hold integers"):
            sglang.transfer_embedding_ranges_direct(src, dst, [0], [0], bad)  # type: ignore[arg-type]
    sglang.transfer_embedding_ranges_direct(src, dst, [3, 0, 9], [10, 21, 0], [5, 3, 0])
    b[10:15], b[21:24] = a[3:8], a[0:3]
    same(w, [(src, a), (dst, b)])


def test_moves_inside_host_buffers() -> None:
    w = TorchLike(None)
    arrays = [bytes_of(TOKENS, n, seed=n) for n in (16, 16, 5)]
    buffers = [w.put("host", a) for a in arrays]
    pointers = w.put("host", np.array([t.data_ptr() for t in buffers], np.uint64))
    strides = w.put("host", np.array([16, 16, 5]))
    at, half = w.put("host", np.array([0])), w.put("host", np.array([0.5]))
    for args, message in [
        ((pointers, strides, half, at), "tgt_loc holds float64, must hold integers"),
        ((w.put("host", np.zeros(3)), strides, at, at), "data_ptrs holds float64, must hold uint64"),
    ]:
        with pytest.raises(TypeError, match=message):
            sglang.copy_all_layer_kv_cache_cpu(*args)
    target, source = [1, 2, 3, 9], [0, 1, 2, 3]  # read places are written: all are read first
    sglang.copy_all_layer_kv_cache_cpu(
        pointers, strides, w.put("host", np.array(target)), w.put("host", np.array(source))
    )
    for a in arrays:
        a[target] = a[source]
    same(w, list(zip(buffers, arrays, strict=True)))


def test_indices_that_are_changed_in_place(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found of the indices of the layer before holds for the same values alone."""
    w = TorchLike(device).install(monkeypatch)
    rng = np.random.default_rng(0)
    pages, layer = rng.integers(0, 256, (6, 2, 4, 24), dtype=np.uint8), np.zeros((24, 24), np.uint8)
    src, dst = w.put("pinned", pages), w.put("device", layer)
    at, to = w.put("host", np.arange(8)), w.put("host", np.arange(8, 16))
    seen = at.base.host().view(np.int64)
    for first in (0, 0, 12, 4):
        seen[:8] = np.arange(first, first + 8)
        sglang.transfer_kv_per_layer_direct_pf_lf([src], [dst], at, to, 1, 4)
        layer[8:16] = pages[first // 4 : first // 4 + 2, 1].reshape(8, 24)
        np.testing.assert_array_equal(w.take(dst), layer)
    seen[5] = 0
    with pytest.raises(kvraw.BoundsError, match=r"src_indices\[4:8\] is .*, a page; must start at a multiple of 4"):
        sglang.transfer_kv_per_layer_direct_pf_lf([src], [dst], at, to, 1, 4)
    np.testing.assert_array_equal(w.take(dst), layer)
