"""The operations of LMCache's compiled module, on kvraw's plans: a stand-in for ``lmcache.c_ops``.

Later versions of LMCache look for the same names in ``lmcache.cuda_ops``. Every operation works on a GPU, in the order
of the current torch stream, and on the CPU. Directions and formats are members of the enums here, of LMCache's enums,
or plain integers. What an operation with ids on the device finds wrong with them is raised by the next one on that
device.
"""

from __future__ import annotations

from kvraw.adapters.lmcache._blend import execute_cb_retrieve_plan_flat as execute_cb_retrieve_plan_flat
from kvraw.adapters.lmcache._blocks import multi_layer_block_kv_transfer as multi_layer_block_kv_transfer
from kvraw.adapters.lmcache._codec import calculate_cdf as calculate_cdf
from kvraw.adapters.lmcache._codec import decode_fast_new as decode_fast_new
from kvraw.adapters.lmcache._codec import decode_fast_prefsum as decode_fast_prefsum
from kvraw.adapters.lmcache._codec import encode_fast_new as encode_fast_new
from kvraw.adapters.lmcache._codec import rotary_embedding_k_fused as rotary_embedding_k_fused
from kvraw.adapters.lmcache._codec import rotary_embedding_k_fused_strided as rotary_embedding_k_fused_strided
from kvraw.adapters.lmcache._copies import batched_memcpy as batched_memcpy
from kvraw.adapters.lmcache._copies import lmcache_memcpy_async as lmcache_memcpy_async
from kvraw.adapters.lmcache._direct import batch_memcpy_supported as batch_memcpy_supported
from kvraw.adapters.lmcache._direct import direct_copy_format_supported as direct_copy_format_supported
from kvraw.adapters.lmcache._direct import execute_direct_copy_transfer as execute_direct_copy_transfer
from kvraw.adapters.lmcache._groups import execute_object_group_transfer as execute_object_group_transfer
from kvraw.adapters.lmcache._memory import alloc_hugepage_pinned_numa_ptr as alloc_hugepage_pinned_numa_ptr
from kvraw.adapters.lmcache._memory import alloc_hugepage_pinned_ptr as alloc_hugepage_pinned_ptr
from kvraw.adapters.lmcache._memory import alloc_numa_ptr as alloc_numa_ptr
from kvraw.adapters.lmcache._memory import alloc_pinned_numa_ptr as alloc_pinned_numa_ptr
from kvraw.adapters.lmcache._memory import alloc_pinned_ptr as alloc_pinned_ptr
from kvraw.adapters.lmcache._memory import alloc_shm_pinned_ptr as alloc_shm_pinned_ptr
from kvraw.adapters.lmcache._memory import free_hugepage_pinned_numa_ptr as free_hugepage_pinned_numa_ptr
from kvraw.adapters.lmcache._memory import free_hugepage_pinned_ptr as free_hugepage_pinned_ptr
from kvraw.adapters.lmcache._memory import free_numa_ptr as free_numa_ptr
from kvraw.adapters.lmcache._memory import free_pinned_numa_ptr as free_pinned_numa_ptr
from kvraw.adapters.lmcache._memory import free_pinned_ptr as free_pinned_ptr
from kvraw.adapters.lmcache._memory import free_shm_pinned_ptr as free_shm_pinned_ptr
from kvraw.adapters.lmcache._memory import get_gpu_pci_bus_id as get_gpu_pci_bus_id
from kvraw.adapters.lmcache._recorders import drain_recorded_completions as drain_recorded_completions
from kvraw.adapters.lmcache._recorders import drain_recorded_events as drain_recorded_events
from kvraw.adapters.lmcache._recorders import pop_completed_phase_timings as pop_completed_phase_timings
from kvraw.adapters.lmcache._recorders import record_completion_on_stream as record_completion_on_stream
from kvraw.adapters.lmcache._recorders import record_event_on_stream as record_event_on_stream
from kvraw.adapters.lmcache._slots import load_and_reshape_flash as load_and_reshape_flash
from kvraw.adapters.lmcache._slots import multi_layer_kv_transfer as multi_layer_kv_transfer
from kvraw.adapters.lmcache._slots import multi_layer_kv_transfer_unilateral as multi_layer_kv_transfer_unilateral
from kvraw.adapters.lmcache._slots import reshape_and_cache_back_flash as reshape_and_cache_back_flash
from kvraw.adapters.lmcache._slots import single_layer_kv_transfer as single_layer_kv_transfer
from kvraw.adapters.lmcache._slots import single_layer_kv_transfer_sgl as single_layer_kv_transfer_sgl
from kvraw.adapters.lmcache._stand_in import install as install
from kvraw.adapters.lmcache._types import BatchStep as BatchStep
from kvraw.adapters.lmcache._types import CBGroupSpec as CBGroupSpec
from kvraw.adapters.lmcache._types import DirectCopyGroupSpec as DirectCopyGroupSpec
from kvraw.adapters.lmcache._types import DirectCopyObject as DirectCopyObject
from kvraw.adapters.lmcache._types import EngineKVFormat as EngineKVFormat
from kvraw.adapters.lmcache._types import GPUKVFormat as GPUKVFormat
from kvraw.adapters.lmcache._types import KernelGroupSpec as KernelGroupSpec
from kvraw.adapters.lmcache._types import LaunchVar as LaunchVar
from kvraw.adapters.lmcache._types import PageBufferShapeDesc as PageBufferShapeDesc
from kvraw.adapters.lmcache._types import StagingCopy as StagingCopy
from kvraw.adapters.lmcache._types import TransferDirection as TransferDirection
from kvraw.adapters.lmcache._types import is_cross_layer as is_cross_layer
from kvraw.adapters.lmcache._types import is_kv_list as is_kv_list
from kvraw.adapters.lmcache._types import is_layer_list as is_layer_list
from kvraw.adapters.lmcache._types import is_mla as is_mla
from kvraw.adapters.lmcache._types import set_shape_desc_dtype as set_shape_desc_dtype
from kvraw.adapters.lmcache._utilities import compute_kv_layout as compute_kv_layout
from kvraw.adapters.lmcache._utilities import gather_paged_kv_to_cpu as gather_paged_kv_to_cpu
from kvraw.adapters.lmcache._utilities import scatter_cpu_to_paged_kv as scatter_cpu_to_paged_kv

globals().update(TransferDirection.__members__)
globals().update(EngineKVFormat.__members__)
__all__ = sorted(name for name in globals() if not name.startswith("_") and name != "annotations")


def __dir__() -> list[str]:
    return __all__
