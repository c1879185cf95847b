"""vLLM's copies between GPU and host memory, put in the place of its own by ``vllm.general_plugins``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvraw.adapters import vllm
from kvraw.adapters.stand_in import put
from kvraw.arrays import I64, U64, index_vector
from kvraw.errors import BoundsError, LayoutError

__all__ = ["BatchMemcpyParams", "build_params", "copy_blocks", "install", "swap_blocks_batch"]


def swap_blocks_batch(
    src_addrs: Any, dst_addrs: Any, sizes: Any, is_src_access_order_any: bool = False, *, bytes_per_chunk: int
) -> None:
    """What vLLM does by a Triton kernel for small blocks; `bytes_per_chunk` has no meaning here."""
    vllm.swap_blocks_batch(src_addrs, dst_addrs, sizes, is_src_access_order_any)


class BatchMemcpyParams(NamedTuple):
    """What calls of `copy_blocks` have in common: addresses and bytes of a block by layer, blocks, the stream."""

    src_bases: U64
    dst_bases: U64
    bpb: U64
    num_layers: int
    stream_handle: int
    limits: tuple[int, int]


def _ends(caches: dict[str, Any]) -> tuple[U64, U64, int]:
    held = list(caches.values())
    bases = np.array([t.data_ptr() for t in held], np.uint64)
    steps = np.array([int(t.stride()[0]) * t.element_size() for t in held], np.uint64)
    return bases, steps, min((int(t.shape[0]) for t in held), default=0)


def build_params(
    src_caches: dict[str, Any], dst_caches: dict[str, Any], stream: Any, src_access_order: int = 3
) -> BatchMemcpyParams:
    """Make ready copies of blocks between layers' caches of the same names; sources are read in the stream's order."""
    if list(src_caches) != list(dst_caches):
        raise LayoutError(f"src_caches has {list(src_caches)}, dst_caches {list(dst_caches)}; must have the same names")
    (src, steps, held), (dst, others, room) = _ends(src_caches), _ends(dst_caches)
    for name, one, other in zip(src_caches, steps.tolist(), others.tolist(), strict=True):
        if one != other:
            raise LayoutError(f"{name}: blocks lie {one} bytes apart in src_caches, {other} in dst_caches")
    return BatchMemcpyParams(src, dst, steps, len(src), int(getattr(stream, "cuda_stream", 0)), (held, room))


def _blocks(name: str, ids: Any, limit: int) -> I64:
    found = index_vector(name, ids).host
    assert found is not None  # lists
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < limit:
        at = int(np.flatnonzero((found < 0) | (found >= limit))[0])
        raise BoundsError(f"{name}[{at}] is {found[at]}, must be in [0, {limit})")
    return found


def copy_blocks(src_block_ids: list[int], dst_block_ids: list[int], params: BatchMemcpyParams) -> None:
    """Copy blocks of all layers on the stream of `params`."""
    at = _blocks("src_block_ids", src_block_ids, params.limits[0])
    to = _blocks("dst_block_ids", dst_block_ids, params.limits[1])
    if len(at) != len(to):
        raise BoundsError(f"src_block_ids has {len(at)} entries, dst_block_ids {len(to)}; must have the same number")
    steps = params.bpb[:, None]
    src = (params.src_bases[:, None] + at.astype(np.uint64) * steps).ravel()
    dst = (params.dst_bases[:, None] + to.astype(np.uint64) * steps).ravel()
    vllm.copy_batch(src, dst, np.repeat(params.bpb, len(at)), params.stream_handle)


def _operations() -> dict[str, Any]:
    return {"swap_blocks": vllm.swap_blocks, "swap_blocks_batch": vllm.swap_blocks_batch}


def install() -> None:
    """Make vLLM use kvraw in this process, now and whenever the modules are loaded. Idempotent; imports nothing."""
    put("vllm._custom_ops", _operations)
    put("vllm.v1.kv_offload.cpu.swap_blocks_triton", lambda: {"swap_blocks_batch": swap_blocks_batch})
    names = {"BatchMemcpyParams": BatchMemcpyParams, "build_params": build_params, "copy_blocks": copy_blocks}
    put("vllm.v1.simple_kv_offload.cuda_mem_ops", lambda: names)
