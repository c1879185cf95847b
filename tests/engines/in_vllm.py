"""vLLM's CPU offloading worker stores blocks, and loads them into a wiped cache; run in an environment with vLLM.

Without a GPU its streams and events are stood in for by ones that are always done, and its asserts that a cache lies on
a GPU are off (``python -O``): everything else is vLLM's, and what copies is what its plugin manager brought.
"""

from __future__ import annotations

import contextlib
import random
import sys
from types import SimpleNamespace
from typing import Any

import empty
import torch

empty.install(
    "vllm._C_stable_libtorch vllm._moe_C_stable_libtorch vllm._C openai_harmony xgrammar llguidance cloudpickle uvloop "
    "cpuinfo openai cachetools triton compressed_tensors gguf",
    instead="vllm.reasoning vllm.entrypoints vllm.renderers vllm.multimodal vllm.lora vllm.tool_parsers",
)
from vllm.plugins import load_general_plugins

if "late" not in sys.argv:
    load_general_plugins()

from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu import gpu_worker, swap_blocks_triton
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.simple_kv_offload import copy_backend

load_general_plugins()  # as a worker's process does, whose modules are there by then


class Done:
    """A stream and an event of a device that is always done."""

    def __init__(self, **options: object) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Done) -> float:
        return 1.0

    def nothing(self, *args: object) -> None: ...

    record = wait_stream = wait_event = synchronize = wait = nothing


def no() -> bool:
    return False


if not torch.cuda.is_available():
    torch.Event = Done  # type: ignore[misc, assignment]
    gpu_worker.current_platform = SimpleNamespace(
        Stream=Done, current_stream=Done, stream=lambda s: contextlib.nullcontext(), is_xpu=no, is_rocm=no
    )
    gpu_worker.PIN_MEMORY = False
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def there_and_back(make: Any, page: int, per_chunk: int, layers: int = 3, blocks: int = 32) -> None:
    """Store random blocks of all layers, wipe them, load them, compare all bytes."""
    caches = [torch.randint(-128, 127, (2 * blocks, page), dtype=torch.int8, device=DEVICE) for _ in range(layers)]
    refs = [[CanonicalKVCacheRef(i, page) for i in range(layers)]]
    worker = make(CanonicalKVCaches([CanonicalKVCacheTensor(t, page) for t in caches], refs), per_chunk)
    ids, chunks = random.sample(range(2 * blocks), blocks), random.sample(range(blocks), blocks // per_chunk)
    on_gpu = GPULoadStoreSpec(ids, group_sizes=(blocks,), block_indices=(0,))
    before = [t.clone() for t in caches]
    assert_(worker.submit_store(1, on_gpu, CPULoadStoreSpec(chunks)), "not stored")
    worker.wait({1})
    for t in caches:
        t[ids] = 0
    assert_(worker.submit_load(2, CPULoadStoreSpec(chunks), on_gpu), "not loaded")
    worker.wait({2})
    done = {result.job_id: result.success for result in worker.get_finished()}
    assert_(done == {1: True, 2: True}, f"finished: {done}")
    assert_(all(map(torch.equal, before, caches)), f"bytes differ, page {page}, {per_chunk} blocks in a chunk")


def assert_(held: bool, text: str) -> None:
    if not held:
        raise SystemExit(text)


def plain(caches: Any, per_chunk: int) -> Any:
    return gpu_worker.CPUOffloadingWorker(caches, per_chunk, 64)


def by_spec(caches: Any, per_chunk: int) -> Any:
    from kvraw.adapters.vllm_offload import KvrawOffloadingSpec

    spec = KvrawOffloadingSpec.__new__(KvrawOffloadingSpec)
    spec.blocks_per_chunk, spec.num_chunks = per_chunk, 64
    spec._uses_shared_region = no
    return spec.create_worker(caches)


random.seed(0)
torch.manual_seed(0)
for page in (2048, 65536):
    for per_chunk in (1, 4):
        for make in (plain, by_spec):
            there_and_back(make, page, per_chunk)
one, other = (torch.randint(-128, 127, (64, 4096), dtype=torch.int8) for _ in range(2))
at = torch.arange(64, dtype=torch.int64) * 4096
swap_blocks_triton.swap_blocks_batch(
    at + one.data_ptr(), at + other.data_ptr(), torch.full_like(at, 4096), True, bytes_per_chunk=4096
)
assert_(torch.equal(one, other), "the operation for small blocks")
third = torch.zeros_like(one)
params = copy_backend.build_params({"a": one}, {"a": third}, Done())
copy_backend.copy_blocks([3, 5], [7, 0], params)
assert_(torch.equal(third[[7, 0]], one[[3, 5]]), "copies of SimpleCPUOffloadConnector")
print("all bytes equal")
