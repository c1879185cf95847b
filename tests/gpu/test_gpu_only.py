"""What no emulator shows: torch, fork, contexts, and offsets beyond 32 bits."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import kvraw
from kvraw.layouts.geometry import Geometry
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver

pytestmark = pytest.mark.gpu


def test_offsets_beyond_32_bits(gpu: int) -> None:
    geometry = Geometry(
        layers=1, blocks=40961, block_size=16, heads=8, head_size=128, element_size=2
    )  # 2.5 GiB a plane
    size = 2 * geometry.blocks * 16 * 2048
    with kvraw.DeviceBuffer(size, gpu) as memory, kvraw.HostPool(1 << 20, device=gpu) as pool, kvraw.Stream(gpu) as s:
        cache = kvraw.PagedCache.from_pointers([memory.address], 1, geometry, device=gpu)
        (chunk, back) = pool.chunks(2, cache.chunk_bytes(32))
        chunk.numpy()[:] = np.random.default_rng(0).integers(0, 256, chunk.nbytes, dtype=np.uint8)
        kvraw.load(cache, [chunk], [40960, 39000], stream=s)
        last, block = memory.address + size - 16 * 2048, 16 * 2048
        with DeviceScope(gpu):
            driver().memcpy_async(back.address, last, block, s.handle)
        s.synchronize()
        rows = chunk.numpy().reshape(2, 2, block)
        np.testing.assert_array_equal(back.numpy()[:block], rows[1, 0])
        kvraw.store(cache, [back], [40960, 39000], stream=s).wait()
        np.testing.assert_array_equal(back.numpy(), chunk.numpy())


def test_torch_tensors_and_streams(gpu: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no device")
    paged = [torch.randn(2, 40, 16, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    cache = kvraw.PagedCache.from_tensors(paged, axes="PBTHD")
    assert cache.device == 0
    chunks = [torch.empty(2, 3, 32, 256, dtype=torch.bfloat16, pin_memory=True) for _ in range(2)]
    side = torch.cuda.Stream()
    ids = torch.tensor([39, 0, 17, 5])
    with torch.cuda.stream(side):
        want = torch.stack([p[:, ids.cuda()] for p in paged], 1).reshape(2, 3, 64, 256)
        for where in (ids, ids.cuda(), ids.int().cuda(), ids.tolist()):
            for c in chunks:
                c.zero_()
            kvraw.store(cache, chunks, where, stream=side).wait()
            assert torch.equal(torch.cat(chunks, 2), want.cpu())
        for p in paged:
            p.fill_(float("nan"))
        kvraw.load(cache, chunks, ids, stream=torch.cuda.current_stream())
        got = torch.stack([p[:, ids.cuda()] for p in paged], 1).reshape(2, 3, 64, 256)
        assert torch.equal(got, want)
        assert torch.isnan(paged[0][:, 1]).all()
        on_device = [torch.zeros(2, 3, 32, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        kvraw.store(cache, on_device, ids, stream=side).wait()
        assert torch.equal(torch.cat(on_device, 2), want)


def test_a_forked_child_gets_a_clear_error(gpu: int) -> None:
    code = """
import os, sys, warnings
warnings.simplefilter("ignore")
import kvraw
from kvraw.runtime.driver import driver
stream = kvraw.Stream(0)
buffer = kvraw.DeviceBuffer(64, 0)
pool = kvraw.HostPool(1 << 16, device=0)
pid = os.fork()
if pid == 0:
    try:
        kvraw.Stream(0)
    except kvraw.ForkError as error:
        ok = "does not survive fork" in str(error)
    stream.close(); buffer.close(); pool.close()
    os._exit(0 if ok else 1)
_, status = os.waitpid(pid, 0)
stream.synchronize()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr


def test_a_host_pool_creates_no_context() -> None:
    code = """
import kvraw
from kvraw.runtime.driver import driver
pool = kvraw.HostPool(1 << 20)
assert driver().context_device() < 0
assert pool.info()["pinned"] is False
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    if "DriverNotFoundError" in done.stderr and os.environ.get("KVRAW_REQUIRE_GPU") != "1":
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["store", "load"])
def test_a_captured_graph_is_replayed_with_new_ids(gpu: int, verb: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no device")
    paged = [torch.randint(0, 99, (2, 40, 16, 4, 64), device="cuda", dtype=torch.int16) for _ in range(3)]
    cache = kvraw.PagedCache.from_tensors(paged, axes="PBTHD")
    with kvraw.HostPool(4 << 20, device=0) as pool:
        chunks = pool.chunks(2, cache.chunk_bytes(32))
        ids = torch.tensor([1, 2, 3, 4], device="cuda")
        call = getattr(kvraw, verb)
        call(cache, chunks, ids, stream=torch.cuda.current_stream()).wait()  # compiles the kernel before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            transfer = call(cache, chunks, ids, stream=torch.cuda.current_stream())
        for new in ([7, 0, 39, 12], [20, 21, 5, 3]):
            for c in chunks:
                c.numpy()[:] = np.random.default_rng(new[0]).integers(0, 255, c.nbytes, dtype=np.uint8)
            ids.copy_(torch.tensor(new))
            graph.replay()
            torch.cuda.synchronize()
            transfer.wait()
            rows = np.concatenate([c.numpy(np.int16).reshape(2, 3, 2, 16, 4, 64) for c in chunks], axis=2)
            got = torch.stack([p[:, new] for p in paged], 1).cpu().numpy()
            np.testing.assert_array_equal(rows, got)
        ids.copy_(torch.tensor([1, 40, 2, 3]))
        graph.replay()
        torch.cuda.synchronize()
        with pytest.raises(kvraw.BoundsError, match=r"block_ids\[1\] is 40"):
            transfer.wait()
        transfer.wait()
        del graph, transfer
