"""Names, parameters, defaults and values of the surface, as data."""

from __future__ import annotations

import copy
import enum
import inspect
import pickle
from typing import Any

import pytest

import kvraw.adapters.lmcache as ops

# Parameters in order; a default behind "=".
FUNCTIONS = {
    "multi_layer_block_kv_transfer": "paged_buffer_ptrs_tensor lmcache_objects_ptrs block_ids device direction "
    "shape_desc lmcache_chunk_size engine_kv_format skip_prefix_n_blocks",
    "multi_layer_kv_transfer": "key_value key_value_ptrs slot_mapping paged_memory_device page_buffer_size direction "
    "engine_kv_format block_size=0 head_size=0 skip_prefix_n_tokens=0 block_stride_elems=0",
    "multi_layer_kv_transfer_unilateral": "key_value key_value_ptrs slot_mapping paged_memory_device page_buffer_size "
    "direction engine_kv_format",
    "single_layer_kv_transfer": "lmc_key_value_cache vllm_key_value_cache slot_mapping direction engine_kv_format "
    "token_major=False",
    "single_layer_kv_transfer_sgl": "lmc_key_value_cache sgl_key_cache sgl_value_cache slot_mapping direction "
    "token_major=False",
    "load_and_reshape_flash": "key_value key_cache value_cache slot_mapping layer_idx",
    "reshape_and_cache_back_flash": "key_value key_cache value_cache slot_mapping layer_idx",
    "lmcache_memcpy_async": "dest src nbytes direction host_buffer_offset host_buffer_alignments",
    "batched_memcpy": "src_ptrs dst_ptrs sizes",
    "execute_object_group_transfer": "direction device host_buffer_alignment kernel_group_specs batch_steps "
    "phase_timing_enabled=False session_id=''",
    "execute_cb_retrieve_plan_flat": "device host_buffer_alignment group_specs staging ropes scatters step_offsets",
    "batch_memcpy_supported": "",
    "direct_copy_format_supported": "engine_kv_format",
    "execute_direct_copy_transfer": "direction device host_buffer_alignment group_specs objects",
    "alloc_pinned_ptr": "size flags=0 device_id=None",
    "free_pinned_ptr": "ptr",
    "alloc_numa_ptr": "size numa_id=0",
    "free_numa_ptr": "ptr size=None",
    "alloc_pinned_numa_ptr": "size numa_id=0",
    "free_pinned_numa_ptr": "ptr size=None",
    "alloc_hugepage_pinned_ptr": "size flags=0 device_id=None",
    "free_hugepage_pinned_ptr": "ptr size=0",
    "alloc_hugepage_pinned_numa_ptr": "size numa_id=0",
    "free_hugepage_pinned_numa_ptr": "ptr size=0",
    "alloc_shm_pinned_ptr": "size shm_name=''",
    "free_shm_pinned_ptr": "ptr size=0 shm_name=''",
    "get_gpu_pci_bus_id": "device_id=0",
    "calculate_cdf": "input_tensor num_bins",
    "encode_fast_new": "cdf input_sym output_buffer output_lengths",
    "decode_fast_new": "cdf bytestreams lengths output",
    "decode_fast_prefsum": "cdf bytestreams lengths_prefsum output",
    "rotary_embedding_k_fused": "old_positions new_positions key head_size cos_sin_cache is_neox",
    "rotary_embedding_k_fused_strided": "old_positions new_positions key head_size head_stride cos_sin_cache is_neox",
    "record_event_on_stream": "cuda_stream_ptr event_type_name session_id str_metadata int_metadata",
    "drain_recorded_events": "",
    "record_completion_on_stream": "cuda_stream_ptr kind payload",
    "drain_recorded_completions": "",
    "pop_completed_phase_timings": "",
    "is_cross_layer": "engine_kv_format=None format=None",
    "is_kv_list": "engine_kv_format=None format=None",
    "is_layer_list": "engine_kv_format=None format=None",
    "is_mla": "engine_kv_format=None format=None",
    "set_shape_desc_dtype": "shape_desc dtype",
    "compute_kv_layout": "kv_caches layout_hints=None",
    "gather_paged_kv_to_cpu": "kv_caches block_ids blocks_per_chunk layout_hints=None engine_kv_format=None out=None "
    "chunk_indices=None",
    "scatter_cpu_to_paged_kv": "kv_caches block_ids chunks blocks_per_chunk skip_first_n_tokens=0 layout_hints=None "
    "engine_kv_format=None",
    "StagingCopy": "dest src nbytes host_offset",
    "LaunchVar": "group_idx block_ids_offset total_blocks num_objects skip_prefix_n_blocks",
    "KernelGroupSpec": "paged_buffer_ptrs lmcache_objects_ptrs shape_desc lmcache_chunk_size engine_kv_format "
    "block_ids_base block_ids_capacity",
    "CBGroupSpec": "paged_kv_ptrs temp_buffer_ptrs num_layers slot_tokens hidden_elems element_size engine_kv_format "
    "page_buffer_size block_size head_size slot_mapping_base slot_mapping_capacity cos_sin_cache rot_dim "
    "rope_num_kv_heads rope_head_stride key_scalar_type is_neox rope_base_offset=0 block_stride_elems=0 "
    "cache_scalar_type=-1",
    "DirectCopyGroupSpec": "paged_layer_ptrs shape_desc engine_kv_format slots_per_chunk byte_offset_in_object "
    "block_ids",
    "DirectCopyObject": "host_ptr host_offset nbytes chunk_idx skip_prefix_n_blocks",
    "PageBufferShapeDesc": "",
    "install": "",
}
FORMATS = """
    NB_NL_TWO_BS_NH_HS NL_X_TWO_NB_BS_NH_HS NL_X_NB_TWO_BS_NH_HS NL_X_NB_BS_HS TWO_X_NL_X_NBBS_NH_HS NL_X_NBBS_ONE_HS
    NL_X_TWO_NB_NH_BS_HS NL_X_NB_TWO_NH_BS_HS NB_NL_TWO_NH_BS_HS TWO_X_NL_X_NB_BS_NH_HS NL_X_NB_NH_BS_TWO_HS
    NL_X_NB_BS_NH_TWO_HS NL_X_NB_NH_BS_CS NL_X_NB_BS_NH_CS NL_X_NB_BSV_BSS NL_X_TWO_NB_NH_ONE_BS_HS
    NL_X_TWO_X_NB_BS_NH_HS NL_X_NP_X_NB_BS_ONE_HS NL_X_NB_BS_NH_HS
""".split()  # noqa: SIM905
OTHERS = {"BatchStep", "EngineKVFormat", "GPUKVFormat", "TransferDirection", "H2D", "D2H", *FORMATS}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters(name: str) -> None:
    parameters = inspect.signature(getattr(ops, name)).parameters.values()
    got = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert got == FUNCTIONS[name].split()


def test_nothing_else() -> None:
    assert set(dir(ops)) == set(FUNCTIONS) | OTHERS
    assert all(hasattr(ops, name) for name in dir(ops))


def test_callers_may_pass_tensors() -> None:
    # Callers look at this annotation to learn that tensors are taken, and any number of them.
    parameter = inspect.signature(ops.multi_layer_block_kv_transfer).parameters["lmcache_objects_ptrs"]
    assert "Tensor" in str(parameter.annotation)


class Peer(enum.IntEnum):
    H2D = 0
    D2H = 1


class Foreign:
    """An enum member that is no integer."""

    def __int__(self) -> int:
        return 3


def test_members() -> None:
    assert [f.name for f in ops.EngineKVFormat] == FORMATS
    assert [int(f) for f in ops.EngineKVFormat] == list(range(19))
    assert [getattr(ops, name) for name in FORMATS] == list(ops.EngineKVFormat)
    assert ops.GPUKVFormat is ops.EngineKVFormat
    assert ops.EngineKVFormat(3) is ops.NL_X_NB_BS_HS
    assert ops.EngineKVFormat["NL_X_NB_BS_HS"].value == 3
    assert list(ops.TransferDirection.__members__) == ["H2D", "D2H"]
    assert (Peer.D2H, 1) == (ops.D2H, ops.D2H)
    assert len({ops.H2D, ops.D2H, Peer.H2D}) == 2
    assert pickle.loads(pickle.dumps(ops.D2H)) is ops.D2H
    assert copy.deepcopy(ops.NL_X_NB_BS_NH_HS) is ops.NL_X_NB_BS_NH_HS
    assert pickle.loads(pickle.dumps(ops.NL_X_NB_BS_NH_HS)) is ops.NL_X_NB_BS_NH_HS
    assert repr(ops.H2D) == "<TransferDirection.H2D: 0>" == str(ops.H2D)
    assert [name for name in vars(ops.EngineKVFormat) if name.isupper()] == FORMATS[:12]  # the reference version's
    assert getattr(ops.EngineKVFormat, FORMATS[18]) is ops.EngineKVFormat(18)
    with pytest.raises(ValueError, match="19 is not a valid EngineKVFormat"):
        ops.EngineKVFormat(19)


@pytest.mark.parametrize("convert", [lambda f: f, int, ops.EngineKVFormat])
def test_predicates(convert: Any) -> None:
    flags = {f: (ops.is_cross_layer(convert(f)), ops.is_kv_list(convert(f)), ops.is_layer_list(convert(f)))
             for f in ops.EngineKVFormat}  # fmt: skip
    assert all(sum(row) == 1 for row in flags.values())
    assert [int(f) for f, row in flags.items() if row[0]] == [0, 8]
    assert [int(f) for f, row in flags.items() if row[1]] == [4, 9]
    assert [int(f) for f in ops.EngineKVFormat if ops.is_mla(convert(f))] == [3, 5, 14, 17]


@pytest.mark.parametrize("ask", [ops.is_cross_layer, ops.is_kv_list, ops.is_layer_list, ops.is_mla])
def test_predicates_by_either_name(ask: Any) -> None:
    for f in ops.EngineKVFormat:
        assert ask(f) == ask(engine_kv_format=f) == ask(format=f) == ask(format=int(f))
    with pytest.raises(TypeError, match="both were given"):
        ask(0, format=0)
    with pytest.raises(TypeError, match="engine_kv_format is a NoneType"):
        ask()


def test_foreign_members() -> None:
    assert ops.is_mla(Foreign())
    for bad in ("3", 3.0, None):
        with pytest.raises(TypeError, match="engine_kv_format is a"):
            ops.is_mla(bad)
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind, match="Unsupported EngineKVFormat"):
            ops.is_mla(-1)


def test_descriptor() -> None:
    d = ops.PageBufferShapeDesc()
    assert vars(d) == dict.fromkeys(
        ["kv_size", "nl", "nb", "bs", "nh", "hs", "element_size", "block_stride_elems"], 0
    ) | {"dtype": None}
    ops.set_shape_desc_dtype(d, "bfloat16")
    assert d.dtype == "bfloat16"
    ops.set_shape_desc_dtype(object(), "bfloat16")
    assert ops.BatchStep().staging == []
