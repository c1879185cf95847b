"""vLLM's block swaps: the planner takes the kernel for small blocks, the copy engine for large ones.

The copies are enqueued on torch's current stream. Where nothing lies on a GPU, they are done on return.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import numpy as np

from kvraw.adapters import tensors
from kvraw.adapters.found import raise_found
from kvraw.adapters.sglang_batch import enqueue
from kvraw.adapters.sglang_direct import device_of
from kvraw.addresses import require_addresses
from kvraw.arrays import U64, IndexVector
from kvraw.batch import memcpy_batch
from kvraw.checks import integer
from kvraw.engines import copy_engine
from kvraw.engines.copy_engine import Descriptors, holder
from kvraw.engines.device_state import device_state
from kvraw.engines.operands import Operands
from kvraw.errors import BoundsError, DriverError, LayoutError, PlacementError
from kvraw.plain import require_memory, unusable
from kvraw.plan import CopyPlan, Side
from kvraw.prepared import PreparedCopy, Reached
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver

__all__ = ["swap_blocks", "swap_blocks_batch"]

_NAMES = ("block_mapping[:, 0]", "block_mapping[:, 1]")
MOST_VARIABLE = "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS"
_FEW = 4  # sizes that are worth a plan each


@lru_cache(maxsize=256)
def _blocks(
    nbytes: int, steps: tuple[int, int], limits: tuple[int, int], device: int | None, engine: str
) -> PreparedCopy:
    src, dst = (Side(outer=step, limit=limit) for step, limit in zip(steps, limits, strict=True))
    plan = CopyPlan(src, dst, layers=1, planes=1, tokens=1, heads=1, run=nbytes)
    return PreparedCopy(plan, device=device, engine=engine, index_names=_NAMES)


@lru_cache(maxsize=256)
def _pieces(nbytes: int, device: int) -> PreparedCopy:
    side = Side(outer=0, table_outer=1, entries=0)
    plan = CopyPlan(side, side, layers=1, planes=1, tokens=1, heads=1, run=nbytes)
    return PreparedCopy(plan, device=device, names=("src_ptrs", "dst_ptrs"))


def _rows(name: str, tensor: Any, nbytes: int) -> tuple[int, int, int]:
    """Bytes from block to block of `nbytes`, the blocks that a tensor holds, and the bytes that they lie in."""
    reach = tensors.reach(tensor)
    if tensor.is_contiguous():
        return nbytes, reach // nbytes, reach
    shape, strides, size = tensor.shape, tensor.stride(), int(tensor.element_size())
    step = int(strides[0]) * size
    if step == max(strides) * size > 0 and nbytes % step == 0:  # stretches of memory: padding is counted
        reach = min(reach, int(shape[0]) * step)
        return nbytes, reach // nbytes, reach
    row, _ = tensors.row_of(name, shape, strides)
    if row * size != nbytes or step < nbytes:
        raise LayoutError(
            f"{name} has shape {tuple(shape)}, strides {tuple(strides)}: block_size_in_bytes is {nbytes}, must be the "
            f"{row * size} bytes of a row, or the {step} from row to row"
        )
    blocks = int(shape[0])
    return step, blocks, (blocks - 1) * step + nbytes


def swap_blocks(src: Any, dst: Any, block_size_in_bytes: int, block_mapping: Any) -> None:
    """Copy blocks of `block_size_in_bytes`: block ``block_mapping[i, 0]`` of `src` to ``block_mapping[i, 1]`` of `dst`.

    Parameters
    ----------
    src, dst : tensor
        On one GPU or the host. Where rows of `block_size_in_bytes` lie apart, their stride is kept to; where the size
        counts the padding as well, it is copied with them.
    block_mapping : tensor
        [n, 2] of int64, on the host.

    Raises
    ------
    BoundsError
        A block lies outside its tensor; nothing is moved.
    LayoutError
        A tensor with gaps has rows of another size.
    """
    if not hasattr(block_mapping, "is_cuda"):
        raise TypeError(f"block_mapping is a {type(block_mapping).__name__}, must be a tensor")
    if block_mapping.is_cuda:
        raise RuntimeError("block_mapping must be on CPU")
    block_size_in_bytes = integer("block_size_in_bytes", block_size_in_bytes)
    if block_size_in_bytes <= 0 or len(block_mapping.shape) != 2 or block_mapping.shape[1] != 2:
        raise LayoutError(
            f"block_size_in_bytes is {block_size_in_bytes}, block_mapping has shape {tuple(block_mapping.shape)}: "
            f"must be positive, and [n, 2]"
        )
    try:
        mapping = np.asarray(block_mapping)
    except (TypeError, RuntimeError) as error:
        raise unusable("block_mapping", block_mapping, error) from None
    if mapping.size and mapping.dtype.kind not in "iu":
        raise TypeError(f"block_mapping holds {mapping.dtype}, must hold integers")
    mapping = mapping.astype(np.int64, copy=False)
    for name, t in (("src", src), ("dst", dst)):
        require_memory(name, t)
    device, ends = (
        device_of((src, dst)),
        (_rows("src", src, block_size_in_bytes), _rows("dst", dst, block_size_in_bytes)),
    )
    steps, limits, spans = (ends[0][0], ends[1][0]), (ends[0][1], ends[1][1]), (ends[0][2], ends[1][2])
    bases: list[Any] = [np.array([t.data_ptr()], np.uint64) for t in (src, dst)]
    engine, stream = "auto", None
    if device is not None:
        stream = tensors.current_stream(device)
        raise_found(device, stream)
        found = [tensors.find_ranges(base, span) for base, span in zip(bases, spans, strict=True)]
        for name, one in zip(("src", "dst"), found, strict=True):
            if one.over is not None:
                raise one.over.error(name)
        bases = [Reached(b, f.seen, f.link, f.edges, f.pageable) for b, f in zip(bases, found, strict=True)]
        engine = "copy" if found[0].pageable or found[1].pageable else "auto"
    index = [IndexVector(np.ascontiguousarray(column), 0, len(column)) for column in mapping.T]
    copy = _blocks(block_size_in_bytes, steps, limits, device, engine)
    copy(bases[0], bases[1], len(mapping), src_index=index[0], dst_index=index[1], stream=stream, refs=(src, dst))


def swap_blocks_batch(src_ptrs: Any, dst_ptrs: Any, sizes: Any, is_src_access_order_any: bool = False) -> None:
    """Copy ``sizes[i]`` bytes from address ``src_ptrs[i]`` to ``dst_ptrs[i]``.

    The driver is given at most ``VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS`` copies at once, where that is set.

    Parameters
    ----------
    src_ptrs, dst_ptrs, sizes : tensor
        int64, on the host. The memory is the caller's to keep until the copies are over.
    is_src_access_order_any : bool
        Taken, and not needed: sources are read in the stream's order, the stronger promise.

    Raises
    ------
    BoundsError
        The vectors differ in length, hold something that is not a size, or reach over the end of device memory.
    DriverError
        The driver refused; `index` is the failing entry, where it told. Others may have been enqueued.
    """
    source, target, nbytes = _vector("src_ptrs", src_ptrs), _vector("dst_ptrs", dst_ptrs), _vector("sizes", sizes)
    if not len(source) == len(target) == len(nbytes):
        raise BoundsError(
            f"src_ptrs, dst_ptrs and sizes have {len(source)}, {len(target)} and {len(nbytes)} entries, must have the "
            f"same number"
        )
    if not len(nbytes):
        return
    least, largest = int(np.minimum.reduce(nbytes)), int(np.maximum.reduce(nbytes))
    if largest >= 1 << 62:
        at = int(nbytes.argmax())
        raise BoundsError(f"sizes[{at}] is {int(nbytes[at : at + 1].view(np.int64)[0])}, must be in [0, 2**62)")
    given = Descriptors(target, source, nbytes)
    if not least:  # nothing to copy, at an address that may be none
        kept = nbytes > 0
        source, target, nbytes = source[kept], target[kept], nbytes[kept]
        if not len(nbytes):
            return
    reach = largest if least == largest else nbytes
    found = tensors.find_ranges(source, reach), tensors.find_ranges(target, reach)
    for name, one in zip(("src_ptrs", "dst_ptrs"), found, strict=True):
        if one.over is not None:
            at = int(np.flatnonzero(given.sizes)[one.over.at])
            raise one.over.error(f"{name}[{at}]")
    devices = found[0].devices | found[1].devices
    if len(devices) > 1:
        raise PlacementError(f"the memory lies on devices {sorted(devices)}, must lie on one and the host")
    if not devices:
        _check_addresses(given)
        for name, vector in (("src_ptrs", source), ("dst_ptrs", target)):
            require_addresses(name, vector, nbytes)
        memcpy_batch(target, source, nbytes)
        return
    (device,) = devices
    stream, edges = tensors.current_stream(device), found[0].edges + found[1].edges
    raise_found(device, stream)
    if found[0].pageable or found[1].pageable:
        _check_addresses(given)
        enqueue(Descriptors(target, source, nbytes), device, pageable=True, edges=edges, raising=False)
        return
    left = _by_kernel(found, nbytes, [largest] if least == largest else _kinds(nbytes), device, stream)
    if left is not None:
        source, target, nbytes = source[left], target[left], nbytes[left]
    merged = copy_engine.merge(Descriptors(target, source, nbytes))
    try:
        enqueue(merged, device, edges=edges, most=_most_descriptors(), raising=False)
    except DriverError as error:
        entry = None if error.index is None else holder(given, merged, error.index)
        raise error.at(entry) from error


def _check_addresses(given: Descriptors) -> None:
    for name, addresses in (("src_ptrs", given.src), ("dst_ptrs", given.dst)):
        bad = (given.sizes > 0) & ((addresses == 0) | (addresses + given.sizes < addresses))
        if bad.any():
            at = int(bad.argmax())
            raise BoundsError(f"{name}[{at}] is {addresses[at]}, with its size must be an address below 2**64")


def _by_kernel(
    found: tuple[tensors.Ranges, tensors.Ranges], nbytes: U64, kinds: list[int], device: int, stream: int
) -> np.ndarray[Any, Any] | None:
    """Copy what the kernel is faster at; which entries it left, or None for all of them."""
    link, left = found[0].link or found[1].link, None
    with DeviceScope(device):
        capturing = driver().stream_capturing(stream)
        for size in kinds:
            copy = _pieces(size, device)
            mine = None if len(kinds) == 1 else nbytes == size
            count = len(nbytes) if mine is None else int(np.count_nonzero(mine))
            if copy.choose(link, True, capturing, count) == "copy":
                continue
            ends = [Operands(one.seen if mine is None else one.seen[mine]) for one in found]
            copy.launch(device_state(device), ends[0], ends[1], count, stream, link=link, captured=capturing)
            gone = np.ones(count, bool) if mine is None else mine
            left = ~gone if left is None else left & ~gone
    return left


def _kinds(nbytes: U64) -> list[int]:
    """The sizes that are there, where they are few; else none."""
    kinds: list[int] = []
    while len(nbytes):
        if len(kinds) == _FEW:
            return []
        kinds.append(int(nbytes[0]))
        nbytes = nbytes[nbytes != nbytes[0]]
    return kinds


def _most_descriptors() -> int | None:
    """The most descriptors of a driver call that the peer's environment variable names, asked at each call."""
    text = os.environ.get(MOST_VARIABLE, "")
    try:
        most = int(text or 0)
        if most < 0:
            raise ValueError
    except ValueError:
        raise ValueError(f"environment variable {MOST_VARIABLE}={text!r} must be a number of descriptors") from None
    return most or None


def _vector(name: str, tensor: Any) -> U64:
    if not hasattr(tensor, "is_cuda"):
        raise TypeError(f"{name} is a {type(tensor).__name__}, must be a tensor")
    if tensor.is_cuda or tensors.dtype_name(tensor) not in ("int64", "uint64"):
        raise RuntimeError(f"{name} must be an int64 tensor on the CPU")
    return tensors.table_array(tensor, name)
