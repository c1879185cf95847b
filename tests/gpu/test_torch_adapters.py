"""The adapters with torch's own tensors and streams."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="these tests are about torch's tensors, and torch is not installed")

import kvraw  # noqa: E402
from kvraw.adapters import sglang, tensors, vllm  # noqa: E402

pytestmark = pytest.mark.gpu
LAYERS, TOKENS, ROW = 4, 256, 192


@pytest.fixture(autouse=True)
def cuda(gpu: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is a GPU, but torch is built without CUDA")
    tensors.errors_of[gpu].clear()
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
