"""Host memory on a real GPU: contexts, torch's views, the link."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

import kvraw

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def test_no_context_on_any_gpu(gpu: int) -> None:
    code = """
import kvraw
from kvraw.runtime.driver import driver
from kvraw.runtime.host.mapping import HostOptions
d = driver()
for kind in ("anonymous", "shared", "huge-2MiB"):
    for pin in (None, False):
        pool = kvraw.HostPool(1 << 24, pin=pin, options=HostOptions(kind=kind, populate=True, grow=True))
        pool.wait_ready()
        assert not pool.pinned
kvraw.HostPool(1 << 24, pin=False, device=0, options=HostOptions(node="device"))
for options in ({"pin": True}, {"options": HostOptions(kind="pinned")}):
    try:
        kvraw.HostPool(1 << 24, **options)
    except kvraw.PlacementError:
        pass
    else:
        raise AssertionError(options)
assert d.context_device() < 0
assert not any(d.primary_active(k) for k in range(d.device_count()))
with kvraw.HostPool(1 << 24, device=0) as pool:  # asked for
    assert pool.pinned and d.primary_active(0)
assert [d.primary_active(k) for k in range(1, d.device_count())] == [False] * (d.device_count() - 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.returncode == 0, done.stderr


def test_torch_sees_chunks_as_pinned_and_keeps_their_memory(gpu: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no device")
    torch.ones(1, device="cuda")  # before that, torch calls nothing pinned
    pool = kvraw.HostPool(8 * MIB, device=gpu)
    a, b = pool.chunks(2, MIB)
    a.numpy()[:] = 7
    tensors = [torch.from_dlpack(a), torch.frombuffer(a.numpy(), dtype=torch.uint8), torch.from_numpy(b.numpy())]
    assert tensors[0].is_pinned()
    assert tensors[0].data_ptr() == a.address
    on_gpu = tensors[0].to("cuda", non_blocking=True)
    tensors[2].copy_(on_gpu, non_blocking=True)
    torch.cuda.synchronize()
    pool.close()
    del pool, a, b
    gc.collect()
    assert all(bool((t == 7).all()) for t in tensors)
    assert not tensors[0].is_pinned()


def test_a_pool_pins_where_torch_made_the_context(gpu: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no device")
    torch.ones(1, device=f"cuda:{gpu}")
    with kvraw.HostPool(MIB, pin=True) as pool:
        assert pool.pinned
    tensor = torch.empty(4 * MIB, dtype=torch.uint8, pin_memory=True)
    with kvraw.HostBuffer.from_pointer(tensor.data_ptr(), 4 * MIB, device=gpu, owner=tensor) as theirs:
        assert theirs.pinned


def test_a_fork_with_a_pinned_pool(gpu: int) -> None:
    code = """
import os, sys, warnings
warnings.simplefilter("ignore")
import kvraw
from kvraw.runtime.driver import driver
from kvraw.runtime.context import DeviceScope
pool = kvraw.HostPool(1 << 26, device=0)
(chunk,) = pool.chunks(1, 1 << 20)
memory, stream = kvraw.DeviceBuffer(1 << 20, 0), kvraw.Stream(0)
chunk.numpy()[:] = 1
pid = os.fork()
if pid == 0:
    try:
        chunk.numpy()
    except kvraw.ForkError:
        pool.close()
        os._exit(0)
    os._exit(1)
_, status = os.waitpid(pid, 0)
with DeviceScope(0):
    driver().memset_async(memory.address, 9, 1 << 20, stream.handle)
    driver().memcpy_async(chunk.address, memory.address, 1 << 20, stream.handle)
stream.synchronize()
assert (chunk.numpy() == 9).all()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_interpreter_ends_with_work_under_way(gpu: int) -> None:
    code = """
import kvraw
from kvraw.runtime.driver import driver
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.host.mapping import HostOptions
pool = kvraw.HostPool(8 << 30, device=0, options=HostOptions(grow=True, step_bytes=256 << 20))
shared = kvraw.HostPool(1 << 26, device=0, options=HostOptions(kind="shared"))
(chunk,) = shared.chunks(1, 1 << 26)
memory, stream = kvraw.DeviceBuffer(1 << 26, 0), kvraw.Stream(0)
with DeviceScope(0):
    for _ in range(50):
        driver().memcpy_async(chunk.address, memory.address, 1 << 26, stream.handle)
print(shared.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert not os.path.exists(f"/dev/shm/{done.stdout.strip()}")
