"""The adapters with torch's own tensors and streams."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="these tests are about torch's tensors, and torch is not installed")

import kvraw  # noqa: E402
from kvraw.adapters import deferred_errors, sglang, vllm  # noqa: E402

pytestmark = pytest.mark.gpu
LAYERS, TOKENS, ROW = 4, 256, 192


@pytest.fixture(autouse=True)
def cuda(gpu: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is a GPU, but torch is built without CUDA")
    deferred_errors._found[gpu].clear()
    torch.cuda.set_device(gpu)


def pools(*kinds: str) -> list[torch.Tensor]:
    made = []
    for kind in kinds:
        t = torch.randint(0, 256, (LAYERS, TOKENS, ROW), dtype=torch.uint8)
        made.append(t.cuda() if kind == "cuda" else t.pin_memory() if kind == "pinned" else t)
    return made


def table(pool: torch.Tensor, device: str = "cuda") -> torch.Tensor:
    return torch.tensor([layer.data_ptr() for layer in pool], dtype=torch.uint64, device=device)


def indices(count: int, device: str = "cuda") -> list[torch.Tensor]:
    return [torch.randperm(TOKENS)[:count].to(device) for _ in range(2)]


@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("own_stream", [False, True])
def test_all_layers(own_stream: bool, where: str) -> None:
    src_k, src_v, dst_k, dst_v = pools("cuda", "cuda", "pinned", "pinned")
    src, dst = indices(100)
    want = [d.clone() for d in (dst_k, dst_v)]
    for w, s in zip(want, (src_k, src_v), strict=True):
        w[:, dst.cpu()] = s[:, src].cpu()
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    args = [table(t, where) for t in (src_k, dst_k, src_v, dst_v)]
    for _ in range(3):
        dst_k.zero_()
        with torch.cuda.stream(stream):
            sglang.transfer_kv_all_layer(*args, src, dst, item_size=ROW, num_layers=LAYERS)
        stream.synchronize()
        assert torch.equal(dst_k[:, dst.cpu()], want[0][:, dst.cpu()])
    assert torch.equal(dst_v, want[1])


def test_in_a_graph() -> None:
    src, dst = pools("cuda", "pinned")
    tables, ids = [table(src), table(dst)], indices(100)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sglang.transfer_kv_all_layer_mla(*tables, *ids, ROW, LAYERS)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        sglang.transfer_kv_all_layer_mla(*tables, *ids, ROW, LAYERS)
    for _ in range(2):
        src.copy_(torch.randint_like(src, 256))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(dst[:, ids[1].cpu()], src[:, ids[0]].cpu())


@pytest.mark.parametrize("kinds", [("cuda", "pinned"), ("cuda", "host"), ("host", "cuda"), ("pinned", "cuda")])
def test_direct(kinds: tuple[str, str]) -> None:
    src, dst = pools(*kinds)
    reads, writes = indices(64, "cpu")
    want = dst.cpu().clone()
    want[:, writes] = src.cpu()[:, reads]
    for stream in (torch.cuda.Stream(), torch.cuda.current_stream()):
        dst.zero_()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            sglang.transfer_kv_direct(list(src), list(dst), reads.cuda(), writes, 1)
        torch.cuda.synchronize()
        assert torch.equal(dst.cpu()[:, writes], want[:, writes])


def test_direct_pages_in_a_loop_of_layers() -> None:
    """As a hierarchical cache calls them: lists that live long, and single layers."""
    page, many = 16, 12
    flat = [torch.randint(0, 256, (TOKENS, ROW), dtype=torch.uint8, device="cuda") for _ in range(2 * many)]
    pool = [torch.zeros(TOKENS // page, many, page, ROW, dtype=torch.uint8).pin_memory() for _ in "kv"]
    for k in range(4):
        if k == 2:
            flat[3].data = torch.randint_like(flat[3], 256)
        starts = [torch.randperm(TOKENS // page)[:5] * page for _ in "ab"]
        reads, writes = ((s[:, None] + torch.arange(page)).flatten() for s in starts)
        sglang.transfer_kv_all_layer_direct_lf_pf(flat, pool, reads, writes, page)
        back = [torch.zeros_like(t) for t in flat]
        for layer in range(many):
            to = [back[layer], back[many + layer]]
            sglang.transfer_kv_per_layer_direct_pf_lf(pool, to, writes, reads, layer, page)
        torch.cuda.synchronize()
        at = reads.cuda()
        for was, now in zip(flat, back, strict=True):
            assert torch.equal(now[at], was[at])


@pytest.mark.parametrize("room", [16, 40, 256])
def test_staged_write_back(room: int) -> None:
    page = 16
    src_k, src_v = pools("cuda", "cuda")
    dst = [torch.zeros(TOKENS, LAYERS, ROW, dtype=torch.uint8).pin_memory() for _ in "kv"]
    staging = [torch.zeros(room, LAYERS, ROW, dtype=torch.uint8, device="cuda") for _ in "kv"]
    starts = [torch.randperm(TOKENS // page)[:7] * page for _ in "ab"]
    reads, writes = ((s[:, None] + torch.arange(page)).flatten() for s in starts)
    args = [table(src_k), table(src_v), reads.cuda(), writes, *staging, *dst]
    for stream in (torch.cuda.Stream(), torch.cuda.current_stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            sglang.transfer_hicache_all_layer_staged_lf_pf(*args, page_size=page)
        torch.cuda.synchronize()
        for was, now in zip((src_k, src_v), dst, strict=True):
            assert torch.equal(now[writes], was.cpu()[:, reads].transpose(0, 1))
            now.zero_()


def test_in_inference_mode() -> None:
    """Tensors made there do not tell when they are changed."""
    with torch.inference_mode():
        src, dst = pools("cuda", "pinned")
        ids, tables = indices(64), [table(src), table(dst)]
        for _ in range(3):
            dst.zero_()
            sglang.transfer_kv_all_layer_mla(*tables, *ids, ROW, LAYERS)
            sglang.transfer_kv_direct(list(src), list(dst), *(i.cpu() for i in ids), 1)
            torch.cuda.synchronize()
            assert torch.equal(dst[:, ids[1].cpu()], src.cpu()[:, ids[0].cpu()])


def test_a_bad_index_and_pageable_memory() -> None:
    src, dst, host = pools("cuda", "pinned", "host")
    bad = torch.tensor([3, TOKENS], device="cuda")
    good = torch.tensor([3, 4], device="cuda")
    sglang.transfer_kv_per_layer_mla(src[0], dst[0], bad, good, ROW)
    torch.cuda.synchronize()
    with pytest.raises(kvraw.BoundsError, match=rf"src_indices\[1\] is {TOKENS}, must be in \[0, {TOKENS}\)"):
        sglang.transfer_kv_per_layer_mla(src[0], dst[0], good, good, ROW)
    with pytest.raises(kvraw.PlacementError, match="pageable host memory"):
        sglang.transfer_kv_per_layer_mla(src[0], host[0], good, good, ROW)


@pytest.mark.parametrize("kinds", [("cuda", "pinned"), ("pinned", "cuda"), ("cuda", "host"), ("cuda", "cuda")])
def test_swaps(kinds: tuple[str, str]) -> None:
    src, dst = pools(*kinds)
    want, size = dst.cpu().clone(), TOKENS * ROW
    vllm.swap_blocks(src, dst, size, torch.tensor([[0, 3], [2, 1]]))
    want[[3, 1]] = src.cpu()[[0, 2]]
    given = [torch.tensor([t.data_ptr() + k * size for k in at]) for t, at in ((src, (1, 3)), (dst, (0, 2)))]
    vllm.swap_blocks_batch(*given, torch.full((2,), size))
    want[[0, 2]] = src.cpu()[[1, 3]]
    torch.cuda.synchronize()
    assert torch.equal(dst.cpu(), want)


@pytest.mark.parametrize("most", ["", "7"])
@pytest.mark.parametrize("sizes", ["one", "three", "many", "large"])
@pytest.mark.parametrize("kinds", [("cuda", "pinned"), ("pinned", "cuda")])
def test_swaps_of_many_blocks(kinds: tuple[str, str], sizes: str, most: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS", most)
    count, block = 50, 256 << 10 if sizes == "large" else 4096
    src, dst = (torch.randint(0, 256, (count, block), dtype=torch.uint8) for _ in "ab")
    src, dst = (t.cuda() if k == "cuda" else t.pin_memory() for t, k in zip((src, dst), kinds, strict=True))
    length = torch.full((count,), block)
    if sizes == "three":
        length = torch.arange(count) % 3 * 1024
    elif sizes == "many":
        length = torch.arange(count) * 16
    reads, writes = torch.randperm(count), torch.randperm(count)
    want = dst.cpu().clone()
    for x, y, n in zip(reads.tolist(), writes.tolist(), length.tolist(), strict=True):
        want[y, :n] = src[x, :n].cpu()
    given = src.data_ptr() + reads * block, dst.data_ptr() + writes * block, length
    for stream in (torch.cuda.Stream(), torch.cuda.current_stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            vllm.swap_blocks_batch(*given)
        torch.cuda.synchronize()
        assert torch.equal(dst.cpu(), want)
