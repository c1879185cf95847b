"""The kernel operations of `kvraw.adapters.sglang`: rows of tokens between two layouts, one row of data each."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from kvraw.adapters import tensors
from kvraw.adapters.deferred_errors import pending, pending_of, raise_deferred
from kvraw.adapters.sglang_layouts import End, Numbers, PlacedSide, Rows, place_end
from kvraw.arrays import U64, IndexVector
from kvraw.copying import pointer_tables
from kvraw.copying.addresses import resolve
from kvraw.copying.device_state import DeviceState, device_state
from kvraw.copying.indexed import IndexedLaunch
from kvraw.copying.kernel import KernelPlan
from kvraw.copying.operands import DeviceTable, Operands
from kvraw.copying.plan import CopyPlan
from kvraw.errors import BoundsError, PlacementError
from kvraw.memo import Memo
from kvraw.plain import fault, unusable
from kvraw.prepared import PreparedCopy
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import locate
from kvraw.runtime.stream import capturing

__all__ = ["INTS", "WARPS", "End", "Ids", "Numbers", "default_quota", "launch", "transfer"]

INTS, WARPS = ("int64", "int32"), 32
QUOTA_VARIABLE, QUOTA = "SGLANG_HICACHE_BLOCK_QUOTA", 2


def default_quota(given: int | None) -> int:
    """Thread blocks where the caller names none: the peer's environment variable, asked at each call, else 2."""
    if given is not None:
        return given
    text = os.environ.get(QUOTA_VARIABLE, "")
    try:
        return int(text or QUOTA)
    except ValueError:
        raise ValueError(f"environment variable {QUOTA_VARIABLE}={text!r} must be a number of thread blocks") from None


Ids = tuple[int, int, Any]
"""Indices on a device: address, bytes of one (0: each token is its own index), and what is kept alive."""


def _see(src: End, dst: End) -> tuple[object, ...]:
    """What of tensors decides how they are used, as a part of the key of what was made ready.

    Address, values, dtype, device, and True where it has no gaps, else how its values lie.
    """
    group = src[2] + dst[2]  # as many of either
    try:
        return tuple([(t.data_ptr(), t.numel(), t.dtype, t.get_device(), t.is_contiguous() or _gaps(t)) for t in group])
    except (RuntimeError, NotImplementedError) as error:  # one without memory
        named = [(name, t) for name, end in (("src", src), ("dst", dst)) for t in end[2]]
        raise unusable(*next((one for one in named if fault(one[1])), named[0]), error) from None


def _gaps(tensor: Any) -> tuple[object, ...]:
    """Bytes that a tensor with gaps reaches over, and its axes."""
    return tensors.reach(tensor), tensor.shape, tensor.stride()


class _Ready(NamedTuple):
    """What was made ready for tensors at their places.

    Attributes
    ----------
    copy : PreparedCopy or KernelPlan
        For the host, and for a GPU.
    bound : IndexedLaunch or None
        For a GPU, where nothing of the tables changes from call to call.
    """

    copy: Any
    src: PlacedSide
    dst: PlacedSide
    bound: IndexedLaunch | None = None


def _make(src: End, dst: End, numbers: Numbers, quota: int, warps: int, state: DeviceState | None, bits: int) -> _Ready:
    """Make ready all that does not change from call to call; on a GPU its context is current."""
    rows, device = Rows(*numbers), None if state is None else state.device
    ends = place_end("src", src, rows, device, bits), place_end("dst", dst, rows, device, bits)
    counts = {"layers": rows.layers or 1, "planes": len(src[2]), "tokens": 1, "heads": rows.heads}
    plan = CopyPlan(ends[0].side, ends[1].side, **counts, run=rows.item // rows.heads)
    if state is None:
        return _Ready(PreparedCopy(plan, device=None, index_names=_INDEX_NAMES), *ends)
    kernels, kind = state.bound[_KERNELS], (plan, quota, warps)
    kernel = kernels.get(kind)
    if kernel is None:  # else made for another layer
        kernel = kernels.keep(kind, KernelPlan(plan, ctas=quota, threads=warps * 32, names=_INDEX_NAMES))
    return _Ready(kernel, *ends)


def _host_table(group: tuple[Any, ...], layers: int) -> U64:
    return np.concatenate([tensors.table_array(t)[:layers] for t in group])


def _on_device(name: str, end: End, side: PlacedSide, layers: int, device: int) -> U64 | DeviceTable:
    """The addresses of an end as the device sees them."""
    if end[0] != "table" or isinstance(side.bases, DeviceTable):
        return side.bases
    found = resolve(_host_table(end[2], layers))
    if found.pageable:
        raise PlacementError(f"{name}: an address in its table is pageable host memory")
    apart = found.devices - {device}
    if apart:
        raise PlacementError(
            f"{name}: an address in its table is memory of device {min(apart)}, must be of device {device}"
        )
    return found.seen


_NONE: U64 = np.zeros(0, np.uint64)
_INDEX_NAMES = "src_indices", "dst_indices"
_NAME, _KERNELS = "sglang calls", "sglang kernels"
_on_host: Memo[tuple[object, ...], _Ready] = Memo(2048)
_taken: set[tuple[object, object, tuple[str, ...]]] = set()  # types of both indices that an operation takes


def transfer(
    src: End,
    dst: End,
    src_indices: Any,
    dst_indices: Any,
    numbers: Numbers,
    quota: int | None,
    warps: int = WARPS,
    dtypes: tuple[str, ...] = ("int64",),
) -> None:
    """Move the rows of these tokens, on the current stream of the GPU that the indices lie on.

    Where nothing at all lies on a GPU, the CPU engine moves them before the call returns.

    Raises
    ------
    RuntimeError
        What the operation has a check for, in its words.
    BoundsError, LayoutError, PlacementError, TypeError
        The rest; or what the kernel of an earlier operation on the device found.
    """
    count = src_indices.numel()
    if src[0] == "table" and src[2][0].shape[0] != numbers[1]:
        raise RuntimeError(
            f"Number of layers in source {'k ' if len(src[2]) > 1 else ''}tensor does not match num_layers"
        )
    on_gpu = src_indices.is_cuda
    if not (on_gpu and dst_indices.is_cuda) and any(t.is_cuda for t in (*src[2], *dst[2], src_indices, dst_indices)):
        raise RuntimeError(f"{'Destination' if on_gpu else 'Source'} indices must be a CUDA tensor")
    if (src_indices.dtype, dst_indices.dtype, dtypes) not in _taken:
        for which, t in (("Source", src_indices), ("Destination", dst_indices)):
            if tensors.dtype_name(t) not in dtypes:
                raise RuntimeError(f"{which} indices must be of type long")
        _taken.add((src_indices.dtype, dst_indices.dtype, dtypes))
    if count != dst_indices.numel():
        raise RuntimeError("Source and destination indices must have the same length")
    if numbers[0] % 8:
        raise RuntimeError("Item byte size must be divisible by 8")
    quota = quota or default_quota(quota)
    if quota <= 0 or not 0 < warps <= 32:
        raise BoundsError(
            f"block_quota is {quota}, num_warps_per_block {warps}: must be positive, and at most 32 warps"
        )
    if not on_gpu:
        _move_on_host(src, dst, src_indices, dst_indices, numbers, count)
        return
    device = src_indices.get_device()
    if dst_indices.get_device() != device:
        raise PlacementError(f"src_indices lie on device {device}, dst_indices on {dst_indices.get_device()}")
    at = src_indices if src_indices.is_contiguous() else src_indices.contiguous()
    to = dst_indices if dst_indices.is_contiguous() else dst_indices.contiguous()
    ids = (at.data_ptr(), at.element_size(), at), (to.data_ptr(), to.element_size(), to)
    launch(device_state(device), tensors.current_stream(device), src, dst, numbers, quota, warps, *ids, count)


def _move_on_host(src: End, dst: End, src_indices: Any, dst_indices: Any, numbers: Numbers, count: int) -> None:
    key = (src[:2], dst[:2], _see(src, dst), numbers)
    ready = _on_host.get(key)
    if ready is None:
        ready = _on_host.keep(key, _make(src, dst, numbers, 1, WARPS, None, 0))
    if count and numbers[1]:
        ends = ((src, ready.src), (dst, ready.dst))
        bases = [_host_table(e[2], numbers[1]) if e[0] == "table" else side.bases for e, side in ends]
        index = tensors.index_array(src_indices, "src_indices"), tensors.index_array(dst_indices, "dst_indices")
        ready.copy(bases[0], bases[1], count, src_index=index[0], dst_index=index[1])


def launch(
    state: DeviceState,
    stream: int,
    src: End,
    dst: End,
    numbers: Numbers,
    quota: int,
    warps: int,
    at: Ids,
    to: Ids,
    count: int,
    raising: bool = True,
) -> None:
    """Enqueue the kernel on a stream.

    What kernels of earlier operations on the device found is raised first, unless the caller did (`raising`).
    """
    device, bits = state.device, 0
    if src[0] == "table" or dst[0] == "table":
        bits = pointer_tables.known_bits(_tables(src, dst))
    key = (src[0], src[1], dst[0], dst[1], _see(src, dst), numbers, quota, warps, at[1], to[1], bits)
    ready = state.bound[_NAME].get(key)
    if raising and pending(state):
        raise_deferred(device, stream)
    bound, refs, receiver = None if ready is None or not count else ready.bound, (src, dst, at, to), pending_of(device)
    if bound is not None and bound.enqueue(stream, at[0], to[0], count, on_error=receiver, refs=refs) is not None:
        return
    again = bound is not None and state.owner.context_device() != device
    with DeviceScope(device):
        captured = capturing(stream, device)
        if bound is not None and again and not captured:  # another context was current
            done = bound.enqueue(stream, at[0], to[0], count, on_error=receiver, refs=refs)
            if done is not None:
                return
        if ready is None or not _still_pinned(ready):
            ready = _make(src, dst, numbers, quota, warps, state, bits)
            if bits != pointer_tables.UNKNOWN:
                state.bound[_NAME].keep(key, ready)
        if count and numbers[1]:
            _launch_anew(state, key, ready, stream, captured, refs, numbers[1], count)


def _launch_anew(
    state: DeviceState,
    key: tuple[Any, ...],
    ready: _Ready,
    stream: int,
    captured: bool,
    refs: tuple[End, End, Ids, Ids],
    layers: int,
    count: int,
) -> None:
    """Enqueue what is not bound, or not as things are now: the device's context is current."""
    (src, dst, at, to), device = refs, state.device
    bits, lasting = int(key[-1]), key[-1] != pointer_tables.UNKNOWN
    ends = _on_device("src", src, ready.src, layers, device), _on_device("dst", dst, ready.dst, layers, device)
    if not lasting:
        bits = pointer_tables.ask_for_bits(_tables(src, dst), state, stream)
        ends = _with_bits(ends[0], bits), _with_bits(ends[1], bits)
    pinned = (*ready.src.pinned, *ready.dst.pinned)
    lasting = lasting and all(number for _, number in pinned)
    if lasting and not captured and not any(e[0] == "table" and not e[2][0].is_cuda for e in (src, dst)):
        bound = ready.bound
        if bound is None:
            way = _way(src, dst, ready)
            bound = IndexedLaunch(state, ready.copy, ends, (at[1], to[1]), pinned=pinned, way=way)
        state.bound[_NAME].keep(key, ready._replace(bound=bound))
        if bound.enqueue(stream, at[0], to[0], count, on_error=pending_of(device), refs=refs) is not None:
            return
    index = [IndexVector(None, ids[0], count, ids[1], device, ids[2]) if ids[1] else None for ids in (at, to)]
    operands = [
        Operands(_NONE, i, e) if isinstance(e, DeviceTable) else Operands(e, i)
        for e, i in zip(ends, index, strict=True)
    ]
    operation = state.completions.begin(stream, captured=captured)
    try:
        way = _way(src, dst, ready)
        ready.copy.enqueue(state, operation, *operands, 0, count, link=True, way=way, on_error=pending_of(device))
        operation.commit(refs)
    except BaseException:
        operation.abort()
        raise


_WAYS: dict[tuple[bool | None, bool | None], str] = {
    (False, True): "store",
    (True, False): "load",
    (False, False): "copy",
}


def _way(src: End, dst: End, ready: _Ready) -> str:
    """By which side is host memory: "store", "load", "copy" (none); empty: both are, or a table does not say yet."""
    sides = _in_host_memory(src, ready.src), _in_host_memory(dst, ready.dst)
    return _WAYS.get(sides, "")


def _in_host_memory(end: End, side: PlacedSide) -> bool | None:
    if end[0] != "table":
        return bool(side.pinned)
    table = end[2][0]
    first = pointer_tables.first_address(table) if table.is_cuda else int(tensors.table_array(table)[0])
    return None if not first else locate(first, 1).device is None


def _tables(src: End, dst: End) -> tuple[Any, ...]:
    return (src[2] if src[0] == "table" else ()) + (dst[2] if dst[0] == "table" else ())


def _with_bits(end: U64 | DeviceTable, bits: int) -> U64 | DeviceTable:
    return end._replace(bits=bits) if isinstance(end, DeviceTable) else end


def _still_pinned(ready: _Ready) -> bool:
    numbers = (*ready.src.pinned, *ready.dst.pinned)
    return all(number and driver().pointer_number(address) == number for address, number in numbers)
