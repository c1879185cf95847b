"""The kernel operations of `kvraw.adapters.sglang`: rows of tokens between two layouts, one row of data each."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from kvraw.adapters import tensors
from kvraw.adapters.found import raise_found, teller
from kvraw.arrays import U64, IndexVector
from kvraw.engines.device_state import DeviceState, device_state
from kvraw.engines.operands import DeviceTable, Operands
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.plain import fault, require_plain, unusable
from kvraw.plan import CopyPlan, Side
from kvraw.prepared import PreparedCopy
from kvraw.runtime.context import DeviceScope, at_reset

__all__ = ["End", "Numbers", "Rows", "default_quota", "index_on_device", "launch", "transfer"]

NO_LIMIT = 2**62
QUOTA_VARIABLE, QUOTA = "SGLANG_HICACHE_BLOCK_QUOTA", 2


# What every call names is plain tuples: they are made anew each time, and named ones cost several times as much.
End = tuple[str, int, tuple[Any, ...]]
"""One side of an operation: layout, dim and tensors.

The layout is a name of `_STRIDES`, or "table": one base address per layer, each as "lf". The dim is the bytes of one
token of all layers ("pf", "ph", "hg"), or from one token to the next ("lf", "table"; 0: as the tensors' strides have
it, or the item for a table). The tensors are K and V, or one: memory, or tables of addresses.
"""

Numbers = tuple[int, int, int, int, int]
"""The values of `Rows`."""


class Rows(NamedTuple):
    """What moves: per token, layer and head, and K and V alike, ``item / heads`` bytes.

    Attributes
    ----------
    item : int
        Bytes of one token of one layer.
    layers, first : int
        How many layers, and the first of them on sides that hold all layers.
    page, heads : int
        Tokens of a page; heads, or groups of heads, that the layouts keep apart.
    """

    item: int
    layers: int
    first: int
    page: int
    heads: int


# Byte strides of (outer, inner, layer, head), from the item s, the dim d, the page p and the heads h.
_STRIDES: dict[str, Any] = {
    "lf": lambda s, d, p, h: (d or s, 0, 0, s // h),  # [token, head, dim] of one layer
    "pf": lambda s, d, p, h: (d, 0, s, s // h),  # [token, layer, head, dim]
    "ph": lambda s, d, p, h: (p * d, d // h, s // h, p * d // h),  # [page, head, token, layer, dim]
    "hg": lambda s, d, p, h: (p * d, s // h, p * s // h, p * d // h),  # [page, head group, layer, token, dim]
}
_PAGED = ("ph", "hg")


def default_quota(given: int | None) -> int:
    """Thread blocks where the caller names none: the peer's environment variable, asked at each call, else 2."""
    if given is not None:
        return given
    text = os.environ.get(QUOTA_VARIABLE, "")
    try:
        return int(text or QUOTA)
    except ValueError:
        raise ValueError(f"environment variable {QUOTA_VARIABLE}={text!r} must be a number of thread blocks") from None


_Fields = tuple[int, int, Any, int, object]


def _see(name: str, group: tuple[Any, ...]) -> tuple[_Fields, ...]:
    """What of tensors decides how they are used, as a part of the key of ready copies.

    Address, values, dtype, device, and True where it has no gaps, else how its values lie.
    """
    try:
        return tuple([(t.data_ptr(), t.numel(), t.dtype, t.get_device(), t.is_contiguous() or _gaps(t)) for t in group])
    except (RuntimeError, NotImplementedError) as error:  # one without memory
        raise unusable(name, next((t for t in group if fault(t)), group[0]), error) from None


def _gaps(tensor: Any) -> tuple[object, ...]:
    """Bytes that a tensor with gaps reaches over, and its axes."""
    return tensors.reach(tensor), tensor.shape, tensor.stride()


class _Seen(NamedTuple):
    """A tensor at the time a copy is made ready."""

    address: int
    values: int
    dtype: str
    is_cuda: bool
    dense: bool


def _seen(tensor: Any) -> _Seen:
    at, count, name = int(tensor.data_ptr()), int(tensor.numel()), tensors.dtype_name(tensor)
    return _Seen(at, count, name, bool(tensor.is_cuda), bool(tensor.is_contiguous()))


class _Side(NamedTuple):
    """One side of a ready copy.

    Attributes
    ----------
    side : Side
        Its strides.
    bases : numpy.ndarray
        Addresses as the host knows them; empty where a table lies on the device.
    mapped : numpy.ndarray
        As the device saw them when the copy was made ready.
    pinned : tuple of (int, int)
        The addresses of tensors in host memory, and what the device saw there: asked anew at each call, for they may
        have been unpinned.
    table : tuple of (int, int) or None
        Address and length of a table on the device.
    """

    side: Side
    bases: U64
    mapped: U64
    pinned: tuple[tuple[int, int], ...] = ()
    table: tuple[int, int] | None = None


class _Ready(NamedTuple):
    copy: PreparedCopy
    src: _Side
    dst: _Side


def _limit(layout: str, dim: int, group: tuple[Any, ...], rows: Rows, gap: int) -> int:
    """Tokens that an end holds; `gap` is of `tensors.page_gap`."""
    if layout == "lf":
        return min(int(t.numel()) * int(t.element_size()) for t in group) // rows.item
    if gap:
        return min(int(t.shape[0]) for t in group) * rows.page
    return min(tensors.reach(t) for t in group) // (dim * rows.page) * rows.page


def _check_rows(name: str, layout: str, dim: int, rows: Rows) -> None:
    if rows.item <= 0 or rows.layers < 0 or rows.page <= 0 or rows.heads <= 0:
        raise BoundsError(
            f"item_size is {rows.item}, num_layers {rows.layers}, page_size {rows.page}, head_num {rows.heads}: "
            f"must be positive"
        )
    if rows.item % rows.heads:
        raise LayoutError(f"item_size is {rows.item}, must be a multiple of head_num, {rows.heads}")
    if layout in ("lf", "table"):
        if dim and dim < rows.item:
            raise LayoutError(f"the {name} stride is {dim} bytes, an item takes {rows.item}")
    elif dim % rows.item or not 0 <= rows.first <= dim // rows.item - rows.layers:
        raise BoundsError(
            f"{name}_layout_dim is {dim}, must be a multiple of item_size, {rows.item}, that holds layers "
            f"{rows.first} to {rows.first + rows.layers}"
        )


def _check_tables(name: str, seen: tuple[_Seen, ...], rows: Rows, device: int | None) -> None:
    for t, plane in zip(seen, "kv", strict=False):
        if t.dtype not in ("uint64", "int64"):
            raise TypeError(f"the {name} {plane} table holds {t.dtype}, must hold uint64")
        if t.values < rows.layers:
            raise BoundsError(f"the {name} {plane} table has {t.values} addresses, must have {rows.layers}")
        if t.is_cuda != seen[0].is_cuda or not t.dense:
            raise PlacementError(f"the {name} tables of k and v must be dense and lie at one place")
        if t.is_cuda and device is None:
            raise PlacementError(f"the {name} table lies on a GPU, the indices do not")


def _end(name: str, end: End, rows: Rows, device: int | None) -> _Side:
    layout, dim, group = end
    for t in group:
        require_plain(name, t)
    _check_rows(name, layout, dim, rows)
    if layout == "lf" and not dim:
        dim = tensors.token_stride(name, group, rows.item)
    seen = tuple(_seen(t) for t in group)
    for t in group:
        if device is not None and t.is_cuda and t.get_device() != device:
            raise PlacementError(f"a {name} tensor lies on device {t.get_device()}, the indices on device {device}")
    steps = _STRIDES["lf" if layout == "table" else layout](rows.item, dim, rows.page, rows.heads)
    outer, inner, layer, head = steps
    gap = 0
    if layout not in ("lf", "table"):
        gap = tensors.page_gap(name, outer, group)
        outer = gap or outer
    planes, is_table = len(seen), layout == "table"
    table_plane = planes - 1
    if is_table:
        _check_tables(name, seen, rows, device)
        # On the device K's table and V's are one: what lies between them is the stride from plane to plane.
        table_plane = (seen[-1].address - seen[0].address) // 8 if seen[0].is_cuda else rows.layers * (planes - 1)
    side = Side(
        outer=outer,
        inner=inner,
        page=rows.page if layout in _PAGED else 1,
        layer=layer,
        head=head,
        table_layer=int(is_table),
        table_plane=table_plane,
        limit=NO_LIMIT if is_table else _limit(layout, dim, group, rows, gap),
        entries=rows.layers * planes if is_table else planes,
    )
    if is_table:
        return _Side(side, _NONE, _NONE, table=(seen[0].address, seen[0].values) if seen[0].is_cuda else None)
    offset = rows.first * layer
    bases = np.array([t.address + offset for t in seen], np.uint64)
    if device is None:
        return _Side(side, bases, bases)
    known = {t.address: tensors.mapped_address(name, t.address) for t in seen if not t.is_cuda}
    mapped = np.array([known.get(t.address, t.address) + offset for t in seen], np.uint64)
    return _Side(side, bases, mapped, tuple(known.items()))


def _make(src: End, dst: End, rows: Rows, ctas: int, threads: int, device: int | None) -> _Ready:
    """Make a copy ready for tensors at these places: all that does not change from call to call."""
    ends = _end("src", src, rows, device), _end("dst", dst, rows, device)
    plan = CopyPlan(
        ends[0].side,
        ends[1].side,
        layers=rows.layers or 1,
        planes=len(src[2]),
        tokens=1,
        heads=rows.heads,
        run=rows.item // rows.heads,
    )
    copy = PreparedCopy(
        plan,
        device=device,
        engine="auto" if device is None else "kernel",
        ctas=ctas,
        threads=threads,
        index_names=_INDEX_NAMES,
    )
    return _Ready(copy, *ends)


def _host_tables(group: tuple[Any, ...], layers: int) -> U64:
    return np.concatenate([tensors.table_array(t)[:layers] for t in group])


def _operands(
    name: str, end: End, side: _Side, layers: int, index: IndexVector | None, state: DeviceState, stream: int
) -> Operands | None:
    """An end as the kernel takes it; None where pinned memory is no longer what it was."""
    if side.table is not None:
        bits = 0
        for t in end[2]:
            bits |= tensors.device_table_bits(t, state, stream)
        return Operands(_NONE, index, DeviceTable(*side.table, bits))
    if end[0] == "table":
        found = tensors.find_ranges(_host_tables(end[2], layers), 1)
        if found.pageable:
            raise PlacementError(f"{name}: an address in its table is pageable host memory")
        apart = found.devices - {state.device}
        if apart:
            raise PlacementError(
                f"{name}: an address in its table is memory of device {min(apart)}, must be of device {state.device}"
            )
        return Operands(found.seen, index)
    for address, mapped in side.pinned:
        if tensors.mapped_address(name, address) != mapped:
            return None
    return Operands(side.mapped, index)


_NONE: U64 = np.zeros(0, np.uint64)
_INDEX_NAMES = "src_indices", "dst_indices"
_MOST = 2048
_known: dict[tuple[object, ...], _Ready] = {}
at_reset(_known.clear)


def transfer(
    src: End,
    dst: End,
    src_indices: Any,
    dst_indices: Any,
    numbers: Numbers,
    quota: int,
    warps: int,
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
    on_gpu = src_indices.is_cuda
    if not (on_gpu and dst_indices.is_cuda) and any(t.is_cuda for t in (*src[2], *dst[2], src_indices, dst_indices)):
        raise RuntimeError(f"{'Destination' if on_gpu else 'Source'} indices must be a CUDA tensor")
    names = tensors.dtype_name(src_indices), tensors.dtype_name(dst_indices)
    if names[0] not in dtypes or names[1] not in dtypes:
        raise RuntimeError(f"{'Destination' if names[0] in dtypes else 'Source'} indices must be of type long")
    count, layers = src_indices.numel(), numbers[1]
    if count != dst_indices.numel():
        raise RuntimeError("Source and destination indices must have the same length")
    if numbers[0] % 8:
        raise RuntimeError("Item byte size must be divisible by 8")
    if quota <= 0 or not 0 < warps <= 32:
        raise BoundsError(
            f"block_quota is {quota}, num_warps_per_block {warps}: must be positive, and at most 32 warps"
        )
    device = src_indices.get_device() if on_gpu else None
    if device is None:
        key = (src[0], src[1], _see("src", src[2]), dst[0], dst[1], _see("dst", dst[2]), numbers, quota, warps, None)
        ready = _known.get(key) or _learn(key, src, dst, numbers, quota, warps, None)
        if count and layers:
            bases = [
                r.bases if len(r.bases) else _host_tables(e[2], layers) for e, r in ((src, ready.src), (dst, ready.dst))
            ]
            index = tensors.index_array(src_indices, "src_indices"), tensors.index_array(dst_indices, "dst_indices")
            ready.copy(bases[0], bases[1], count, src_index=index[0], dst_index=index[1])
        return
    if dst_indices.get_device() != device:
        raise PlacementError(f"src_indices lie on device {device}, dst_indices on {dst_indices.get_device()}")
    at, to = index_on_device(src_indices, count, device), index_on_device(dst_indices, count, device)
    captured = raise_found(device, tensors.current_stream(device))
    launch(src, dst, numbers, quota, warps, device, at, to, count, captured)


def launch(
    src: End,
    dst: End,
    numbers: Numbers,
    quota: int,
    warps: int,
    device: int,
    at: IndexVector | None,
    to: IndexVector | None,
    count: int,
    captured: bool,
) -> None:
    """Enqueue the kernel on a device's current stream; a side without an index takes its tokens in order.

    `captured` says that a capture is in progress there.
    """
    key = (src[0], src[1], _see("src", src[2]), dst[0], dst[1], _see("dst", dst[2]), numbers, quota, warps, device)
    stream, layers = tensors.current_stream(device), numbers[1]
    with DeviceScope(device):
        ready = _known.get(key) or _learn(key, src, dst, numbers, quota, warps, device)
        if not count or not layers:
            return
        state = device_state(device)
        while True:
            reads = _operands("src", src, ready.src, layers, at, state, stream)
            writes = _operands("dst", dst, ready.dst, layers, to, state, stream)
            if reads is not None and writes is not None:
                break
            _known.clear()  # host memory was unpinned, or pinned elsewhere, since
            ready = _learn(key, src, dst, numbers, quota, warps, device)
        ready.copy.launch(
            state,
            reads,
            writes,
            count,
            stream,
            link=True,
            captured=captured,
            told=teller(device),
            refs=(src, dst, at, to),
        )


def _learn(
    key: tuple[object, ...], src: End, dst: End, numbers: Numbers, quota: int, warps: int, device: int | None
) -> _Ready:
    """Make a copy ready that is not known yet; on a GPU its context is current."""
    if len(_known) >= _MOST:
        _known.clear()
    ready = _known[key] = _make(src, dst, Rows(*numbers), quota, warps * 32, device)
    return ready


def index_on_device(index: Any, count: int, device: int) -> IndexVector:
    """Indices that lie on the device, of int64 or int32."""
    if not index.is_contiguous():
        index = index.contiguous()
    return IndexVector(None, index.data_ptr(), count, index.element_size(), device, index)
