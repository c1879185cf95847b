"""The adapters with torch's own tensors where nothing lies on a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="these tests are about torch's tensors, and torch is not installed")

import kvraw  # noqa: E402
from kvraw.adapters import sglang, vllm  # noqa: E402

LAYERS, TOKENS, HEADS, DIM, PAGE = 3, 48, 4, 8, 8
ROW = HEADS * DIM * 2


def pool(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def table(layers: torch.Tensor) -> torch.Tensor:
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)


def test_kernel_operations() -> None:
    k, v = (pool(LAYERS, TOKENS, HEADS, DIM) for _ in "kv")
    pk, pv = (pool(TOKENS, LAYERS, HEADS, DIM) for _ in "kv")
    hk, hv = (pool(TOKENS // PAGE, HEADS, PAGE, LAYERS, DIM) for _ in "kv")
    src, dst = torch.randperm(TOKENS)[:20], torch.randperm(TOKENS)[:20]
    sglang.transfer_kv_all_layer_lf_pf(table(k), pk, table(v), pv, src, dst, ROW, ROW * LAYERS, LAYERS)
    for flat, paged in ((k, pk), (v, pv)):
        assert torch.equal(paged[dst], flat[:, src].transpose(0, 1))
    sglang.transfer_kv_all_layer_lf_ph(table(k), hk, table(v), hv, src, dst, ROW, ROW * LAYERS, LAYERS, PAGE, HEADS)
    for flat, paged in ((k, hk), (v, hv)):
        assert torch.equal(paged[dst // PAGE, :, dst % PAGE], flat[:, src].permute(1, 2, 0, 3))
    k.zero_()
    v.zero_()
    sglang.transfer_kv_per_layer_pf_lf(pk, k[1], pv, v[1], dst, src, 1, ROW, ROW * LAYERS)
    assert torch.equal(k[1, src], pk[dst, 1])
    assert torch.equal(v[1, src], pv[dst, 1])
    assert not k[0].any()
    with pytest.raises(kvraw.BoundsError, match=r"src_indices\[0\] is 48, must be in \[0, 48\)"):
        sglang.transfer_kv_per_layer(k[0], k[1], v[0], v[1], torch.tensor([TOKENS]), dst[:1], ROW)
    with pytest.raises(RuntimeError, match="Source indices must be of type long"):
        sglang.transfer_kv_per_layer_mla(k[0], k[1], src.int(), dst.int(), ROW)


def test_views_with_gaps_end_where_their_memory_ends() -> None:
    src, dst = pool(TOKENS, LAYERS, HEADS * DIM), pool(TOKENS, HEADS * DIM)
    reads, writes = torch.tensor([0, TOKENS - 1]), torch.tensor([3, 5], dtype=torch.int32)
    sglang.transfer_hicache_one_layer_mla(dst, writes, src[:, 2], reads)
    assert torch.equal(dst[[3, 5]], src[[0, TOKENS - 1], 2])
    with pytest.raises(kvraw.BoundsError, match=r"src_indices\[0\] is 48"):
        sglang.transfer_hicache_one_layer_mla(dst, writes[:1], src[:, 2], reads[:1] + TOKENS)
    sglang.transfer_kv_per_layer(src[:, 1], dst, src[:, 0], other := pool(TOKENS, ROW // 2), reads, writes.long(), ROW)
    assert torch.equal(dst[[3, 5]], src[[0, TOKENS - 1], 1])
    assert torch.equal(other[[3, 5]], src[[0, TOKENS - 1], 0])
    with pytest.raises(kvraw.LayoutError, match="gaps inside a row"):
        sglang.transfer_kv_per_layer_mla(src[..., :8], dst, reads, writes.long(), 16 * LAYERS)


def test_tokens_with_gaps_inside() -> None:
    src, dst = pool(TOKENS, HEADS, 2 * DIM), pool(HEADS, TOKENS, DIM)
    reads, writes, before = torch.tensor([0, 1, 2, 9]), torch.tensor([7, 8, 3, TOKENS - 1]), dst.clone()
    sglang.transfer_kv_direct([src[..., DIM:]], [dst.transpose(0, 1)], reads, writes, 1)
    before[:, writes] = src[reads][..., DIM:].transpose(0, 1)
    assert torch.equal(dst, before)


def test_the_layer_with_gaps_is_named() -> None:
    pages, good, bad = pool(TOKENS, 2, 1, DIM), pool(TOKENS, DIM), pool(TOKENS, 2 * DIM)[:, ::2]
    ids = torch.tensor([0])
    with pytest.raises(kvraw.LayoutError, match=r"src_ptrs\[3\] has shape .*: gaps inside a row"):
        sglang.transfer_kv_all_layer_direct_lf_pf([good, good, good, bad], [pages, pages], ids, ids, 1)


def test_direct_operations() -> None:
    k = pool(LAYERS, TOKENS, HEADS, DIM)
    paged = pool(TOKENS // PAGE, LAYERS, PAGE, HEADS, DIM)
    tokens, pages = torch.arange(PAGE) + 11, torch.arange(PAGE) + 2 * PAGE
    sglang.transfer_kv_all_layer_direct_lf_pf(list(k), [paged], tokens, pages, PAGE)
    assert torch.equal(paged[2], k[:, tokens])
    assert torch.equal(tokens, torch.arange(PAGE) + 11)  # one page: a view of the caller's indices is all there is
    assert torch.equal(pages, torch.arange(PAGE) + 2 * PAGE)
    sglang.transfer_kv_per_layer_direct_pf_lf([paged], [k[0]], pages, tokens + 20, 1, PAGE)
    assert torch.equal(k[0, tokens + 20], paged[2, 1])
    other = torch.zeros_like(k)
    sglang.transfer_kv_direct(list(k), list(other), tokens, tokens, 1)
    assert torch.equal(other[:, tokens], k[:, tokens])
    with pytest.raises(kvraw.LayoutError, match="types differ"):
        sglang.transfer_kv_direct([k[0]], [k[0].half()], tokens, tokens, 1)
    rows = pool(TOKENS, 6)
    sglang.transfer_embedding_ranges_direct(rows, rows, [0, 5], [20, 40], [5, 3])
    assert torch.equal(rows[20:25], rows[:5])
    assert torch.equal(rows[40:43], rows[5:8])


def test_swaps() -> None:
    src, dst = pool(TOKENS, 64), pool(TOKENS, 64)
    vllm.swap_blocks(src, dst, 128, torch.tensor([[3, 1], [0, 47]]))
    assert torch.equal(dst[[1, 47]], src[[3, 0]])
    at = [torch.tensor([t.data_ptr() + 128 * k for k in rows]) for t, rows in ((src, (9, 8)), (dst, (4, 40)))]
    vllm.swap_blocks_batch(*at, torch.tensor([128, 128]))
    assert torch.equal(dst[[4, 40]], src[[9, 8]])
