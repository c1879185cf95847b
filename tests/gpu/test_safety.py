"""What only a real driver shows: ends of allocations, others' registrations, no compiler, a context that is reset."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvraw
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import locate
from tests.helpers.world import TOKENS, World

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
ROOT = Path(__file__).parents[2]
IDS = list(range(20))


def right(w: World, chunks: list[object]) -> None:
    for at, chunk in enumerate(chunks[:5]):
        want = w.paged[:, :, 4 * at : 4 * at + 4].swapaxes(0, 1)
        np.testing.assert_array_equal(np.asarray(chunk).view(np.uint8).ravel(), want.ravel())


def run(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_batch_over_the_end(gpu: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from kvraw.adapters import vllm

    torch.cuda.set_device(gpu)
    there, host = torch.zeros(8192, dtype=torch.uint8, device="cuda"), torch.zeros(8192, dtype=torch.uint8).pin_memory()
    end = locate(there.data_ptr(), 1).edges[-1]
    for kinds in (("src_ptrs", 0), ("dst_ptrs", 1)):
        pair = [torch.tensor([host.data_ptr()] * 2), torch.tensor([there.data_ptr(), end - 32])]
        sides = pair[::-1] if kinds[1] == 0 else pair
        with pytest.raises(kvraw.BoundsError, match=rf"{kinds[0]}\[1\] is {end - 32:#x}, with 64 bytes it goes over"):
            vllm.swap_blocks_batch(*sides, torch.tensor([64, 64]))
    torch.cuda.synchronize()
    assert int(there.sum()) == 0  # the context is alive


def test_tables_of_other_memory(gpu: int) -> None:
    w, host = World(gpu), np.zeros(1 << 20, np.uint8)
    good, count = w.cache.bases.tolist(), driver().device_count()
    end = locate(good[0], 1).edges[-1]
    for last, device in (
        (int(host.ctypes.data), gpu),
        (w.pool.address, gpu),
        (end - 64, gpu),
        (good[2], count),
        (good[2], 7 if count <= 7 else count),
        (good[2], -1),
    ):
        with pytest.raises((kvraw.PlacementError, kvraw.BoundsError)):
            kvraw.PagedCache.from_pointers([*good[:2], last], 1, w.geometry, device=device)
    kvraw.store(w.cache, w.chunks, IDS, stream=w.stream).wait()
    right(w, [c.numpy() for c in w.chunks])
    w.close()


def test_device_memory_of_neighbouring_allocations(gpu: int) -> None:
    """An allocation of its own ends at its end, whatever follows."""
    with kvraw.DeviceBuffer(4 << 20, gpu) as memory, DeviceScope(gpu):
        assert not driver().pointer_in_pieces(memory.address)
        assert locate(memory.address, (4 << 20) + 64).over == locate(memory.address, 1).edges[0]


def test_expandable_segments() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    run(
        """
import numpy as np, torch, kvraw
from kvraw.adapters import vllm
from kvraw.runtime.driver import driver
t = torch.randint(0, 256, (2, 1024, 65536), dtype=torch.uint8, device="cuda")  # 128 MiB, in pieces
host = torch.zeros(1024, 65536, dtype=torch.uint8).pin_memory()
torch.cuda.synchronize()
assert driver().pointer_in_pieces(t.data_ptr())
g = kvraw.Geometry(layers=1, blocks=1024, block_size=16, heads=8, head_size=256, element_size=2)
cache = kvraw.PagedCache.from_pointers([t.data_ptr()], 1, g, device=0)
ids = np.random.default_rng(0).permutation(1024)
for engine in ("kernel", "copy", "staged"):
    pool = kvraw.HostPool(2 * 65536 * 512, device=0)
    (chunk,) = pool.chunks(1, cache.chunk_bytes(16 * 512))
    with kvraw.Stream(0) as s:
        kvraw.store(cache, [chunk], ids[:512], stream=s, engine=engine).wait()
    want = t.cpu().numpy()[:, ids[:512]]
    assert (chunk.numpy() == want.ravel()).all(), engine
sizes = torch.full((1024,), 65536)
at = torch.arange(1024) * 65536
vllm.swap_blocks_batch(at + t.data_ptr(), at + host.data_ptr(), sizes)
big = torch.tensor([t.data_ptr()]), torch.tensor([host.data_ptr()]), torch.tensor([1024 * 65536])  # over many pieces
torch.cuda.synchronize(); assert torch.equal(host, t[0].cpu()); host.zero_()
vllm.swap_blocks_batch(*big)
torch.cuda.synchronize(); assert torch.equal(host, t[0].cpu())
""",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )


def pinned_by_others(kind: str, nbytes: int, gpu: int) -> tuple[np.ndarray, object]:
    """Host memory that is not kvraw's, and what keeps it."""
    if kind == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        t = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return t.numpy(), t
    array = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    step = nbytes if kind == "registered" else nbytes // 4 // 4096 * 4096
    base, starts = int(array.ctypes.data), list(range(0, nbytes, step))
    with DeviceScope(gpu):
        for at in starts:
            driver().host_register(base + at, min(step, nbytes - at))

    class Keep:
        def __del__(self, array: np.ndarray = array) -> None:
            with DeviceScope(gpu):
                for at in starts:
                    driver().host_unregister(base + at)

    return array, Keep()


@pytest.mark.parametrize("kind", ["torch", "registered", "registered in pieces"])
def test_memory_that_others_pinned(gpu: int, kind: str) -> None:
    w, size = World(gpu), 5 * 3 * 2 * TOKENS * 64
    each = size // 5
    array, keep = pinned_by_others(kind, 1 << 16, gpu)
    base = int(array.ctypes.data)
    ours = kvraw.HostPool.from_pointer(base, 1 << 16, device=gpu)
    late = kvraw.HostPool.from_pointer(base, 1 << 16, pin=False)
    with kvraw.HostBuffer.from_pointer(base, 1 << 16, device=gpu) as buffer:
        assert buffer.pinned
    for engine in ("kernel", "copy", "staged", "auto"):
        for chunks in (
            [array[k * each : (k + 1) * each] for k in range(5)],
            [base + k * each for k in range(5)],
            (pooled := ours.chunks(5, each)),
            (pooled_late := late.chunks(5, each)),
        ):
            array[:] = 0
            kvraw.store(w.cache, chunks, IDS, stream=w.stream, engine=engine, chunk_tokens=TOKENS).wait()
            right(w, [array[c - base : c - base + each] if isinstance(c, int) else np.asarray(c) for c in chunks])
        ours.free(pooled)
        late.free(pooled_late)
    array[:] = 0
    for _ in range(2):
        kvraw.memcpy_batch([base + 16], [w.memory.address], [w.paged.nbytes // 3], stream=w.stream).wait()
        np.testing.assert_array_equal(array[16 : 16 + w.paged.nbytes // 3], w.paged.ravel()[: w.paged.nbytes // 3])
    ours.close()
    late.close()
    assert locate(base, 1 << 16).device_address  # theirs to unpin
    del keep
    w.close()


def test_messages_of_refused_batches(gpu: int) -> None:
    w, array = World(gpu), np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)
    base = int(array.ctypes.data)
    with DeviceScope(gpu):
        driver().host_register(base, 1 << 15)
    end = w.memory.address + w.memory.nbytes
    to, src = [base, base, base + 64], [w.memory.address, w.memory.address, end - 32]
    with pytest.raises(kvraw.DriverError, match=r"bytes at 0x.*device memory of device") as caught:
        kvraw.memcpy_batch(to, src, [64, 0, 64], stream=w.stream)
    assert caught.value.index == 2
    with DeviceScope(gpu):
        driver().host_unregister(base)
    w.close()


NO_PTX = """
import logging, numpy as np, kvraw
from tests.helpers.world import World
logging.basicConfig(level=logging.WARNING)
w = World(0)
t = kvraw.store(w.cache, w.chunks, list(range(20)), stream=w.stream); t.wait()
assert t.engine == "copy", t.explain()
for at in range(5):
    assert (w.chunk(at).ravel() == w.paged[:, :, 4 * at : 4 * at + 4].swapaxes(0, 1).ravel()).all()
kvraw.load(w.cache, w.chunks, list(range(20)), stream=w.stream).wait()
assert (w.now() == w.paged).all()
for engine in ("kernel", "staged"):
    try: kvraw.store(w.cache, w.chunks, [1], stream=w.stream, engine=engine); raise SystemExit("no error")
    except kvraw.UnsupportedDriverError as e: assert "CUDA_DISABLE_PTX_JIT" in str(e), e
"""


def test_where_nothing_is_compiled() -> None:
    run(NO_PTX, CUDA_DISABLE_PTX_JIT="1", CUDA_CACHE_DISABLE="1")
    out = subprocess.run(
        [sys.executable, "-m", "kvraw", "doctor"],
        cwd=ROOT,
        env=os.environ | {"CUDA_DISABLE_PTX_JIT": "1"},
        capture_output=True,
        text=True,
    )
    assert out.returncode
    assert "compiles no kernels" in out.stdout
    assert "libcuda" in out.stdout


RESET = """
import numpy as np, kvraw
from cuda.bindings import driver as cu
from tests.helpers.world import World
ids = list(range(20))
def check(w):
    for engine in ("kernel", "copy", "staged"):
        kvraw.store(w.cache, w.chunks, ids, stream=w.stream, engine=engine).wait()
        for at in range(5):
            assert (w.chunk(at).ravel() == w.paged[:, :, 4 * at : 4 * at + 4].swapaxes(0, 1).ravel()).all(), engine
w = World(0); check(w)
for _ in range(2):
    device = cu.cuDeviceGet(0)[1]
    assert not cu.cuDevicePrimaryCtxReset(device)[0]
    v = World(0); check(v)
    for cache, stream in ((w.cache, w.stream), (w.cache, v.stream)):
        try: kvraw.store(cache, w.chunks, ids, stream=stream); raise SystemExit("no error")
        except kvraw.ClosedError as e: print(e)
    kvraw.store(v.cache, w.chunks, ids, stream=v.stream).wait()
    w.pool.close(5.0)
    w = v
w.close()
"""


def test_a_context_that_is_reset() -> None:
    assert "was reset since it was made" in run(RESET)


STICKY = """
import numpy as np, kvraw
from kvraw.runtime.driver import driver
from kvraw.runtime.context import DeviceScope
w = kvraw.Stream(0)
from kvraw.copying.plan import CopyPlan, Side
from kvraw.prepared import PreparedCopy, Reached
bad = np.array([1 << 12], np.uint64)
side = Side(outer=0)
copy = PreparedCopy(CopyPlan(side, side, 1, 1, 1, 1, 64), device=0, engine="kernel")
reached = Reached(bad, bad, False)
copy(reached, reached, 1, stream=w)
try: w.synchronize(); raise SystemExit("no fault")
except kvraw.DriverError as e: print(e)
g = kvraw.Geometry(layers=1, blocks=8, block_size=4, heads=1, head_size=16, element_size=2)
paged, chunk = np.arange(2 * 8 * 4 * 32, dtype=np.uint8), np.zeros(2 * 4 * 32, np.uint8)
cache = kvraw.PagedCache.from_pointers([paged.ctypes.data], 1, g)
kvraw.store(cache, [chunk], [3])
assert (chunk.reshape(2, -1) == paged.reshape(2, 8, -1)[:, 3]).all()
with kvraw.HostPool(1 << 16) as pool: kvraw.store(cache, pool.chunks(1, len(chunk)), [3])
kvraw.memcpy_batch([chunk.ctypes.data], [paged.ctypes.data], [64])
print("the host goes on")
"""


def test_a_dead_gpu_leaves_the_host_alone() -> None:
    assert "the host goes on" in run(STICKY)
