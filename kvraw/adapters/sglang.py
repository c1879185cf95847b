"""Stands in for ``sgl_kernel.kvcacheio``: the same names, parameters, defaults and error texts, on kvraw's engines.

Indices are token slots, sizes are bytes. The kernel operations run on torch's current stream of the device that the
indices lie on, on at most `block_quota` thread blocks (None: ``SGLANG_HICACHE_BLOCK_QUOTA``, else 2) of
`num_warps_per_block` warps; the direct ones go to the copy engine. Where nothing lies on a GPU, the CPU engine carries
them out before they return. Indices on the GPU are checked by the kernel: a bad one is left out, logged, and raised by
a later operation on that device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kvraw.adapters import sglang_direct as direct
from kvraw.adapters.sglang_jit import (
    copy_all_layer_kv_cache_cpu,
    get_device_accessible_ptr,
    transfer_embedding_ranges_direct,
    transfer_hicache_all_layer,
    transfer_hicache_all_layer_mla,
    transfer_hicache_one_layer,
    transfer_hicache_one_layer_mla,
)
from kvraw.adapters.sglang_kernel import transfer
from kvraw.adapters.sglang_staged import (
    can_use_hicache_jit_kernel,
    can_use_write_back_jit_kernel,
    transfer_hicache_all_layer_mla_staged_lf_pf,
    transfer_hicache_all_layer_staged_lf_pf,
)
from kvraw.adapters.stand_in import put, rebind, stand_in

__all__ = [
    "can_use_hicache_jit_kernel",
    "can_use_write_back_jit_kernel",
    "copy_all_layer_kv_cache_cpu",
    "get_device_accessible_ptr",
    "install",
    "is_hip",
    "transfer_embedding_ranges_direct",
    "transfer_hicache_all_layer",
    "transfer_hicache_all_layer_mla",
    "transfer_hicache_all_layer_mla_staged_lf_pf",
    "transfer_hicache_all_layer_staged_lf_pf",
    "transfer_hicache_one_layer",
    "transfer_hicache_one_layer_mla",
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_all_layer_lf_pf",
    "transfer_kv_all_layer_lf_pfdhg",
    "transfer_kv_all_layer_lf_ph",
    "transfer_kv_all_layer_mla",
    "transfer_kv_all_layer_mla_lf_pf",
    "transfer_kv_direct",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_direct_pf_lf",
    "transfer_kv_per_layer_mla",
    "transfer_kv_per_layer_mla_lf_pf",
    "transfer_kv_per_layer_mla_pf_lf",
    "transfer_kv_per_layer_pf_lf",
    "transfer_kv_per_layer_pfdhg_lf",
    "transfer_kv_per_layer_ph_lf",
]

_JIT = "sglang.kernels.ops.kvcache.hicache", "sglang.jit_kernel.hicache"  # now, and in earlier versions


def install() -> None:
    """Make SGLang use kvraw in this process: ``sgl_kernel.kvcacheio`` becomes the operations here.

    So do those of its names that ``sgl_kernel`` itself has, and those that SGLang compiles where it finds nvcc
    (``sglang.kernels.ops.kvcache.hicache``). All else stays its own, and where ``sgl_kernel`` is absent or does not
    load, importing it fails as ever. SGLang's modules that took the operations before get those here. Nothing is
    imported for it. Idempotent.
    """
    theirs = dict(vars(sys.modules.get("sgl_kernel.kvcacheio", sys)))
    stand_in("sgl_kernel", ("kvcacheio",), _names)
    for name, ours in _names().items():
        rebind(theirs.get(name), ours, "sglang")
    for module in _JIT:
        put(module, _compiled)


def _compiled() -> dict[str, Any]:
    return {name: value for name, value in _names().items() if name.startswith(("transfer_hicache", "can_use"))}


def _names() -> dict[str, Any]:
    return {name: globals()[name] for name in __all__ if name != "install"}


def is_hip() -> bool:
    """Whether torch is built for HIP; kvraw itself is for CUDA and the CPU."""
    try:
        import torch
    except ImportError:
        return False
    return torch.version.hip is not None


# fmt: off
def transfer_kv_per_layer(
    src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any,
    item_size: int, block_quota: int | None = 2, num_warps_per_block: int = 32,
) -> None:
    """One layer of K and V, tokens of `item_size` bytes on both sides."""
    src, dst = ("lf", 0, (src_k, src_v)), ("lf", 0, (dst_k, dst_v))
    transfer(src, dst, src_indices, dst_indices, (item_size, 1, 0, 1, 1), block_quota, num_warps_per_block)


def transfer_kv_per_layer_pf_lf(
    src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any,
    layer_id: int, item_size: int, src_layout_dim: int, block_quota: int | None = 2, num_warps_per_block: int = 32,
) -> None:
    """One layer of page_first memory [token, layer, head, dim] to that layer's own tensor."""
    src, dst = ("pf", src_layout_dim, (src_k, src_v)), ("lf", 0, (dst_k, dst_v))
    transfer(src, dst, src_indices, dst_indices, (item_size, 1, layer_id, 1, 1), block_quota, num_warps_per_block)


def transfer_kv_per_layer_ph_lf(
    src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any,
    layer_id: int, item_size: int, src_layout_dim: int, page_size: int, head_num: int,
    block_quota: int | None = 2, num_warps_per_block: int = 32,
) -> None:
    """One layer of page_head memory [page, head, token, layer, dim] to that layer's own tensor."""
    src, dst = ("ph", src_layout_dim, (src_k, src_v)), ("lf", 0, (dst_k, dst_v))
    rows = (item_size, 1, layer_id, page_size, head_num)
    transfer(src, dst, src_indices, dst_indices, rows, block_quota, num_warps_per_block)


def transfer_kv_all_layer(
    src_k_layers: Any, dst_k_layers: Any, src_v_layers: Any, dst_v_layers: Any, src_indices: Any, dst_indices: Any,
    item_size: int, num_layers: int, block_quota: int | None = 2, num_warps_per_block: int = 32,
) -> None:
    """All layers of K and V, by tables of the layers' addresses on both sides."""
    src, dst = ("table", 0, (src_k_layers, src_v_layers)), ("table", 0, (dst_k_layers, dst_v_layers))
    transfer(src, dst, src_indices, dst_indices, (item_size, num_layers, 0, 1, 1), block_quota, num_warps_per_block)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Any, dst_k: Any, src_v_layers: Any, dst_v: Any, src_indices: Any, dst_indices: Any,
    item_size: int, dst_layout_dim: int, num_layers: int, block_quota: int | None = 2, num_warps_per_block: int = 32,
) -> None:
    """All layers, by tables of their addresses, to page_first memory [token, layer, head, dim]."""
    src, dst = ("table", 0, (src_k_layers, src_v_layers)), ("pf", dst_layout_dim, (dst_k, dst_v))
    transfer(src, dst, src_indices, dst_indices, (item_size, num_layers, 0, 1, 1), block_quota, num_warps_per_block)


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Any, dst_k: Any, src_v_layers: Any, dst_v: Any, src_indices: Any, dst_indices: Any,
    item_size: int, dst_layout_dim: int, num_layers: int, page_size: int, head_num: int,
    block_quota: int | None = 2, num_warps_per_block: int = 32,
) -> None:
    """All layers, by tables of their addresses, to page_head memory [page, head, token, layer, dim]."""
    src, dst = ("table", 0, (src_k_layers, src_v_layers)), ("ph", dst_layout_dim, (dst_k, dst_v))
    rows = (item_size, num_layers, 0, page_size, head_num)
    transfer(src, dst, src_indices, dst_indices, rows, block_quota, num_warps_per_block)


def transfer_kv_per_layer_mla(
    src: Any, dst: Any, src_indices: Any, dst_indices: Any,
    item_size: int, block_quota: int | None = None, num_warps_per_block: int = 32,
) -> None:
    """One layer of one plane, tokens of `item_size` bytes on both sides."""
    ends = ("lf", 0, (src,)), ("lf", 0, (dst,))
    transfer(*ends, src_indices, dst_indices, (item_size, 1, 0, 1, 1), block_quota, num_warps_per_block)


def transfer_kv_per_layer_mla_pf_lf(
    src: Any, dst: Any, src_indices: Any, dst_indices: Any,
    layer_id: int, item_size: int, src_layout_dim: int, block_quota: int | None = None, num_warps_per_block: int = 32,
) -> None:
    """One layer of page_first memory of one plane to that layer's own tensor."""
    ends = ("pf", src_layout_dim, (src,)), ("lf", 0, (dst,))
    transfer(*ends, src_indices, dst_indices, (item_size, 1, layer_id, 1, 1), block_quota, num_warps_per_block)


def transfer_kv_per_layer_mla_lf_pf(
    src: Any, dst: Any, src_indices: Any, dst_indices: Any,
    layer_id: int, item_size: int, dst_layout_dim: int, block_quota: int | None = None, num_warps_per_block: int = 32,
) -> None:
    """One layer of one plane to page_first memory."""
    ends = ("lf", 0, (src,)), ("pf", dst_layout_dim, (dst,))
    transfer(*ends, src_indices, dst_indices, (item_size, 1, layer_id, 1, 1), block_quota, num_warps_per_block)


def transfer_kv_all_layer_mla(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any,
    item_size: int, num_layers: int, block_quota: int | None = 2, num_warps_per_block: int = 32,
) -> None:
    """All layers of one plane, by tables of the layers' addresses on both sides."""
    src, dst = ("table", 0, (src_layers,)), ("table", 0, (dst_layers,))
    transfer(src, dst, src_indices, dst_indices, (item_size, num_layers, 0, 1, 1), block_quota, num_warps_per_block)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Any, dst: Any, src_indices: Any, dst_indices: Any,
    item_size: int, dst_layout_dim: int, num_layers: int, block_quota: int | None = 2, num_warps_per_block: int = 32,
) -> None:
    """All layers of one plane, by a table of their addresses, to page_first memory."""
    ends = ("table", 0, (src_layers,)), ("pf", dst_layout_dim, (dst,))
    transfer(*ends, src_indices, dst_indices, (item_size, num_layers, 0, 1, 1), block_quota, num_warps_per_block)


def transfer_kv_per_layer_pfdhg_lf(
    src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any,
    layer_id: int, item_size: int, src_layout_dim: int, page_size: int, head_num: int,
    block_quota: int | None = None, num_warps_per_block: int = 32,
) -> None:
    """One layer of pages by head group [page, group, layer, token, ...] to its own tensor; `head_num` counts groups."""
    src, dst = ("hg", src_layout_dim, (src_k, src_v)), ("lf", 0, (dst_k, dst_v))
    rows = (item_size, 1, layer_id, page_size, head_num)
    transfer(src, dst, src_indices, dst_indices, rows, block_quota, num_warps_per_block)


def transfer_kv_all_layer_lf_pfdhg(
    src_k_layers: Any, dst_k: Any, src_v_layers: Any, dst_v: Any, src_indices: Any, dst_indices: Any,
    item_size: int, dst_layout_dim: int, num_layers: int, page_size: int, head_num: int,
    block_quota: int | None = None, num_warps_per_block: int = 32,
) -> None:
    """All layers to pages by head group [page, group, layer, token, ...]; `head_num` counts groups."""
    src, dst = ("table", 0, (src_k_layers, src_v_layers)), ("hg", dst_layout_dim, (dst_k, dst_v))
    rows = (item_size, num_layers, 0, page_size, head_num)
    transfer(src, dst, src_indices, dst_indices, rows, block_quota, num_warps_per_block)


# fmt: on
def transfer_kv_direct(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Tokens of each tensor of a list to the tensor beside it, neighbours in one piece; any memory, any indices."""
    if len(src_layers) != len(dst_layers):
        raise RuntimeError("Source and destination layers must have the same number of layers")
    index = direct.page_indices(src_indices, dst_indices, page_size)
    direct.copy_tokens(src_layers, dst_layers, index)


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """Pages of [page, layer, token, ...] buffers to tensors of one layer each, from `layer_id` on; K, then V."""
    pages, tokens = direct.page_indices(src_indices, dst_indices, page_size)
    direct.copy_pages(src_ptrs, dst_ptrs, pages, tokens, layer_id, page_size, to_pages=False)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Pages of all layers' tensors (all K, then all V) to [page, layer, token, ...] buffers."""
    tokens, pages = direct.page_indices(src_indices, dst_indices, page_size)
    direct.copy_pages(dst_ptrs, src_ptrs, pages, tokens, 0, page_size, to_pages=True)
