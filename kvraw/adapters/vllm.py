"""vLLM's block swaps: the planner takes the kernel for small blocks, the copy engine for large ones.

The copies are enqueued on torch's current stream. Where nothing lies on a GPU, they are done on return.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import numpy as np

from kvraw.adapters import tensors
from kvraw.adapters.copies import bound_copies, copy_items
from kvraw.adapters.deferred_errors import pending, raise_deferred
from kvraw.adapters.sglang_direct import known
from kvraw.addresses import require_addresses
from kvraw.arrays import I64, U64, IndexVector
from kvraw.batch import memcpy_batch
from kvraw.checks import integer
from kvraw.copying.addresses import AddressTable, resolve
from kvraw.copying.call import Call
from kvraw.copying.copy_engine import Descriptors, holder
from kvraw.copying.device_state import DeviceState, device_state
from kvraw.copying.given import extremes, join, page_starts
from kvraw.copying.plan import CopyPlan, Side
from kvraw.copying.submission import submit
from kvraw.errors import BoundsError, DriverError, LayoutError, PlacementError
from kvraw.prepared import PreparedCopy
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.host.registration import cuts_with

__all__ = ["swap_blocks", "swap_blocks_batch"]

_NAMES = ("block_mapping[:, 0]", "block_mapping[:, 1]")
MOST_VARIABLE = "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS"
_words: set[object] = set()  # torch's int64 and uint64
_FEW = 4  # sizes that are worth a plan each


class _Swap:
    """Swaps blocks of two tensors by the engine that the planner takes."""

    __slots__ = ("_copies", "_device", "_places", "_prepared", "_tables", "limits")

    def __init__(self, src: Any, dst: Any, nbytes: int) -> None:
        ends = _rows("src", src, nbytes), _rows("dst", dst, nbytes)
        sides = [Side(outer=step, limit=limit) for step, limit, _ in ends]
        plan = CopyPlan(sides[0], sides[1], layers=1, planes=1, tokens=1, heads=1, run=nbytes)
        self.limits = ends[0][1], ends[1][1]
        self._device = tensors.device_of((src, dst))
        copies = bound_copies((src, dst), [(plan, [int(src.data_ptr())], [int(dst.data_ptr())])])
        assert copies is not None
        self._copies = copies
        self._prepared = PreparedCopy(plan, device=self._device, index_names=_NAMES)
        self._places = [
            (np.array([t.data_ptr()], np.uint64), np.array([reach], np.uint64))
            for t, (_, _, reach) in zip((src, dst), ends, strict=True)
        ]
        self._tables: tuple[AddressTable, AddressTable, object] | None = None  # of host memory as it was then

    def __call__(self, at: I64, to: I64, refs: object) -> None:
        """Swap the blocks, on the current stream or on the host."""
        device = self._device
        if device is None:
            copy_items(self._copies, device, at, to, refs)
            return
        stream, state = tensors.current_stream(device), device_state(device)
        if pending(state):
            raise_deferred(device, stream)
        with DeviceScope(device):
            if not self._by_plan(state, stream, at, to, refs):
                self._copies.enqueue(state, stream, at, to, refs)

    def _by_plan(self, state: DeviceState, stream: int, at: I64, to: I64, refs: object) -> bool:
        """Enqueue it, unless the copy engine is to."""
        known, now, count = self._tables, self._copies.look(state), len(at)
        if known is None or known[2] is not now:
            found = [resolve(places, reaches, ends=True) for places, reaches in self._places]
            for name, one in zip(("src", "dst"), found, strict=True):
                if one.over is not None:
                    raise one.over.error(name)
            known = found[0], found[1], now
            self._tables = known
        src, dst, _ = known
        if src.pageable or dst.pageable:
            return False
        a, b = IndexVector(at, 0, count), IndexVector(to, 0, count)
        call = Call(src, dst, a, b, 0, count, state.owner.stream_capturing(stream), checked=True)
        return _submit(self._prepared, state, stream, call, refs)


def _submit(copy: PreparedCopy, state: DeviceState, stream: int, call: Call, refs: object = None) -> bool:
    """Enqueue a call, unless the copy engine is to."""
    bound = copy.bound
    choice = bound.choose(state, call)
    if choice.engine == "copy":
        return False
    bound.submit(state, stream, call, (refs, call), choice)
    return True


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
    mapping = tensors.host_array(block_mapping, "block_mapping")
    if mapping.size and mapping.dtype.kind not in "iu":
        raise TypeError(f"block_mapping holds {mapping.dtype}, must hold integers")
    mapping = mapping.astype(np.int64, copy=False)
    nbytes = block_size_in_bytes
    swap = known(("blocks", nbytes), ("src", "dst"), (src,), (dst,), lambda: _Swap(src, dst, nbytes))
    at = page_starts(_NAMES[0], np.ascontiguousarray(mapping[:, 0]), 1, swap.limits[0], aligned=False)
    to = page_starts(_NAMES[1], np.ascontiguousarray(mapping[:, 1]), 1, swap.limits[1], aligned=False)
    if len(at):
        swap(at, to, (src, dst))


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
    copy_batch(source, target, nbytes)


def copy_batch(source: U64, target: U64, nbytes: U64, stream: int | None = None) -> None:
    """The same with vectors, on a stream that is named, or the current one."""
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
    stream, state = tensors.current_stream(device) if stream is None else stream, device_state(device)
    if pending(state):
        raise_deferred(device, stream)
    with DeviceScope(device):
        if not pageable:
            sizes_there = [largest] if least == largest else _kinds(nbytes)
            left = _by_kernel(state, (source, target), found, nbytes, sizes_there, stream)
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
    state: DeviceState,
    given: tuple[U64, U64],
    found: tuple[AddressTable, AddressTable],
    nbytes: U64,
    kinds: list[int],
    stream: int,
) -> np.ndarray[Any, Any] | None:
    """Copy what is not the copy engine's; which entries it left, none for none of them, or None for all."""
    left: np.ndarray[Any, Any] | None = None
    capturing, one_size = state.owner.stream_capturing(stream), len(kinds) == 1
    for size in kinds:
        mine = slice(None) if one_size else nbytes == size
        src = AddressTable(given[0][mine], found[0].seen[mine], found[0].link, found[0].edges)
        dst = AddressTable(given[1][mine], found[1].seen[mine], found[1].link, found[1].edges)
        call = Call(src, dst, None, None, 0, len(src.host), capturing, checked=True)
        if not _submit(_pieces(size, state.device), state, stream, call):
            continue
        if one_size:
            return np.zeros(0, bool)
        left = np.ones(len(nbytes), bool) if left is None else left
        left[mine] = False
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
    if tensor.is_cuda or (tensor.dtype not in _words and tensors.dtype_name(tensor) not in ("int64", "uint64")):
        raise RuntimeError(f"{name} must be an int64 tensor on the CPU")
    _words.add(tensor.dtype)
    return tensors.table_array(tensor, name)
