"""SGLang's own host pools back up and load, byte for byte; run in an environment with SGLang.

Without a GPU, SGLang is made to take its branches for CUDA, on CPU tensors, and what is not installed there is empty
modules. What copies is what its plugin manager brought.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import empty
import torch

empty.install(
    "triton IPython dill tvm_ffi sentencepiece compressed_tensors gguf sgl_kernel orjson pybase64 PIL torchvision "
    "starlette uvloop"
)
torch.compile = lambda f=None, **k: f if f is not None else (lambda g: g)  # type: ignore[assignment]
GPU = torch.cuda.is_available()
if not GPU:
    torch.version.cuda = torch.version.cuda or "13.0"
    properties = SimpleNamespace(
        major=9, minor=0, name="none", multi_processor_count=132, total_memory=1 << 37, warp_size=32
    )
    pretended = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0)}
    pretended |= {"get_device_name": "none", "get_device_properties": properties}
    for name, value in pretended.items():
        setattr(torch.cuda, name, lambda *a, value=value, **k: value)

from sglang.srt.plugins import load_plugins

if "late" not in sys.argv:
    load_plugins()
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import mha, mla

load_plugins()  # as a scheduler's process does, whose modules are there by then

DEVICE = "cuda" if GPU else "cpu"
LAYERS, TOKENS, PAGE = 2, 1024, 64
WAYS = (
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("page_head", "kernel"),
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
)


def there_and_back(kind: str, layout: str, backend: str) -> None:
    """Back up pages of all layers, wipe them, load them layer by layer, compare all bytes."""
    size = {"size": 2 * TOKENS, "page_size": PAGE, "dtype": torch.bfloat16, "layer_num": LAYERS, "device": DEVICE}
    if kind == "mha":
        pool = MHATokenToKVPool(head_num=8, head_dim=128, enable_alt_stream=False, enable_memory_saver=False, **size)
        held = [*pool.k_buffer, *pool.v_buffer]
    else:
        pool = MLATokenToKVPool(kv_lora_rank=512, qk_rope_head_dim=64, enable_memory_saver=False, **size)
        held = [*pool.kv_buffer]
    info = pool.get_device_pool_infos()[0].buffer_info
    options = {"host_to_device_ratio": 2.0, "host_size": 0, "page_size": PAGE, "layout": layout, "pin_memory": GPU}
    options |= {"device": "cpu", "device_capacity_tokens": TOKENS}
    if kind == "mha":
        host = mha.get_mha_host_pool_cls(info)(info, start_layer=0, end_layer=LAYERS, **options)
    else:
        host = mla.MLATokenToKVPoolHost(info, target_layer_num=LAYERS, start_layer=0, end_layer=LAYERS, **options)
    for buffer in held:
        buffer.view(torch.int16).random_(-(2**15), 2**15 - 1)
    pages = torch.randperm(2 * TOKENS // PAGE)[: TOKENS // PAGE] + 1
    at = (pages[:, None] * PAGE + torch.arange(PAGE)).reshape(-1).to(DEVICE)
    slots = host.alloc(TOKENS).view(-1, PAGE)
    slots = slots[torch.randperm(len(slots))].reshape(-1)
    before = [buffer.clone() for buffer in held]
    host.backup_from_device_all_layer(pool, *moved(host, layout, backend, slots, at, out=True), backend)
    for buffer in held:
        buffer[at] = 0
    to, of = moved(host, layout, backend, slots, at, out=False)
    for layer in range(LAYERS):
        host.load_to_device_per_layer(pool, to, of, layer, backend)
    for one, other in zip(before, held, strict=True):
        if not torch.equal(one.view(torch.int16), other.view(torch.int16)):
            raise SystemExit(f"bytes differ: {kind} {layout} {backend}")


def moved(
    host: object, layout: str, backend: str, slots: torch.Tensor, at: torch.Tensor, out: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices where SGLang's controller of caches puts them."""
    if backend == "kernel":
        staged = out and layout == "page_first" and getattr(host, "can_use_write_back_jit", False)
        return (slots if staged else slots.to(DEVICE)), at
    if layout == "layer_first":
        slots, order = slots.sort()
        return slots, at.cpu()[order]
    return slots, at.cpu()


torch.manual_seed(0)
for kind in ("mha", "mla"):
    for layout, backend in WAYS:
        if (kind, layout) != ("mla", "page_head"):
            there_and_back(kind, layout, backend)
print("all bytes equal")
