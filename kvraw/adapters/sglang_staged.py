"""The staged write-back of `kvraw.adapters.sglang`: layers to page_first host memory, through memory of the device.

A kernel packs pages into the caller's staging memory in the host's own order; whole pages leave it by the copy engine.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from kvraw.adapters import tensors
from kvraw.adapters.copies import bound_copies
from kvraw.adapters.deferred_errors import pending, raise_deferred
from kvraw.adapters.sglang_direct import Known, known
from kvraw.adapters.sglang_kernel import INTS, WARPS, default_quota, launch, transfer
from kvraw.copying.device_state import device_state
from kvraw.copying.given import page_starts
from kvraw.copying.plan import CopyPlan, Side
from kvraw.errors import LayoutError, PlacementError

__all__ = [
    "can_use_hicache_jit_kernel",
    "can_use_write_back_jit_kernel",
    "transfer_hicache_all_layer_mla_staged_lf_pf",
    "transfer_hicache_all_layer_staged_lf_pf",
]

_NAMES = ("staging", "dst")
_taken: set[tuple[object, object]] = set()  # types of both indices


def can_use_hicache_jit_kernel(
    *, element_size: int, unroll: int | None = None, block_quota: int | None = None, page_size: int | None = None
) -> bool:
    """Whether the ``transfer_hicache_*`` operations take rows of this many bytes, in pages of any size."""
    return element_size > 0 and element_size % 8 == 0


def can_use_write_back_jit_kernel(
    *, element_size: int, unroll: int | None = None, block_quota: int | None = None
) -> bool:
    """Whether the staged operations take rows of this many bytes."""
    return element_size > 0 and element_size % 8 == 0


# fmt: off
def transfer_hicache_all_layer_staged_lf_pf(
    k_ptr_src: Any, v_ptr_src: Any, src_indices: Any, dst_indices: Any, staging_k: Any, staging_v: Any, dst_k: Any,
    dst_v: Any,
    *, page_size: int, element_size: int | None = None, unroll: int | None = None, block_quota: int | None = None,
) -> None:
    """All layers of K and V, by tables of their addresses, to page_first host memory; `dst_indices` are on the CPU.

    Staging and destination are [token, layer, ...] without gaps; a page of `dst_indices` is one of the destination's.
    """
    groups = (k_ptr_src, v_ptr_src), (staging_k, staging_v), (dst_k, dst_v)
    _staged(*groups, src_indices, dst_indices, page_size, element_size, block_quota)


def transfer_hicache_all_layer_mla_staged_lf_pf(
    ptr_src: Any, src_indices: Any, dst_indices: Any, staging: Any, dst: Any,
    *, page_size: int, element_size: int | None = None, unroll: int | None = None, block_quota: int | None = None,
) -> None:
    """All layers of one plane to page_first host memory; see `transfer_hicache_all_layer_staged_lf_pf`."""
    _staged((ptr_src,), (staging,), (dst,), src_indices, dst_indices, page_size, element_size, block_quota)


# fmt: on
def _tokens(name: str, group: tuple[Any, ...], token: int) -> int:
    """Tokens that each of these holds."""
    for t in group:
        if not t.is_contiguous() or t.numel() * t.element_size() != t.shape[0] * token:
            raise LayoutError(
                f"{name} has shape {tuple(t.shape)}, strides {tuple(t.stride())}; must be tokens of {token} bytes, "
                f"without gaps"
            )
    return min(int(t.shape[0]) for t in group)


def _make(staging: tuple[Any, ...], dst: tuple[Any, ...], token: int, page_size: int) -> Known:
    """Copies of whole pages; tokens that the staging memory, in whole pages, and the destination hold."""
    room, side = _tokens("staging", staging, token), Side(outer=page_size * token, table_layer=1, entries=len(dst))
    plan = CopyPlan(side, side, layers=len(dst), planes=1, tokens=1, heads=1, run=side.outer)
    bases = [[int(t.data_ptr()) for t in group] for group in (staging, dst)]
    copies = bound_copies(dst, [(plan, bases[0], bases[1])])
    device = tensors.device_of(staging) if all(t.is_cuda for t in staging) else None
    return Known(device, copies, (room // page_size * page_size, _tokens("dst", dst, token)))


def _staged(
    src: tuple[Any, ...],
    staging: tuple[Any, ...],
    dst: tuple[Any, ...],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
    element_size: int | None,
    quota: int | None,
) -> None:
    count, layers, first = int(src_indices.numel()), int(src[0].shape[0]), staging[0]
    if dst_indices.is_cuda:
        raise RuntimeError("Destination indices must be a CPU tensor")
    types = src_indices.dtype, dst_indices.dtype
    if types not in _taken:
        if tensors.dtype_name(dst_indices) != "int64" or tensors.dtype_name(src_indices) not in INTS:
            raise RuntimeError("Destination indices must be of type long, source indices of type long or int")
        _taken.add(types)
    if count != dst_indices.numel():
        raise RuntimeError("Source and destination indices must have the same length")
    if page_size <= 0 or count % page_size:
        raise RuntimeError("Page size must be positive, and the indices whole pages")
    size = element_size or int(first.numel()) // max(prod(first.shape[:2]), 1) * int(first.element_size())
    if size <= 0 or size % 8:
        raise RuntimeError("Item byte size must be divisible by 8")
    numbers, token = (size, layers, 0, 1, 1), size * layers
    if not count or not layers:
        return
    key = ("staged", token, page_size)
    at, copies, (room, held) = known(key, _NAMES, staging, dst, lambda: _make(staging, dst, token, page_size))
    values = tensors.index_array(dst_indices, "dst_indices")
    pages = page_starts("dst_indices", values, page_size, held - page_size + 1, aligned=True)
    blocks, source = quota or default_quota(quota), ("table", 0, src)
    if not src_indices.is_cuda:
        transfer(source, ("pf", token, dst), src_indices, dst_indices, numbers, blocks, WARPS, INTS)
        return
    if not room or at is None or copies is None:
        raise PlacementError(f"staging holds {room} tokens in whole pages, must hold a page on the GPU")
    index = src_indices if src_indices.is_contiguous() else src_indices.contiguous()
    device = int(src_indices.get_device())
    begins, width, end = index.data_ptr(), index.element_size(), ("pf", token, staging)
    stream, state = tensors.current_stream(device), device_state(device)
    # Once: what a part of this operation finds stops no other part.
    if pending(state):
        raise_deferred(device, stream)
    for begin in range(0, count, room):  # the stream's order keeps a part's copies before the next part's kernel
        many = min(room, count - begin)
        ids = (begins + begin * width, width, index), (0, 0, None)
        launch(state, stream, source, end, numbers, blocks, WARPS, *ids, many, raising=False)
        to = pages[begin // page_size : (begin + many) // page_size]
        copies.enqueue(state, stream, np.arange(len(to)), to, (staging, dst))
