"""vLLM's block swaps: the planner takes the kernel for small blocks, the copy engine for large ones.

The copies are enqueued on torch's current stream. Where nothing lies on a GPU, they are done on return.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvraw.adapters import tensors
from kvraw.adapters.copies import bound_copies, copy_items
from kvraw.adapters.deferred_errors import pending, raise_deferred
from kvraw.adapters.sglang_direct import device_of
from kvraw.addresses import require_addresses
from kvraw.arrays import I64, U64, IndexVector
from kvraw.batch import memcpy_batch
from kvraw.checks import integer
from kvraw.copying.addresses import AddressTable, resolve
from kvraw.copying.bound_copies import BoundCopies
from kvraw.copying.copy_engine import Descriptors, holder
from kvraw.copying.device_state import DeviceState, device_state
from kvraw.copying.given import extremes, join, page_starts
from kvraw.copying.operands import Operands
from kvraw.copying.plan import CopyPlan, Side
from kvraw.copying.submission import submit
from kvraw.errors import BoundsError, DriverError, LayoutError, PlacementError
from kvraw.plain import require_memory, unusable
from kvraw.prepared import PreparedCopy
from kvraw.runtime.context import DeviceScope, at_reset
from kvraw.runtime.driver import driver
from kvraw.runtime.host.registration import cuts_with

__all__ = ["swap_blocks", "swap_blocks_batch"]

_NAMES = ("block_mapping[:, 0]", "block_mapping[:, 1]")
MOST_VARIABLE = "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS"
_FEW = 4  # sizes that are worth a plan each
_MOST = 256


class _Swap(NamedTuple):
    """What swaps blocks of two tensors: by the kernel, and by the copy engine."""

    kernel: PreparedCopy | None
    copies: BoundCopies
    places: tuple[U64, U64]
    limits: tuple[int, int]


_swaps: dict[tuple[object, ...], _Swap] = {}
at_reset(_swaps.clear)


def _swap(src: Any, dst: Any, nbytes: int, device: int | None) -> _Swap:
    ends = _rows("src", src, nbytes), _rows("dst", dst, nbytes)
    key = src.data_ptr(), dst.data_ptr(), ends, nbytes, device, src.is_cuda, dst.is_cuda
    known = _swaps.get(key)
    if known is None:
        sides = [Side(outer=step, limit=limit) for step, limit, _ in ends]
        plan = CopyPlan(sides[0], sides[1], layers=1, planes=1, tokens=1, heads=1, run=nbytes)
        copies = bound_copies((src, dst))
        copies.add(plan, [int(src.data_ptr())], [int(dst.data_ptr())])
        kernel = None if device is None else PreparedCopy(plan, device=device, index_names=_NAMES)
        if len(_swaps) >= _MOST:
            _swaps.clear()
        places = np.array([src.data_ptr(), dst.data_ptr()], np.uint64), np.array([e[2] for e in ends], np.uint64)
        known = _swaps[key] = _Swap(kernel, copies, places, (ends[0][1], ends[1][1]))
    return known


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
    device = device_of((src, dst))
    swap = _swap(src, dst, block_size_in_bytes, device)
    at, to = (
        page_starts(_NAMES[k], np.ascontiguousarray(mapping[:, k]), 1, swap.limits[k], aligned=False) for k in (0, 1)
    )
    if not len(at):
        return
    if device is not None and swap.kernel is not None:
        stream, state = tensors.current_stream(device), device_state(device)
        if pending(state):
            raise_deferred(device, stream)
        found = resolve(*swap.places, ends=True)
        if found.over is not None:
            raise found.over.error(("src", "dst")[found.over.at])
        if not found.pageable and _swap_by_kernel(swap.kernel, state, found, at, to, stream, (src, dst)):
            return
    copy_items(swap.copies, device, at, to, (src, dst), raising=False)


def _swap_by_kernel(
    kernel: PreparedCopy, state: DeviceState, found: AddressTable, at: I64, to: I64, stream: int, refs: object
) -> bool:
    with DeviceScope(state.device):
        capturing = driver().stream_capturing(stream)
        if kernel.choose(found.link, True, capturing, len(at)) == "copy":
            return False
        ends = [Operands(found.seen[k : k + 1], IndexVector(i, 0, len(i))) for k, i in enumerate((at, to))]
        kernel.launch(state, ends[0], ends[1], len(at), stream, link=found.link, captured=capturing, refs=refs)
    return True


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
    least, largest = extremes(nbytes)
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
    found = resolve(source, reach, ends=True), resolve(target, reach, ends=True)
    for name, one in zip(("src_ptrs", "dst_ptrs"), found, strict=True):
        if one.over is not None:
            at = int(np.flatnonzero(given.sizes)[one.over.at])
            raise one.over.error(f"{name}[{at}]")
    devices = found[0].devices | found[1].devices
    if len(devices) > 1:
        raise PlacementError(f"the memory lies on devices {sorted(devices)}, must lie on one and the host")
    pageable = found[0].pageable or found[1].pageable
    if pageable or not devices:
        _check_addresses(given)
    if not devices:
        for name, vector in (("src_ptrs", source), ("dst_ptrs", target)):
            require_addresses(name, vector, nbytes)
        memcpy_batch(target, source, nbytes)
        return
    (device,) = devices
    stream, state = tensors.current_stream(device), device_state(device)
    if pending(state):
        raise_deferred(device, stream)
    with DeviceScope(device):
        if not pageable:
            sizes_there = [largest] if least == largest else _kinds(nbytes)
            left = _by_kernel(state, found, nbytes, sizes_there, stream)
            if left is not None and not left.any():
                return
            if left is not None:
                source, target, nbytes = source[left], target[left], nbytes[left]
        edges = found[0].edges + found[1].edges
        merged = join(Descriptors(target, source, nbytes), cuts_with(edges))
        try:
            submit(
                state, stream, merged, pageable=pageable, edges=edges, most=None if pageable else _most_descriptors()
            )
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
    state: DeviceState, found: tuple[AddressTable, AddressTable], nbytes: U64, kinds: list[int], stream: int
) -> np.ndarray[Any, Any] | None:
    """Copy what the kernel is faster at; which entries it left, or None for all of them."""
    link, left = found[0].link or found[1].link, None
    capturing = state.owner.stream_capturing(stream)
    for size in kinds:
        copy = _pieces(size, state.device)
        mine = None if len(kinds) == 1 else nbytes == size
        count = len(nbytes) if mine is None else int(np.count_nonzero(mine))
        if copy.choose(link, True, capturing, count) == "copy":
            continue
        ends = [Operands(one.seen if mine is None else one.seen[mine]) for one in found]
        copy.launch(state, ends[0], ends[1], count, stream, link=link, captured=capturing)
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
