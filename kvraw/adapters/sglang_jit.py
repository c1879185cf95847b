"""The operations of `kvraw.adapters.sglang` that came later: the destination first, separate strides, ranges, moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvraw.adapters import tensors
from kvraw.adapters.sglang_direct import copy_ranges
from kvraw.adapters.sglang_kernel import INTS, WARPS, transfer
from kvraw.arrays import I64, index_vector
from kvraw.copying.plan import CopyPlan, Side
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.prepared import PreparedCopy
from kvraw.runtime.context import DeviceScope


def _row_stride(name: str, tensor: Any, dim: int) -> int:
    """Elements from row to row of a tensor with gaps, whose last axes make rows of `dim` elements."""
    row, step = tensors.row_of(name, tensor.shape, tensor.stride())
    if row != dim:
        raise LayoutError(f"{name} has rows of {row} elements, must have {dim}")
    return step


def _one_stride(name: str, group: tuple[Any, ...], size: int, dim: int) -> int:
    """Bytes from row to row of tensors whose rows have `dim` elements of `size` bytes."""
    found = 0
    for t in group:
        step = dim if t.is_contiguous() else _row_stride(name, t, dim)
        if t.numel() % dim:
            raise LayoutError(f"{name} has shape {tuple(t.shape)}, must hold whole rows of {dim} elements")
        if t.element_size() != size:
            raise LayoutError(f"{name} has elements of {t.element_size()} bytes, must have {size} as the destination")
        if found and found != step:
            raise LayoutError(f"k and v of {name} have strides of {found} and {step} elements, must have one")
        found = step
    return found * size


def _one_layer(
    dst: tuple[Any, ...], indices_dst: Any, src: tuple[Any, ...], indices_src: Any, element_dim: int | None, quota: Any
) -> None:
    size = dst[0].element_size()
    dim = element_dim or int(dst[0].shape[-1])
    strides = _one_stride("cache_src", src, size, dim), _one_stride("cache_dst", dst, size, dim)
    ends = ("lf", strides[0], src), ("lf", strides[1], dst)
    numbers = (dim * size, 1, 0, 1, 1)
    transfer(*ends, indices_src, indices_dst, numbers, quota, WARPS, INTS)


def _all_layer(
    dst: tuple[Any, ...],
    indices_dst: Any,
    src: tuple[Any, ...],
    indices_src: Any,
    strides: tuple[int, int],
    element_size: int | None,
    quota: Any,
) -> None:
    if element_size is None:
        if strides[0] != strides[1]:
            raise LayoutError(f"element_size is needed where strides differ: {strides[0]} and {strides[1]} bytes")
        element_size = strides[0]
    ends = ("table", strides[0], src), ("table", strides[1], dst)
    numbers = (element_size, src[0].shape[0], 0, 1, 1)
    transfer(*ends, indices_src, indices_dst, numbers, quota, WARPS, INTS)


# fmt: off
def transfer_hicache_one_layer(
    k_cache_dst: Any, v_cache_dst: Any, indices_dst: Any, k_cache_src: Any, v_cache_src: Any, indices_src: Any,
    *, element_dim: int | None = None, unroll: int | None = None, block_quota: int | None = None,
    page_size: int | None = None,
) -> None:
    """One layer of K and V, the destination first; rows may have gaps between them. `unroll` has no meaning here."""
    _one_layer(
        (k_cache_dst, v_cache_dst), indices_dst, (k_cache_src, v_cache_src), indices_src, element_dim, block_quota
    )


def transfer_hicache_one_layer_mla(
    cache_dst: Any, indices_dst: Any, cache_src: Any, indices_src: Any,
    *, element_dim: int | None = None, unroll: int | None = None, block_quota: int | None = None,
    page_size: int | None = None,
) -> None:
    """One layer of one plane, the destination first; rows may have gaps between them. `unroll` has no meaning here."""
    _one_layer((cache_dst,), indices_dst, (cache_src,), indices_src, element_dim, block_quota)


def transfer_hicache_all_layer(
    k_ptr_dst: Any, v_ptr_dst: Any, indices_dst: Any, k_ptr_src: Any, v_ptr_src: Any, indices_src: Any,
    *, kv_cache_src_stride_bytes: int, kv_cache_dst_stride_bytes: int, element_size: int | None = None,
    unroll: int | None = None, block_quota: int | None = None, page_size: int | None = None,
) -> None:
    """All layers by tables of addresses, the destination first, each side with its own stride of tokens."""
    dst, src = (k_ptr_dst, v_ptr_dst), (k_ptr_src, v_ptr_src)
    strides = kv_cache_src_stride_bytes, kv_cache_dst_stride_bytes
    _all_layer(dst, indices_dst, src, indices_src, strides, element_size, block_quota)


def transfer_hicache_all_layer_mla(
    ptr_dst: Any, indices_dst: Any, ptr_src: Any, indices_src: Any,
    *, cache_src_stride_bytes: int, cache_dst_stride_bytes: int, element_size: int | None = None,
    unroll: int | None = None, block_quota: int | None = None, page_size: int | None = None,
) -> None:
    """All layers of one plane by tables of addresses, the destination first, each side with its own stride."""
    strides = cache_src_stride_bytes, cache_dst_stride_bytes
    _all_layer((ptr_dst,), indices_dst, (ptr_src,), indices_src, strides, element_size, block_quota)


# fmt: on
def _numbers(name: str, values: Any) -> I64:
    host = index_vector(name, values).host
    if host is None:
        raise PlacementError(f"{name} lies on a device, must be on the host")
    return host


def transfer_embedding_ranges_direct(
    src: Any, dst: Any, src_starts: Sequence[int], dst_starts: Sequence[int], lengths: Sequence[int]
) -> None:
    """Ranges of rows of one tensor to ranges of another, by the copy engine."""
    starts = _numbers("src_starts", src_starts), _numbers("dst_starts", dst_starts)
    copy_ranges(src, dst, starts, _numbers("lengths", lengths))


def get_device_accessible_ptr(tensor: Any, device_index: int) -> int:
    """Address at which a GPU sees a tensor's memory, for tables of addresses that its kernels read."""
    if tensor.is_cuda:
        return int(tensor.data_ptr())
    with DeviceScope(device_index):
        return tensors.mapped_address("tensor", int(tensor.data_ptr()))


def copy_all_layer_kv_cache_cpu(data_ptrs: Any, strides: Any, tgt_loc: Any, src_loc: Any) -> None:
    """Move rows inside each of many host buffers; places may overlap: all are read before any is written."""
    if tensors.dtype_name(data_ptrs) not in ("uint64", "int64"):
        raise TypeError(f"data_ptrs holds {tensors.dtype_name(data_ptrs)}, must hold uint64")
    bases, steps = tensors.table_array(data_ptrs, "data_ptrs"), tensors.index_array(strides, "strides")
    source, target = tensors.index_array(src_loc, "src_loc"), tensors.index_array(tgt_loc, "tgt_loc")
    if len(bases) != len(steps) or len(source) != len(target):
        raise BoundsError(
            f"{len(bases)} data_ptrs and {len(steps)} strides, {len(source)} src_loc and {len(target)} tgt_loc: "
            f"must have the same number"
        )
    if (steps <= 0).any():
        worst = int(np.argmax(steps <= 0))
        raise BoundsError(f"strides[{worst}] is {steps[worst]}, must be positive")
    for step in np.unique(steps).tolist() if len(source) else ():
        group = bases[steps == step]
        room = np.empty((len(group), len(source), step), np.uint8)
        shelf = Side(outer=step, layer=len(source) * step)
        rows = Side(outer=step, table_layer=1, entries=len(group))
        counts = {"layers": len(group), "planes": 1, "tokens": 1, "heads": 1, "run": int(step)}
        names = ("src_loc", "tgt_loc")
        ends = ("data_ptrs", "room"), ("room", "data_ptrs")
        read = PreparedCopy(CopyPlan(rows, shelf, **counts), device=None, names=ends[0], index_names=names)
        write = PreparedCopy(CopyPlan(shelf, rows, **counts), device=None, names=ends[1], index_names=names)
        at = [int(room.ctypes.data)]
        read(group, at, len(source), src_index=source)
        write(at, group, len(source), dst_index=target)
