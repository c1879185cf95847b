"""vLLM's block swaps: the planner takes the kernel for small blocks, the copy engine for large ones.

The copies are enqueued on torch's current stream. Where nothing lies on a GPU, they are done on return.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kvraw.adapters import tensors
from kvraw.adapters.sglang_direct import device_of
from kvraw.arrays import U64, IndexVector
from kvraw.batch import memcpy_batch
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.plan import CopyPlan, Side
from kvraw.prepared import PreparedCopy
from kvraw.runtime.memory import locate_all

__all__ = ["swap_blocks", "swap_blocks_batch"]

_NAMES = ("block_mapping[:, 0]", "block_mapping[:, 1]")
_FEW = 4  # sizes that are worth a plan each


@lru_cache(maxsize=256)
def _blocks(nbytes: int, limits: tuple[int, int], device: int | None, engine: str) -> PreparedCopy:
    src, dst = (Side(outer=nbytes, limit=limit) for limit in limits)
    plan = CopyPlan(src, dst, layers=1, planes=1, tokens=1, heads=1, run=nbytes)
    return PreparedCopy(plan, device=device, engine=engine, index_names=_NAMES)


@lru_cache(maxsize=256)
def _pieces(nbytes: int, device: int, engine: str) -> PreparedCopy:
    side = Side(outer=0, table_outer=1, entries=0)
    plan = CopyPlan(side, side, layers=1, planes=1, tokens=1, heads=1, run=nbytes)
    return PreparedCopy(plan, device=device, engine=engine, names=("src_ptrs", "dst_ptrs"))


def swap_blocks(src: Any, dst: Any, block_size_in_bytes: int, block_mapping: Any) -> None:
    """Copy blocks of `block_size_in_bytes`: block ``block_mapping[i, 0]`` of `src` to ``block_mapping[i, 1]`` of `dst`.

    Parameters
    ----------
    src, dst : tensor
        Without gaps, on one GPU or the host.
    block_mapping : tensor
        [n, 2] of int64, on the host.

    Raises
    ------
    BoundsError
        A block lies outside its tensor; nothing is moved.
    """
    if block_mapping.is_cuda:
        raise RuntimeError("block_mapping must be on CPU")
    if block_size_in_bytes <= 0 or len(block_mapping.shape) != 2 or block_mapping.shape[1] != 2:
        raise LayoutError(
            f"block_size_in_bytes is {block_size_in_bytes}, block_mapping has shape {tuple(block_mapping.shape)}: "
            f"must be positive, and [n, 2]"
        )
    mapping = np.asarray(block_mapping).astype(np.int64, copy=False)
    device = device_of((src, dst))
    limits = tensors.reach(src) // block_size_in_bytes, tensors.reach(dst) // block_size_in_bytes
    bases = [int(src.data_ptr())], [int(dst.data_ptr())]
    engine, stream = "auto", None
    if device is not None:
        stream = tensors.current_stream(device)
        engine = "copy" if locate_all(np.array(bases[0] + bases[1], np.uint64)).pageable else "auto"
    index = [IndexVector(np.ascontiguousarray(column), 0, len(column)) for column in mapping.T]
    copy = _blocks(block_size_in_bytes, limits, device, engine)
    copy(*bases, len(mapping), src_index=index[0], dst_index=index[1], stream=stream, refs=(src, dst))


def swap_blocks_batch(src_ptrs: Any, dst_ptrs: Any, sizes: Any, is_src_access_order_any: bool = False) -> None:
    """Copy ``sizes[i]`` bytes from address ``src_ptrs[i]`` to ``dst_ptrs[i]``.

    Parameters
    ----------
    src_ptrs, dst_ptrs, sizes : tensor
        int64, on the host. The memory is the caller's to keep until the copies are over.
    is_src_access_order_any : bool
        Taken, and not needed: sources are read in the stream's order, the stronger promise.
    """
    vectors = [_vector(n, t) for n, t in (("src_ptrs", src_ptrs), ("dst_ptrs", dst_ptrs), ("sizes", sizes))]
    source, target, nbytes = vectors
    if not len(source) == len(target) == len(nbytes):
        raise BoundsError(
            f"src_ptrs, dst_ptrs and sizes have {len(source)}, {len(target)} and {len(nbytes)} entries, must have the "
            f"same number"
        )
    if not len(nbytes):
        return
    if int(nbytes.max()) >= 1 << 62:
        at = int(nbytes.argmax())
        raise BoundsError(f"sizes[{at}] is {int(nbytes[at : at + 1].view(np.int64)[0])}, must be in [0, 2**62)")
    one_size = nbytes.min() == nbytes.max()
    found = [locate_all(v, int(nbytes[0]) if one_size else 1) for v in (source, target)]
    devices = sorted({d for one in found for d in np.unique(one.devices).tolist() if d >= 0})
    if len(devices) > 1:
        raise PlacementError(f"the memory lies on devices {devices}, must lie on one and the host")
    if not devices:
        memcpy_batch(target, source, nbytes)
        return
    stream, pageable = tensors.current_stream(devices[0]), any(one.pageable for one in found)
    kinds = [int(nbytes[0])] if one_size else np.unique(nbytes).tolist()
    if pageable or len(kinds) > _FEW:
        memcpy_batch(target, source, nbytes, stream=stream, device=devices[0], pageable=pageable)
        return
    for size in kinds:
        mine = slice(None) if len(kinds) == 1 else nbytes == size
        if size:
            to = target[mine]
            _pieces(size, devices[0], "auto")(source[mine], to, len(to), stream=stream)


def _vector(name: str, tensor: Any) -> U64:
    if tensor.is_cuda or tensors.dtype_name(tensor) not in ("int64", "uint64"):
        raise RuntimeError(f"{name} must be an int64 tensor on the CPU")
    return tensors.table_array(tensor)
