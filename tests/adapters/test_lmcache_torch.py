"""With torch: types that torch cannot index, new tensors, and on a GPU torch's streams and pinned memory."""

from __future__ import annotations

from typing import Any

import pytest

import kvraw.adapters.lmcache as ops

torch: Any = pytest.importorskip("torch", reason="torch is not installed")


def describe(like: Any) -> ops.PageBufferShapeDesc:
    d = ops.PageBufferShapeDesc()
    d.kv_size, (_, d.nb, d.bs, d.nh, d.hs) = 2, like.shape
    d.nl, d.element_size = 2, 0
    ops.set_shape_desc_dtype(d, like.dtype)
    return d


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        request.getfixturevalue("gpu")
        if not torch.cuda.is_available():
            pytest.skip("torch sees no device")
    return str(request.param)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32", "float64", "uint8"])
@pytest.mark.parametrize("heads", [(1, 33), (40, 8), (3, 16)])
def test_types_and_odd_heads(where: str, dtype: str, heads: tuple[int, int]) -> None:
    kind = getattr(torch, dtype)
    shape = (2, 9, 4, *heads)
    size = torch.empty((), dtype=kind).element_size()
    paged = [
        torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(kind).to(where) for _ in range(2)
    ]
    ids = torch.tensor([8, 1, 4, 0, 2, 7])
    objects = [torch.zeros(2, 2, 8, heads[0] * heads[1], dtype=kind) for _ in range(3)]
    for there in (ids, ids.to(where), ids.int(), ids.tolist()):
        for o in objects:
            o.view(torch.uint8).zero_()
        ops.multi_layer_block_kv_transfer(
            paged, objects, there, torch.device(where), ops.D2H, describe(paged[0]), 8, 1, 0
        )
        if where == "cuda":
            torch.cuda.synchronize()
        raw = torch.stack([p.view(torch.uint8).cpu()[:, ids] for p in paged], 1).reshape(2, 2, 24, -1)
        assert torch.equal(torch.cat([o.view(torch.uint8) for o in objects], 2), raw)
    back = [torch.zeros(shape[:-1] + (shape[-1] * size,), dtype=torch.uint8, device=where).view(kind) for _ in paged]
    table = torch.tensor([p.data_ptr() for p in back], dtype=torch.int64, device=where)
    ops.multi_layer_block_kv_transfer(
        table, objects, ids, where, ops.H2D, describe(paged[0]), 8, ops.NL_X_TWO_NB_BS_NH_HS, 1
    )
    for a, b in zip(paged, back, strict=True):
        assert torch.equal(a.view(torch.uint8)[:, ids[1:].to(where)], b.view(torch.uint8)[:, ids[1:].to(where)])
        assert not b.view(torch.uint8)[:, [3, 5, 6, 8]].any()


def test_new_chunks(where: str) -> None:
    caches = {str(k): torch.randn(2, 9, 4, 2, 8, device=where) for k in range(3)}
    chunks = ops.gather_paged_kv_to_cpu(caches, [8, 1, 4, 0], 2, {"kv_layout": "NHD"})
    if where == "cuda":
        assert all(c.is_pinned() for c in chunks)
        torch.cuda.synchronize()
    assert [tuple(c.shape) for c in chunks] == [(2, 3, 8, 16)] * 2
    want = torch.stack([t[:, [8, 1, 4, 0]].cpu() for t in caches.values()], 1).reshape(2, 3, 16, 16)
    assert torch.equal(torch.cat(chunks, 2), want)


def test_views_with_gaps() -> None:
    whole = torch.randn(2, 9, 4, 3, 20)
    view = whole[..., :16]
    rows = torch.zeros(2, 5, 48)
    slots = torch.tensor([35, -1, 0, 7, 8])
    ops.single_layer_kv_transfer(rows, view, slots, ops.D2H, 1)
    flat = view.reshape(2, 36, 48)
    kept = [0, 2, 3, 4]
    assert torch.equal(rows[:, kept], flat[:, slots[kept]])
    assert not rows[:, 1].any()
    key_value = torch.zeros(2, 4, 5, 64)[..., :48]  # rows with gaps behind them
    ops.load_and_reshape_flash(key_value, view[0], view[1], slots, 2)
    assert torch.equal(key_value[:, 2, kept], flat[:, slots[kept]])
    with pytest.raises(ValueError, match="must have 192, dense"):
        ops.single_layer_kv_transfer(rows.transpose(1, 2).contiguous().transpose(1, 2), view, slots, ops.D2H, 1)


@pytest.mark.gpu
def test_the_current_stream_is_used(gpu: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no device")
    paged = [torch.zeros(2, 512, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    obj = torch.zeros(2, 2, 256, 1024, dtype=torch.bfloat16, pin_memory=True)
    ids = torch.arange(16, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for p in paged:
            p.fill_(3)
        ops.multi_layer_block_kv_transfer(paged, [obj], ids, "cuda", ops.D2H, describe(paged[0]), 256, 1, 0)
        assert not side.query()
    side.synchronize()
    assert (obj == 3).all()


@pytest.mark.gpu
def test_a_table_that_changed_is_read_again(gpu: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no device")
    a, b = (torch.full((2, 4, 4, 1, 8), v, device="cuda") for v in (1.0, 2.0))
    table = torch.tensor([a.data_ptr()], device="cuda")
    d = describe(a)
    d.nl = 1
    out = torch.zeros(2, 1, 8, 8, pin_memory=True)
    for tensor, value in ((a, 1), (b, 2)):
        table.copy_(torch.tensor([tensor.data_ptr()]))
        ops.multi_layer_block_kv_transfer(table, [out.data_ptr()], [0, 1], "cuda", ops.D2H, d, 8, 1, 0)
        torch.cuda.synchronize()
        assert (out == value).all()
