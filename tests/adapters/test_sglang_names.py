"""Names, parameter names, their order and defaults, as the peer's callers use them."""

from __future__ import annotations

import inspect

import pytest

from kvraw.adapters import sglang, vllm

KV = "src_k dst_k src_v dst_v src_indices dst_indices"
TABLES = "src_k_layers dst_k_layers src_v_layers dst_v_layers src_indices dst_indices"
MIXED = "src_k_layers dst_k src_v_layers dst_v src_indices dst_indices"
ONE = "src dst src_indices dst_indices"
TAIL = "block_quota=2 num_warps_per_block=32"
LATER = "block_quota=None num_warps_per_block=32"
HICACHE = "* element_dim=None unroll=None block_quota=None page_size=None"
STAGED = "element_size=None unroll=None block_quota=None"
WANT = {
    "get_device_accessible_ptr": "tensor device_index",
    "install": "",
    "is_hip": "",
    "transfer_kv_per_layer": f"{KV} item_size {TAIL}",
    "transfer_kv_per_layer_pf_lf": f"{KV} layer_id item_size src_layout_dim {TAIL}",
    "transfer_kv_per_layer_ph_lf": f"{KV} layer_id item_size src_layout_dim page_size head_num {TAIL}",
    "transfer_kv_all_layer": f"{TABLES} item_size num_layers {TAIL}",
    "transfer_kv_all_layer_lf_pf": f"{MIXED} item_size dst_layout_dim num_layers {TAIL}",
    "transfer_kv_all_layer_lf_ph": f"{MIXED} item_size dst_layout_dim num_layers page_size head_num {TAIL}",
    "transfer_kv_direct": "src_layers dst_layers src_indices dst_indices page_size",
    "transfer_kv_per_layer_direct_pf_lf": "src_ptrs dst_ptrs src_indices dst_indices layer_id page_size",
    "transfer_kv_all_layer_direct_lf_pf": "src_ptrs dst_ptrs src_indices dst_indices page_size",
    "transfer_kv_per_layer_mla": f"{ONE} item_size {LATER}",
    "transfer_kv_per_layer_mla_pf_lf": f"{ONE} layer_id item_size src_layout_dim {LATER}",
    "transfer_kv_all_layer_mla": f"src_layers dst_layers src_indices dst_indices item_size num_layers {TAIL}",
    "transfer_kv_all_layer_mla_lf_pf": (
        f"src_layers dst src_indices dst_indices item_size dst_layout_dim num_layers {TAIL}"
    ),
    # later versions
    "transfer_kv_per_layer_mla_lf_pf": f"{ONE} layer_id item_size dst_layout_dim {LATER}",
    "transfer_kv_per_layer_pfdhg_lf": f"{KV} layer_id item_size src_layout_dim page_size head_num {LATER}",
    "transfer_kv_all_layer_lf_pfdhg": f"{MIXED} item_size dst_layout_dim num_layers page_size head_num {LATER}",
    "transfer_embedding_ranges_direct": "src dst src_starts dst_starts lengths",
    "copy_all_layer_kv_cache_cpu": "data_ptrs strides tgt_loc src_loc",
    "transfer_hicache_one_layer": (
        f"k_cache_dst v_cache_dst indices_dst k_cache_src v_cache_src indices_src {HICACHE}"
    ),
    "transfer_hicache_one_layer_mla": f"cache_dst indices_dst cache_src indices_src {HICACHE}",
    "transfer_hicache_all_layer": (
        "k_ptr_dst v_ptr_dst indices_dst k_ptr_src v_ptr_src indices_src * kv_cache_src_stride_bytes "
        "kv_cache_dst_stride_bytes element_size=None unroll=None block_quota=None page_size=None"
    ),
    "transfer_hicache_all_layer_staged_lf_pf": (
        f"k_ptr_src v_ptr_src src_indices dst_indices staging_k staging_v dst_k dst_v * page_size {STAGED}"
    ),
    "transfer_hicache_all_layer_mla_staged_lf_pf": (
        f"ptr_src src_indices dst_indices staging dst * page_size {STAGED}"
    ),
    "can_use_hicache_jit_kernel": "* element_size unroll=None block_quota=None page_size=None",
    "can_use_write_back_jit_kernel": "* element_size unroll=None block_quota=None",
    "transfer_hicache_all_layer_mla": (
        "ptr_dst indices_dst ptr_src indices_src * cache_src_stride_bytes cache_dst_stride_bytes element_size=None "
        "unroll=None block_quota=None page_size=None"
    ),
}


def written(function: object) -> str:
    """A signature as one line: names, ``*`` before those by keyword alone, defaults."""
    words = []
    for p in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if p.kind is p.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(p.name if p.default is p.empty else f"{p.name}={p.default}")
    return " ".join(words)


@pytest.mark.parametrize("name", WANT)
def test_signature(name: str) -> None:
    assert written(getattr(sglang, name)) == WANT[name]


def test_no_name_is_missing_or_unknown() -> None:
    assert sorted(sglang.__all__) == sorted(WANT)


def test_the_rows_that_the_later_operations_take() -> None:
    for ask in (sglang.can_use_hicache_jit_kernel, sglang.can_use_write_back_jit_kernel):
        assert [n for n in (-8, 0, 8, 20, 100, 576, 1024) if ask(element_size=n)] == [8, 576, 1024]


def test_vllm() -> None:
    assert written(vllm.swap_blocks) == "src dst block_size_in_bytes block_mapping"
    assert written(vllm.swap_blocks_batch) == "src_ptrs dst_ptrs sizes is_src_access_order_any=False"


def test_hip() -> None:
    assert sglang.is_hip() is False
