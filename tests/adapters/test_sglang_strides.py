"""The kernel operations on tensors with gaps: on the CPU, on the emulator and on a GPU, whole buffers compared."""

from __future__ import annotations

import numpy as np
import pytest

import kvraw
from kvraw.adapters import sglang
from tests.helpers.sglang_case import DST, OPS, SRC, TOKENS, Case, Op
from tests.helpers.torch_like import Tensor, TorchLike


@pytest.mark.parametrize("op", [op for op in OPS if not op.all_layers], ids=lambda op: op.name)
def test_layers_with_gaps_between_tokens(w: TorchLike, op: Op) -> None:
    """A layer's own strides are kept to, and its last token is the last that there is."""
    case = Case(w, op, w.kinds, gap=1)
    for layer, src in ((1, SRC), (1, SRC[::-1]), (2, SRC)):
        case.call(src, DST, layer)
        case.expect(src, DST, layer)
    bad = SRC[:2], [DST[0], TOKENS]
    if w.stream is not None:  # the next call tells
        case.call(*bad)
        case.expect(SRC[:1], DST[:1])
    with pytest.raises(kvraw.BoundsError, match=rf"dst_indices\[1\] is {TOKENS}, must be in \[0, {TOKENS}\)"):
        case.call(*bad)
    case.compare()


def test_strides_that_change(w: TorchLike) -> None:
    """Views of one address and size that differ in their stride alone; and those whose tokens are no rows."""
    a, b = (np.random.default_rng(k).integers(0, 256, (3 * TOKENS, 2, 24), dtype=np.uint8) for k in (0, 1))
    src, dst = w.put(w.kinds[0], a), w.put(w.kinds[1], b)
    ids = [w.put(w.kinds[0], np.array(x)) for x in (SRC, DST)]

    def every(n: int) -> Tensor:
        return Tensor(src.base, 0, (TOKENS, 2, 24), (48 * n, 24, 1), "uint8")

    for n in (1, 2, 3, 2):
        sglang.transfer_kv_per_layer_mla(every(n), dst, *ids, item_size=48)
        b[DST] = a[::n][SRC]
        np.testing.assert_array_equal(w.take(dst), b)
    inside = Tensor(src.base, 0, (TOKENS, 2, 16), (48, 24, 1), "uint8")
    over = Tensor(src.base, 0, (TOKENS, 2, 24), (0, 24, 1), "uint8")
    for view, size, message in [
        (inside, 32, r"src has shape \(24, 2, 16\), strides \(48, 24, 1\): gaps inside a row"),
        (every(2), 96, "src has shape .* a token must be a row of 96 bytes, as item_size says"),
        (over, 48, r"src has shape .* strides \(0, 24, 1\): a token must be a row of 48 bytes"),
    ]:
        with pytest.raises(kvraw.LayoutError, match=message):
            sglang.transfer_kv_per_layer_mla(view, dst, *ids, item_size=size)
    with pytest.raises(kvraw.LayoutError, match=r"k and v of src have strides of \[48, 96\] bytes, must have one"):
        sglang.transfer_kv_per_layer(every(2), dst, every(1), dst, *ids, item_size=48)
    np.testing.assert_array_equal(w.take(dst), b)


@pytest.mark.parametrize("paged", [False, True], ids=["page_first", "page_head"])
@pytest.mark.parametrize("to_layer", [True, False], ids=["to the layer", "from the layer"])
def test_padding_between_pages(w: TorchLike, paged: bool, to_layer: bool) -> None:
    """Padding that layout_dim does not count is left out and left alone; other gaps, and other rows, are refused."""
    layers, page, heads, row, pad = 3, 4 if paged else 1, 2, 48, 16
    size = page * layers * row
    rng = np.random.default_rng(5)
    a = rng.integers(0, 256, (TOKENS // page, size + pad), dtype=np.uint8)
    b = rng.integers(0, 256, (TOKENS, row), dtype=np.uint8)
    host, layer = w.put(w.kinds[1], a), w.put(w.kinds[0], b)
    held = Tensor(host.base, 0, (TOKENS // page, size), (size + pad, 1), "uint8")
    reads, writes = [5, 0, TOKENS - 1], [1, 7, 2]
    ids = [w.put(w.kinds[0], np.array(x)) for x in (reads, writes)]
    dim, more = layers * row, (page, heads) if paged else ()

    def call(tensor: Tensor) -> None:
        if to_layer and paged:
            sglang.transfer_kv_per_layer_ph_lf(tensor, layer, tensor, layer, *ids, 1, row, dim, *more)
        elif to_layer:
            sglang.transfer_kv_per_layer_mla_pf_lf(tensor, layer, *ids, 1, row, dim)
        elif paged:
            table = w.table(w.kinds[0], [layer] * layers)
            sglang.transfer_kv_all_layer_lf_ph(table, tensor, table, tensor, *ids, row, dim, layers, *more)
        else:
            sglang.transfer_kv_per_layer_mla_lf_pf(layer, tensor, *ids, 1, row, dim)

    call(held)
    # [page, head, token, layer, dim], of which page_first is one token and one head.
    view = a[:, :size].reshape(-1, heads if paged else 1, page, layers, row // (heads if paged else 1))
    for at, to in zip(reads, writes, strict=True):
        if to_layer:
            b[to] = view[at // page, :, at % page, 1].ravel()
        else:
            which = slice(None) if paged else slice(1, 2)
            view[to // page, :, to % page, which] = b[at].reshape(view.shape[1], 1, -1)
    a[:, :size] = view.reshape(-1, size)
    for tensor, array in ((host, a), (layer, b)):
        np.testing.assert_array_equal(w.take(tensor), array)
    short = Tensor(host.base, 0, (TOKENS // page, size - 16), (size + pad, 1), "uint8")
    with pytest.raises(kvraw.LayoutError, match=f"must be rows of {size} bytes, as its layout_dim says"):
        call(short)
    inside = Tensor(host.base, 0, (TOKENS // page, layers, page * row - 16), (size, page * row, 1), "uint8")
    with pytest.raises(kvraw.LayoutError, match="gaps inside a row"):
        call(inside)
    for tensor, array in ((host, a), (layer, b)):
        np.testing.assert_array_equal(w.take(tensor), array)
