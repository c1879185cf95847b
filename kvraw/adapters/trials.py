"""Tries an engine's path to kvraw, in a process of its own: `main` is what ``kvraw doctor --engines`` runs there.

The engine's plugin manager does what it does when the engine starts; then one of its operations, taken from the
engine's module, moves bytes. The answer is one line of JSON: what was called, and whether all bytes arrived.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

__all__ = ["TRIALS", "main"]

_ROWS, _ROW = 64, 4096


def _buffers() -> tuple[Any, Any, Any]:
    """Torch, a tensor with bytes on the device that there is, and a zeroed one on the host."""
    import torch

    gpu = torch.cuda.is_available()
    full = torch.arange(_ROWS * _ROW, dtype=torch.int32).to(torch.uint8).view(_ROWS, _ROW)
    empty = torch.zeros_like(full)
    return torch, full.cuda() if gpu else full, empty.pin_memory() if gpu else empty


def _lmcache() -> tuple[Any, bool]:
    import lmcache
    from lmcache.lmcache_native import TransferDirection

    torch, full, empty = _buffers()
    call = lmcache.device_ops.lmcache_memcpy_async
    call(empty.data_ptr(), full.data_ptr(), full.numel(), TransferDirection.D2H, 0, 1 << 30)
    return call, _same(torch, full, empty)


def _sglang() -> tuple[Any, bool]:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.kernels.ops.kvcache import hicache

    torch, full, empty = _buffers()
    rows = torch.arange(_ROWS, dtype=torch.int64, device=full.device)
    call = hicache.transfer_hicache_one_layer_mla
    call(empty, rows, full, rows, element_dim=_ROW, page_size=1)
    return call, _same(torch, full, empty)


def _vllm() -> tuple[Any, bool]:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm import _custom_ops

    torch, full, empty = _buffers()
    starts = torch.arange(_ROWS, dtype=torch.int64) * _ROW
    call = _custom_ops.swap_blocks_batch
    call(starts + full.data_ptr(), starts + empty.data_ptr(), torch.full((_ROWS,), _ROW, dtype=torch.int64))
    return call, _same(torch, full, empty)


def _same(torch: Any, full: Any, empty: Any) -> bool:
    if full.is_cuda:
        torch.cuda.synchronize()
    return bool(torch.equal(full.cpu(), empty))


TRIALS: dict[str, Callable[[], tuple[Any, bool]]] = {"lmcache": _lmcache, "sglang": _sglang, "vllm": _vllm}


def main(name: str) -> None:
    """Try an engine; what goes wrong is the answer."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print
    try:
        call, same = TRIALS[name]()
        call = getattr(call, "__func__", call)
        report = {"called": f"{call.__module__}.{call.__qualname__}", "equal": same, "error": None}
    except Exception as error:
        report = {"called": None, "equal": False, "error": f"{type(error).__name__}: {error}"}
    with answer:
        answer.write(json.dumps(report) + "\n")
